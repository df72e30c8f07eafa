"""Bounds the distance of two predicted distributions by the distance of the two hidden states.

Let W_a be the row of the output matrix for token a, and D the largest distance of two rows. If two hidden states are at
most e apart in the 2-norm, the differences of two logits `l_a - l_b` are at most `|W_a - W_b|_2 e <= D e` apart. If the
log-odds `l_a - l_b` of two distributions differ by at most g, their total variation is at most tanh(g / 4).
Distributions over two tokens can attain this bound. At temperature tau the bound is tanh(g / (4 tau)). Bounds of each
token's logit give a sharper result (`variation_by_token`).
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.deviation import MARGIN
from wane.models.certificate.interval_rounding import TINY, Matrix, Vector, roundoff

EXACT_ROWS = 16_384
"""Up to this vocabulary size, D is the largest distance over all pairs of rows. For a larger vocabulary, D is twice the
largest distance of a row from the rows' mean."""

ROWS_AT_ONCE = 256

MOST_MOVED = 700.0
"""If a logit may change by this value or more, the bound of the total variation is 1, so that no exponential overflows.
"""

TANH_MARGIN = 1e-15
"""The largest relative error of float64's tanh: a few units in the last place."""


def head_diameter(rows: Matrix) -> float:
    """Returns D, rounded up: the largest distance of two of the rows (V, H), or an upper bound of it if there are more
    than EXACT_ROWS rows.

    Squared distances are computed from the rows minus their mean, so that no large terms cancel. The rounding of the
    sums is added. The rows are sorted by length, longest first, and each row is compared with all rows before it. The
    distance of two rows is at most the sum of their lengths. The search stops when the current row's length plus the
    greatest length is at most the largest distance found.
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
    """Returns epsilon, the bound of the total variation, for each e_k in `state_error`, rounded up."""
    bound: Vector = np.minimum(np.tanh(diameter * state_error / 4 * (1 + 4 * TANH_MARGIN)) * (1 + TANH_MARGIN), 1.0)
    return bound


def variation_by_token(shares: Vector, moved: Vector, off: float = 0.0) -> float:
    """Bounds the total variation of p (V), positive, and p~ proportional to `p_j exp(eta_j)`, rounded up. |eta_j| is at
    most `moved` (V), and `sum_j p_j eta_j` is at most `off` away from 0.

    First let off be 0, so `sum_j p_j eta_j` is 0. `sum_j p_j exp(eta_j)` is at least 1 (Jensen), so only tokens with
    eta_j > 0 can become more probable. The variation is the sum of the increases of probability, which is at most `sum
    p_j (exp(eta_j) - 1)` over the tokens with eta_j > 0. Over these tokens, `sum p_j eta_j` is minus the sum over the
    tokens with eta_j < 0. The absolute values of the two sums together are at most `sum_j p_j moved_j`, so each is at
    most half of it. By convexity, `exp(eta_j) - 1 <= eta_j c_j` with c_j = (exp(moved_j) - 1) / moved_j. The bound is
    the largest value of `sum p_j eta_j c_j` for which eta_j <= moved_j and `sum p_j eta_j` is at most this half. It is
    reached if eta_j = moved_j for the tokens with the largest c_j, added one by one until `sum p_j eta_j` is the half.
    To first order the bound is `sum_j p_j moved_j / 2`.

    If off is not 0, the same argument is applied to eta_j + off, which is at most moved_j + off. These values give the
    same p~, and `sum_j p_j (eta_j + off)` is between 0 and 2 off. The difference of two logits changes by at most twice
    the largest `moved`. The variation is therefore also at most tanh of half of the largest `moved`.
    """
    moved = moved + off
    if not float(moved.max()) < MOST_MOVED:
        return 1.0
    weights = shares * moved
    order = np.argsort(-moved)
    taken = np.minimum(np.cumsum(weights[order]), float(weights.sum()) / 2 + off)
    steep = np.where(moved > 0, np.expm1(moved) / np.maximum(moved, TINY), 1.0)
    taken[1:] -= taken[:-1].copy()
    sought = float(taken @ steep[order])
    return min(sought, float(np.tanh(moved.max() / 2)), 1.0) * (1 + MARGIN)
