"""The weights file: a safetensors file of float32 tensors, named and shaped by the architecture.

It is the only copy of the weights in a bundle. The oracle and the certificate read it, and the ONNX graphs refer to its
bytes by offset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from wane.models.cell_registry import CELLS, Cell, CellInfo
from wane.models.manifest import Architecture

Weights = Mapping[str, NDArray[np.float32]]


class WeightsError(Exception):
    """Raised if the tensors do not fit the architecture. The message names the tensor and the expected and actual
    values."""


def weight_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of the weights file, bottom to top."""
    hidden, feed_forward, units = architecture.hidden, architecture.feed_forward, architecture.cell_units
    cell = CELLS[architecture.cell]
    rows = cell.gates * units
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
        inputs = architecture.cell_inputs(layer)
        if architecture.block == "residual":
            shapes |= {prefix + "norm.weight": (hidden,), prefix + "norm.bias": (hidden,)}
        shapes |= {f"{prefix}cell.{name}": shape for name, shape in _cell_shapes(cell, rows, inputs, units).items()}
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


def _cell_shapes(cell: CellInfo, rows: int, inputs: int, units: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a cell's tensors, weights before biases."""
    weight, bias = cell.input_tensors
    if cell.recurrent_tensors is None:
        return {weight: (rows, inputs), bias: (rows,)}
    recurrent_weight, recurrent_bias = cell.recurrent_tensors
    return {weight: (rows, inputs), recurrent_weight: (rows, units), bias: (rows,), recurrent_bias: (rows,)}


Affine = tuple[NDArray[np.float64], NDArray[np.float64]]
"""A weight matrix, (rows, columns), and its bias, (rows)."""


@dataclass(frozen=True, slots=True)
class CellWeights:
    """The weights of one layer's cell: the weight and bias for the input and, unless the cell is input-gated, for the
    state."""

    cell: Cell
    gate_cap: float
    input: Affine
    _recurrent: Affine | None

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        layer: int,
        weights: Mapping[str, NDArray[np.floating]],
        dtype: type[np.float64 | np.float32] = np.float64,
    ) -> CellWeights:
        """Returns the weights of one layer's cell. `weights` are those of the whole network, by the names of the
        weights file."""

        def read(name: str) -> NDArray[np.float64]:
            tensor: NDArray[np.float64] = weights[f"layers.{layer}.cell.{name}"].astype(dtype)
            return tensor

        cell = CELLS[architecture.cell]
        weight, bias = (read(name) for name in cell.input_tensors)
        recurrent = None
        if cell.recurrent_tensors is not None:
            recurrent_weight, recurrent_bias = (read(name) for name in cell.recurrent_tensors)
            recurrent = recurrent_weight, recurrent_bias
        return cls(architecture.cell, architecture.gate_cap(layer), (weight, bias), recurrent)

    @property
    def recurrent(self) -> Affine:
        """The recurrent weight, (gates * H, H), and bias, (gates * H)."""
        assert self._recurrent is not None, "an input-gated cell has no recurrent matrix: this is a bug"
        return self._recurrent


def head_weight(weights: Weights) -> NDArray[np.float32]:
    """Returns the output matrix, (V, H). It is the embedding if the two are tied."""
    return weights["head.weight" if "head.weight" in weights else "embedding.weight"]


def check_weights(architecture: Architecture, weights: Weights) -> None:
    """Raises WeightsError unless names, shapes and dtypes match the architecture and every value is finite."""
    expected = weight_shapes(architecture)
    for name in expected:
        if name not in weights:
            raise WeightsError(f"tensor {name} is missing")
    for name, tensor in weights.items():
        if name not in expected:
            raise WeightsError(f"tensor {name} is not a tensor of the architecture")
        if tensor.dtype != np.float32:
            raise WeightsError(f"tensor {name} is {tensor.dtype}, expected float32")
        if tensor.shape != expected[name]:
            raise WeightsError(f"tensor {name} has shape {list(tensor.shape)}, expected {list(expected[name])}")
        if not np.isfinite(tensor).all():
            raise WeightsError(f"tensor {name} holds a value that is not finite")


def encode_weights(weights: Weights) -> bytes:
    """Returns the weights as the bytes of a safetensors file."""
    data: bytes = save({name: np.ascontiguousarray(tensor) for name, tensor in weights.items()})
    return data


def decode_weights(data: bytes) -> dict[str, NDArray[np.float32]]:
    """Returns the tensors of a safetensors file. Raises WeightsError if the bytes are invalid."""
    try:
        tensors: dict[str, NDArray[np.float32]] = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise WeightsError(f"not a safetensors file: {error}") from error
    return tensors


def tensor_extents(data: bytes) -> dict[str, tuple[int, int]]:
    """Returns the range of each tensor's bytes in a safetensors file: (offset from the file's start, length)."""
    header_length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_length])
    start = 8 + header_length
    return {
        name: (start + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
