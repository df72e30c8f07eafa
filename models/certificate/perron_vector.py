"""Computes the positive weights of a maximum norm in which one step reduces the bounds of differences the most.

A comparison T maps non-negative bounds of the differences before a step to bounds of the differences after it. T is
monotone, and T(a d) = a T(d) for a > 0. If T(w) <= r w unit by unit for a positive w, then d <= a w implies T(d) <= r a
w: the maximum norm weighted by w is multiplied by at most r (Collatz and Wielandt). For a matrix the best w is its
Perron vector and r its spectral radius.

w is computed by iteration and need not be exact: the stated factor is the largest T(w)_i / w_i, rounded up, which holds
for any w.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wane.models.certificate.interval_rounding import UP, Matrix, Vector

ITERATIONS = 120

LEAST = 1e-6
"""The lower limit of a weight relative to the largest weight. Without this limit, units that do not affect other units
would have weight 0."""


def perron_vector(comparison: Callable[[Vector], Vector], size: int) -> tuple[float, Vector]:
    """Returns the factor by which one step multiplies the weighted norm, rounded up, and the norm's weights (size). The
    largest weight is 1."""
    weights = np.ones(size)
    best, chosen = np.inf, weights
    for _ in range(ITERATIONS):
        after = comparison(weights)
        factor = float(np.max(after / weights)) * UP
        if not np.isfinite(factor):
            break
        if factor < best:
            best, chosen = factor, weights
        # The average with the previous weights makes the iteration converge even for a permutation matrix.
        weights = (after / after.max() + weights) / 2 if after.max() > 0 else weights
        weights = np.maximum(weights / weights.max(), LEAST)
    return best, chosen


def perron_vector_2x2(matrix: Matrix) -> tuple[float, Vector]:
    """Returns the spectral radius, rounded up, and the Perron vector (largest entry 1) of a positive 2 x 2 matrix."""
    (a, b), (c, d) = matrix
    half, slant = (a - d) / 2, np.hypot((a - d) / 2, np.sqrt(b) * np.sqrt(c))
    # Let r be the largest eigenvalue. Then slant - half is r - a, and slant + half is r - d.
    vector = np.array([b, slant - half]) if d > a else np.array([slant + half, c])
    vector = vector / vector.max()
    return float(np.max(matrix @ vector / vector)) * UP, vector
