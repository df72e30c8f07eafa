"""The causal convolution: `y_t = activation(sum_j K_j x_(t - j d) + b)`. If it is depthwise, K_j is diagonal."""

from __future__ import annotations

import numpy as np

from wane.models.layer_registry import Convolution
from wane.models.reference.functions import Array, sigmoid
from wane.models.weights import CellWeights


def step(cell: CellWeights, x: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the output and the state after one token. state: the earlier inputs, oldest first."""
    layer, weight = cell.layer, cell.tensors["weight"]
    assert isinstance(layer, Convolution)
    inputs = np.concatenate([state[0], x[:, None]], axis=1)
    read = inputs[:, :: layer.dilation]
    if layer.channels == "depthwise":
        read = np.concatenate([read] * (layer.rows // layer.units), axis=2)
        y = (read * weight).sum(axis=1)
    else:
        y = np.einsum("bki,kri->br", read, weight)
    y = y + cell.tensors.get("bias", 0.0)
    value, gate = y[:, : layer.units], y[:, layer.units :]
    if layer.activation == "relu":
        value = np.maximum(value, 0)
    elif layer.activation in ("tanh", "wavenet"):
        value = np.tanh(value)
    if layer.activation in ("glu", "wavenet"):
        value = value * sigmoid(gate)
    return value, inputs[:, 1:]
