"""Outward rounding in float64: a computed bound is never below the exact one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

UNIT = 2.0**-53
"""float64's unit roundoff."""

SPARE = 16
"""Roundings added to a sum's own: those of the functions that computed its terms, and second orders."""

UP = 1 + 1e-11
"""Factor that rounds up a sum of up to 40,000 non-negative products, or a few elementary functions."""

TINY = 1e-140
"""Lower limit of stated distances, whose square must not underflow."""


def roundoff(terms: int) -> float:
    """Returns the error of a float64 sum of products, in any order, per unit of the sum of their absolute values."""
    return (terms + SPARE) * UNIT


def product_above(magnitude: Matrix, bound: Vector) -> Vector:
    """Returns `magnitude @ bound` from above, both without negative entries; (R, I) and (I)."""
    result: Vector = (magnitude @ bound) * (1 + roundoff(len(bound)))
    return result


def norm_above(vector: Vector) -> float:
    """Returns the 2-norm, from above."""
    return float(np.sqrt(vector @ vector)) * UP


def spectral_norm(matrix: Matrix) -> float:
    """Returns the largest singular value, from above, by the Gram matrix, whose largest eigenvalue does not cancel.

    The error of its entries is roundoff times products of rows' lengths, so that of the matrix is roundoff times the
    squared Frobenius norm, and that of LAPACK's eigenvalue is no larger.
    """
    if not matrix.size:
        return 0.0
    scale = float(np.abs(matrix).max())
    if not (0 < scale < np.inf):
        return scale
    matrix = matrix / scale
    gram = matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix
    off = 2 * roundoff(max(matrix.shape)) * float(np.trace(gram))
    return float(np.sqrt(np.linalg.eigvalsh(gram)[-1] + off)) * UP * scale
