"""Leaky units: `f = cap * sigma(b_f),  z = g(U x + b_z),  s' = f * s + (1 - f) * z`."""

from __future__ import annotations

import numpy as np

from wane.models.layer_registry import Leaky
from wane.models.reference.functions import Array, affine, candidate, sigmoid
from wane.models.weights import CellWeights


def step(cell: CellWeights, x: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the state after one token."""
    assert isinstance(cell.layer, Leaky)
    gate, bias = np.split(cell.tensors["bias"], 2)
    f, driven = cell.layer.cap * sigmoid(gate), affine(x, cell.tensors["weight"], bias)
    z = candidate(cell.layer.candidate, driven)
    return (f * state[0] + (1 - f) * z,)
