"""The weights file: a safetensors file of float32 tensors, named and shaped by the architecture.

It is the one copy of the weights: the oracle, the certificate and the ONNX graphs (by offset) all read these bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from wane.models.manifest import Architecture, Cell

Weights = Mapping[str, NDArray[np.float32]]

GATES: dict[Cell, int] = {"linear": 1, "rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4, "gated": 2}
"""Blocks of rows in a cell's matrices, in torch's order: gru r, z, n; lstm i, f, g, o; gated f, z."""


class WeightsError(Exception):
    """The tensors do not fit the architecture: which one, what was expected, what was found."""


def weight_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the weights file and its shape, bottom to top."""
    hidden, feed_forward, units = architecture.hidden, architecture.feed_forward, architecture.cell_units
    rows = GATES[architecture.cell] * units
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (architecture.vocabulary_size, architecture.embedding)}
    if (front := architecture.front) is not None:
        for block in range(front.blocks):
            prefix = f"front.{block}."
            shapes |= {
                prefix + "norm.weight": (hidden,),
                prefix + "norm.bias": (hidden,),
                prefix + "convolution.weight": (front.kernel_size, hidden),
                prefix + "feed_forward_in.weight": (front.feed_forward, hidden),
                prefix + "feed_forward_in.bias": (front.feed_forward,),
                prefix + "feed_forward_out.weight": (hidden, front.feed_forward),
                prefix + "feed_forward_out.bias": (hidden,),
            }
    for layer in range(architecture.layers):
        prefix = f"layers.{layer}."
        inputs = architecture.embedding if layer == 0 else hidden
        if architecture.block == "residual":
            shapes |= {prefix + "norm.weight": (hidden,), prefix + "norm.bias": (hidden,)}
        if architecture.cell == "gated":
            shapes |= {prefix + "cell.weight": (rows, inputs), prefix + "cell.bias": (rows,)}
        else:
            shapes |= {
                prefix + "cell.weight_ih_l0": (rows, inputs),
                prefix + "cell.weight_hh_l0": (rows, units),
                prefix + "cell.bias_ih_l0": (rows,),
                prefix + "cell.bias_hh_l0": (rows,),
            }
        if architecture.block == "residual":
            shapes[prefix + "mix.weight"] = (hidden, units)
            if feed_forward:
                shapes |= {
                    prefix + "feed_forward_norm.weight": (hidden,),
                    prefix + "feed_forward_norm.bias": (hidden,),
                    prefix + "feed_forward_in.weight": (feed_forward, hidden),
                    prefix + "feed_forward_in.bias": (feed_forward,),
                    prefix + "feed_forward_out.weight": (hidden, feed_forward),
                    prefix + "feed_forward_out.bias": (hidden,),
                }
    if architecture.block == "residual":
        shapes |= {"norm.weight": (hidden,), "norm.bias": (hidden,)}
    if not architecture.tied:
        shapes["head.weight"] = (architecture.vocabulary_size, hidden)
    shapes["head.bias"] = (architecture.vocabulary_size,)
    return shapes


def head_weight(weights: Weights) -> NDArray[np.float32]:
    """The output matrix, (V, H): the embedding where the two are tied."""
    return weights["head.weight" if "head.weight" in weights else "embedding.weight"]


def check_weights(architecture: Architecture, weights: Weights) -> None:
    """Raises WeightsError unless names, shapes and dtypes are the architecture's and every value is finite."""
    expected = weight_shapes(architecture)
    for name in expected:
        if name not in weights:
            raise WeightsError(f"tensor {name} is missing")
    for name, tensor in weights.items():
        if name not in expected:
            raise WeightsError(f"tensor {name} is not one of the architecture's")
        if tensor.dtype != np.float32:
            raise WeightsError(f"tensor {name} is {tensor.dtype}, expected float32")
        if tensor.shape != expected[name]:
            raise WeightsError(f"tensor {name} has shape {list(tensor.shape)}, expected {list(expected[name])}")
        if not np.isfinite(tensor).all():
            raise WeightsError(f"tensor {name} holds a value that is not finite")


def encode_weights(weights: Weights) -> bytes:
    """The weights as the bytes of a safetensors file."""
    data: bytes = save({name: np.ascontiguousarray(tensor) for name, tensor in weights.items()})
    return data


def decode_weights(data: bytes) -> dict[str, NDArray[np.float32]]:
    """The tensors of a safetensors file. Raises WeightsError where the bytes are none."""
    try:
        tensors: dict[str, NDArray[np.float32]] = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise WeightsError(f"not a safetensors file: {error}") from error
    return tensors


def tensor_extents(data: bytes) -> dict[str, tuple[int, int]]:
    """Where each tensor lies in a safetensors file: (offset from the file's start, length), in bytes."""
    header_length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_length])
    start = 8 + header_length
    return {
        name: (start + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
