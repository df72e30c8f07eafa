"""Bounds the distance of predicted distributions by the distance of hidden states.

Let V_a be the output rows, and D the largest distance of two rows. If two hidden states are at most e apart in the
2-norm, their logit gaps `l_a - l_b` are at most `|V_a - V_b|_2 e <= D e` apart. Distributions whose log-odds differ by
at most g differ in total variation by at most tanh(g / 4). Two tokens can attain this bound. At temperature tau it is
tanh(g / (4 tau)). Bounds of each token's logit give a sharper result (`variation_by_token`).
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.deviation import MARGIN
from wane.models.certificate.interval_rounding import TINY, Matrix, Vector, roundoff

EXACT_ROWS = 16_384
"""Up to this vocabulary size, D is the maximum over all pairs. For a larger vocabulary, D is twice the radius around
the rows' mean."""

ROWS_AT_ONCE = 256

MOST_MOVED = 700.0
"""Above this value the exponential is not finite, and the bound is 1."""

TANH_MARGIN = 1e-15
"""The largest relative error of float64's tanh: a few units in the last place."""


def head_diameter(rows: Matrix) -> float:
    """Returns D, rounded up: `max |V_a - V_b|_2` over the rows (V, H).

    Squared distances are sums of squares of the centred rows, so that no large terms cancel. The rounding of the sums
    is added. Rows are compared in order of length, longest first, each with the rows before it. The distance is at most
    the sum of the row's length and the greatest length. The search stops when that sum is no more than the largest
    distance found.
    """
    centred = rows - rows.mean(axis=0)
    squares = np.einsum("vh,vh->v", centred, centred)
    relative = roundoff(4 * rows.shape[1])
    off = 4 * relative * float(squares.max()) + 4 * (relative * float(np.abs(rows).max())) ** 2 * rows.shape[1]
    if len(rows) > EXACT_ROWS:
        return float(2 * np.sqrt(squares.max() + off) * (1 + relative))
    order = np.argsort(-squares)
    centred, squares = centred[order], squares[order]
    lengths, largest = np.sqrt(squares), 0.0
    for start in range(0, len(rows), ROWS_AT_ONCE):
        if (lengths[0] + lengths[start]) ** 2 <= largest:
            break
        stop = start + ROWS_AT_ONCE
        gram = centred[start:stop] @ centred[:stop].T
        distances = squares[start:stop, None] + squares[None, : gram.shape[1]] - 2 * gram
        largest = max(largest, float(distances.max()))
    return float(np.sqrt(largest + off) * (1 + relative))


def total_variation(diameter: float, state_error: Vector) -> Vector:
    """Returns epsilon for each e_k, rounded up."""
    bound: Vector = np.minimum(np.tanh(diameter * state_error / 4 * (1 + 4 * TANH_MARGIN)) * (1 + TANH_MARGIN), 1.0)
    return bound


def variation_by_token(shares: Vector, moved: Vector, off: float = 0.0) -> float:
    """Bounds the total variation of p (V), positive, and p~ proportional to `p_j exp(eta_j)`, rounded up. |eta_j| is at
    most `moved` (V), and `sum_j p_j eta_j` is at most `off` away from 0.

    First let off be 0. The sum of the exponentials is at least 1 (Jensen). The variation is the total gain of the
    tokens that gain, and therefore at most their `sum p_j (exp(eta_j) - 1)`. Their `sum p_j eta_j` equals that of the
    tokens that lose, so it is at most half of `sum p_j moved_j`. By convexity `exp(eta_j) - 1 <= eta_j c_j`, c =
    (exp(moved) - 1) / moved. The bound therefore assigns that half to the tokens with the largest c. To first order it
    is `sum p_j moved_j / 2`.

    If off is not 0, the same argument is applied to eta + off, which gives the same p~ and whose weighted sum is
    between 0 and 2 off. Two tokens' logits move apart by at most twice the largest `moved`. The variation is therefore
    also at most the tanh of half of the largest `moved`.
    """
    moved = moved + off
    if not float(moved.max()) < MOST_MOVED:
        return 1.0
    weights = shares * moved
    order = np.argsort(-moved)
    taken = np.minimum(np.cumsum(weights[order]), float(weights.sum()) / 2 + off)
    steep = np.where(moved > 0, np.expm1(moved) / np.maximum(moved, TINY), 1.0)
    sought = float(np.diff(taken, prepend=0.0) @ steep[order])
    return min(sought, float(np.tanh(moved.max() / 2)), 1.0) * (1 + MARGIN)
