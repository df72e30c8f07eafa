"""The linear cell: `h' = W h + d + U x + b`."""

from __future__ import annotations

from wane.models.reference.functions import Array, affine
from wane.models.weights import CellWeights


def step(cell: CellWeights, x: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the state after one token."""
    return (affine(x, *cell.input) + affine(state[0], *cell.recurrent),)
