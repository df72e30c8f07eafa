"""From a distance of hidden states to a distance of answers.

With output rows V_a, two hidden states at most e apart in the 2-norm have logit gaps `l_a - l_b` at most
`|V_a - V_b|_2 e <= D e` apart, D the largest distance of two rows. Distributions whose log-odds differ by at most g
differ in total variation by at most tanh(g / 4), which two tokens attain. At temperature tau it is tanh(g / (4 tau)).

Where it is known token by token how far its logit moves, there is more to say (`variation_by_token`).
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.deviation import MARGIN
from wane.models.certificate.interval_rounding import TINY, Matrix, Vector, roundoff

EXACT_ROWS = 16_384
"""Up to this vocabulary D is the maximum over all pairs; beyond, twice the radius around the rows' mean."""

ROWS_AT_ONCE = 256

MOST_MOVED = 700.0
"""Of more, the exponential is not finite, and there is nothing to say."""

TANH_MARGIN = 1e-15
"""float64's tanh is this far off, relatively, at most: a few units in the last place."""


def head_diameter(rows: Matrix) -> float:
    """D from above: `max |V_a - V_b|_2` over the rows (V, H).

    Squared distances are sums of squares of the centred rows, so that nothing large cancels; what does, is covered by
    the rounding of the sums. Longest first, a row is held against those before it; it is further from none of them than
    its length and the longest, and when that is no more than what was found, the rest need not be looked at.
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
    """epsilon for each e_k, from above."""
    bound: Vector = np.minimum(np.tanh(diameter * state_error / 4 * (1 + 4 * TANH_MARGIN)) * (1 + TANH_MARGIN), 1.0)
    return bound


def variation_by_token(shares: Vector, moved: Vector, off: float = 0.0) -> float:
    """The total variation of p (V), positive, and p~ proportional to `p_j exp(eta_j)`, from above, where |eta_j| is at
    most `moved` (V) and `sum_j p_j eta_j` no further from 0 than `off`.

    Say off is 0. The sum of the exponentials is then at least 1 (Jensen), so the variation, that of the tokens that
    gain, is at most their `sum p_j (exp(eta_j) - 1)`; and `sum p_j eta_j` of these is that of the ones that lose, so no
    more than half of `sum p_j moved_j`. By convexity `exp(eta_j) - 1 <= eta_j c_j`, c = (exp(moved) - 1) / moved; what
    is left is to fill that half where c is largest. To first order it is `sum p_j moved_j / 2`. If off is not 0, eta is
    that much less than what sums to between 0 and 2 off. And as no two tokens part by more than twice the largest of
    `moved`, it is at most the tanh of half of that.
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
