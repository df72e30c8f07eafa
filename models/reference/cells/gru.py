"""The GRU, Cho et al. 2014, in torch's form, in which the reset gate multiplies the product of the recurrent matrix and
the state:

r = sigma(U_r x + b_r + W_r h + d_r),  z = sigma(U_z x + b_z + W_z h + d_z)
n = tanh(U_n x + b_n + r * (W_n h + d_n)),  h' = (1 - z) * n + z * h
"""

from __future__ import annotations

import numpy as np

from wane.models.reference.functions import Array, affine, sigmoid
from wane.models.weights import CellWeights


def step(cell: CellWeights, x: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the state after one token."""
    h = state[0]
    u_r, u_z, u_n = np.split(affine(x, *cell.input), 3, axis=-1)
    w_r, w_z, w_n = np.split(affine(h, *cell.recurrent), 3, axis=-1)
    r, z = sigmoid(u_r + w_r), sigmoid(u_z + w_z)
    n = np.tanh(u_n + r * w_n)
    return ((1 - z) * n + z * h,)
