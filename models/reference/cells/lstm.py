"""The LSTM, Hochreiter and Schmidhuber 1997 with the forget gate of Gers et al. 2000:

i, f, o = sigma(U x + b + W h + d) by gate,  g = tanh(U_g x + b_g + W_g h + d_g)
c' = f * c + i * g,  h' = o * tanh(c')
"""

from __future__ import annotations

import numpy as np

from wane.models.reference.functions import Array, affine, sigmoid
from wane.models.weights import CellWeights


def step(cell: CellWeights, x: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the state after one token."""
    h, c = state
    i, f, g, o = np.split(affine(x, *cell.input) + affine(h, *cell.recurrent), 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return (sigmoid(o) * np.tanh(c), c)
