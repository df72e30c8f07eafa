"""The RNN: `h' = rho(W h + d + U x + b)`, rho = tanh (`rnn_tanh`) or max(0, .) (`rnn_relu`)."""

from __future__ import annotations

import numpy as np

from wane.models.reference.functions import Array, affine
from wane.models.weights import CellWeights


def step(cell: CellWeights, x: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the state after one token."""
    pre = affine(x, *cell.input) + affine(state[0], *cell.recurrent)
    return (np.tanh(pre) if cell.layer.kind == "rnn_tanh" else np.maximum(pre, 0),)
