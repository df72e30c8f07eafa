"""The functions of the oracle's equations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def sigmoid(x: Array) -> Array:
    """Returns the logistic function, without overflow or cancellation."""
    small = np.exp(-np.abs(x))
    result: Array = np.where(x >= 0, 1.0, small) / (1 + small)
    return result


def candidate(function: str, x: Array) -> Array:
    """Returns the candidates of a gated or leaky layer: "tanh", "identity", or "positive", which is x + 0.5 for x >= 0,
    else sigmoid(x)."""
    if function == "positive":
        return np.where(x >= 0, x + 0.5, sigmoid(x))
    return np.tanh(x) if function == "tanh" else x


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    """Returns weight * (x - mean) / sqrt(variance + epsilon) + bias, over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    result: Array = centred / np.sqrt(variance + epsilon) * weight + bias
    return result


def affine(x: Array, weight: Array, bias: Array) -> Array:
    """Returns the linear map of x: (..., I), weight: (R, I), bias: (R) -> (..., R)."""
    return x @ weight.T + bias
