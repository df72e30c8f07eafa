"""Outward rounding in float64: a computed upper bound is never below the exact value."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

UNIT = 2.0**-53
"""float64's unit roundoff."""

SPARE = 16
"""The number that `roundoff` adds to a sum's number of terms. It covers the rounding of the functions that computed the
terms, and second-order errors."""

UP = 1 + 1e-11
"""The factor that rounds up a sum of up to 40,000 non-negative products, or the result of a few elementary functions.
"""

TINY = 1e-140
"""The lower limit of stated distances. Its square does not underflow."""


def roundoff(terms: int) -> float:
    """Returns a bound of the error of a float64 sum of `terms` products, in any order, relative to the sum of the
    products' absolute values."""
    return (terms + SPARE) * UNIT


def gamma(terms: int, unit: float) -> float:
    """Returns a bound of the error of a sum of `terms` products, in any order, relative to the sum of the products'
    absolute values. unit: the unit roundoff of the products and sums."""
    return terms * unit / (1 - terms * unit)


def product_above(magnitude: Matrix, bound: Vector) -> Vector:
    """Returns `magnitude @ bound`, rounded up. magnitude: (R, I), bound: (I), both non-negative."""
    result: Vector = (magnitude @ bound) * (1 + roundoff(len(bound)))
    return result


def norm_above(vector: Vector) -> float:
    """Returns the 2-norm, rounded up."""
    return float(np.sqrt(vector @ vector)) * UP


def spectral_norm(matrix: Matrix) -> float:
    """Returns the largest singular value, rounded up.

    It is the square root of the largest eigenvalue of the Gram matrix. The error of each entry of the Gram matrix is at
    most the roundoff times the product of two rows' lengths. The error of the Gram matrix is therefore at most the
    roundoff times the squared Frobenius norm. The error of LAPACK's eigenvalue is no larger.
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
