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

from wane.models.architecture import Architecture, Placed
from wane.models.layer_registry import Finite, LayerSpec

Weights = Mapping[str, NDArray[np.float32]]


class WeightsError(Exception):
    """Raised if the tensors do not fit the architecture. The message names the tensor and the expected and actual
    values."""


def weight_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of the weights file, bottom to top."""
    hidden = architecture.hidden
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (architecture.vocabulary_size, architecture.embedding)}
    for placed in architecture.placed():
        shapes |= {f"{placed.name}.{name}": shape for name, shape in _layer_shapes(placed, hidden).items()}
    if architecture.residual:
        shapes |= {"norm.weight": (hidden,), "norm.bias": (hidden,)}
    if not architecture.tied:
        shapes["head.weight"] = (architecture.vocabulary_size, hidden)
    shapes["head.bias"] = (architecture.vocabulary_size,)
    return shapes


def _layer_shapes(placed: Placed, hidden: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's tensors."""
    layer = placed.layer
    cell = layer.tensors(placed.inputs)
    if layer.block == "plain":
        return {f"cell.{name}": shape for name, shape in cell.items()}
    norm: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,), "norm.bias": (hidden,)}
    feed_forward: dict[str, tuple[int, ...]] = {
        "feed_forward_in.weight": (layer.feed_forward, hidden),
        "feed_forward_in.bias": (layer.feed_forward,),
        "feed_forward_out.weight": (hidden, layer.feed_forward),
        "feed_forward_out.bias": (hidden,),
    }
    if layer.block == "front":
        return norm | {f"{layer.kind}.{name}": shape for name, shape in cell.items()} | feed_forward
    shapes = norm | {f"cell.{name}": shape for name, shape in cell.items()} | {"mix.weight": (hidden, layer.units)}
    if isinstance(layer, Finite) and layer.skip:
        shapes["skip.weight"] = (hidden, layer.units)
    if layer.feed_forward:
        shapes |= {"feed_forward_norm.weight": (hidden,), "feed_forward_norm.bias": (hidden,)} | feed_forward
    return shapes


Affine = tuple[NDArray[np.float64], NDArray[np.float64]]
"""A weight matrix, (rows, columns), and its bias, (rows)."""


@dataclass(frozen=True, slots=True)
class CellWeights:
    """The weights of one layer's cell.

    layer: the layer's fields. tensors: the cell's tensors, by the names of `LayerSpec.tensors`.
    """

    layer: LayerSpec
    tensors: dict[str, NDArray[np.float64]]

    @classmethod
    def of(
        cls,
        placed: Placed,
        weights: Mapping[str, NDArray[np.floating]],
        dtype: type[np.float64 | np.float32] = np.float64,
    ) -> CellWeights:
        """Returns the weights of one layer's cell. `weights` are those of the whole network, by the names of the
        weights file."""
        layer = placed.layer
        names = layer.tensors(placed.inputs)
        return cls(layer, {name: weights[f"{placed.cell}.{name}"].astype(dtype) for name in names})

    @property
    def input(self) -> Affine:
        """The weight, (gates * units, I), and the bias, (gates * units), for the input. The weight of constant gates is
        0."""
        weight, bias = (self.tensors[name] for name in self.layer.input_tensors)
        missing = len(bias) - len(weight)
        return (
            np.concatenate([np.zeros((missing, weight.shape[1]), weight.dtype), weight]) if missing else weight
        ), bias

    @property
    def recurrent(self) -> Affine:
        """The recurrent weight, (gates * units, units), and bias, (gates * units)."""
        names = self.layer.recurrent_tensors
        assert names is not None, "the cell has no recurrent matrix: this is a bug"
        return self.tensors[names[0]], self.tensors[names[1]]


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
