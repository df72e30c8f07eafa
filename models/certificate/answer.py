"""From a distance of hidden states to a distance of answers.

With output rows V_a, two hidden states at most e apart in the 2-norm have logit gaps `l_a - l_b` at most
`|V_a - V_b|_2 e <= D e` apart, D the largest distance of two rows. Distributions whose log-odds differ by at most g
differ in total variation by at most tanh(g / 4), which two tokens attain. At temperature tau it is tanh(g / (4 tau)).
"""

from __future__ import annotations

import numpy as np

from models.certificate.outward import Matrix, Vector, roundoff

EXACT_ROWS = 16_384
"""Up to this vocabulary D is the maximum over all pairs; beyond, twice the radius around the rows' mean."""

ROWS_AT_ONCE = 256

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
