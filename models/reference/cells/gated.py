"""The gated cell: `f = cap * sigma(U_f x + b_f),  z = g(U_z x + b_z),  s' = f * s + (1 - f) * z`."""

from __future__ import annotations

import numpy as np

from wane.models.layer_registry import InputGated
from wane.models.reference.functions import Array, affine, candidate, sigmoid
from wane.models.weights import CellWeights


def step(cell: CellWeights, x: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the state after one token."""
    assert isinstance(cell.layer, InputGated)
    gate, driven = np.split(affine(x, *cell.input), 2, axis=-1)
    f = cell.layer.cap * sigmoid(gate)
    z = candidate(cell.layer.candidate, driven)
    return (f * state[0] + (1 - f) * z,)
