"""Rounding outward in float64: what is computed is never less than what is meant."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

UNIT = 2.0**-53
"""float64's unit roundoff."""

SPARE = 16
"""Roundings allowed for beside a sum's own: those of the few functions that made its terms, and second orders."""

UP = 1 + 1e-11
"""What a sum of up to 40,000 non-negative products, or a few elementary functions, is multiplied by to be above."""

TINY = 1e-140
"""No distance is stated smaller: its square must not underflow."""


def roundoff(terms: int) -> float:
    """How far a sum of products is off in float64, in any order, per unit of the sum of their absolute values."""
    return (terms + SPARE) * UNIT


def product_above(magnitude: Matrix, bound: Vector) -> Vector:
    """`magnitude @ bound` from above, both without a negative entry; (R, I) and (I)."""
    result: Vector = (magnitude @ bound) * (1 + roundoff(len(bound)))
    return result


def norm_above(vector: Vector) -> float:
    """The 2-norm, from above."""
    return float(np.sqrt(vector @ vector)) * UP


def spectral_norm(matrix: Matrix) -> float:
    """The largest singular value, from above: by the Gram matrix, whose largest eigenvalue does not cancel.

    Its entries are off by roundoff times products of rows' lengths, so all of it by that times the squared Frobenius
    norm, and LAPACK's eigenvalue by no more.
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
