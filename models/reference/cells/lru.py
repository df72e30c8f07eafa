"""The linear recurrent unit: `s' = lambda * s + U x + b` for complex s, `lambda = exp(-exp(nu) + i exp(theta))`."""

from __future__ import annotations

import numpy as np

from wane.models.reference.functions import Array, affine
from wane.models.weights import CellWeights


def step(cell: CellWeights, x: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the state after one token."""
    inflow, before = affine(x, *cell.input), state[0]
    half = inflow.shape[-1] // 2
    decay = np.exp(-np.exp(cell.tensors["nu"]) + 1j * np.exp(cell.tensors["theta"]))
    after = decay * (before[:, :half] + 1j * before[:, half:]) + inflow[:, :half] + 1j * inflow[:, half:]
    result: Array = np.concatenate([after.real, after.imag], axis=1).astype(before.dtype)
    return (result,)
