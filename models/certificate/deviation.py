"""Bounds the distance between two vectors x and x~ after each operation of a network: x is the computed vector (the
window's), and x~ is any vector within a given distance (the uninterrupted run's).

All functions work on a batch of B rows. Each row has its own x and its own bound of the distance, its radius. A
`Deviation` bounds the difference of two vectors both entry by entry and by its 2-norm, because neither bound implies
the other.

The radius includes float64's rounding: the error of each computed value is added to the radius
(`models/certificate/admissible.py` states this error). The radius therefore bounds the distance between the computed
value and the value in exact arithmetic. Radii themselves are sums and products of non-negative numbers, with a relative
error of about 1e-13. The final results are multiplied once by 1 + MARGIN, which covers this error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wane.models.certificate.interval_rounding import Matrix, Vector, roundoff
from wane.models.reference.functions import sigmoid

LARGE = 50.0
"""If a pre-activation may change by more than this value, its sigmoid may change from 0 to 1 and has no useful bound.
"""

FAR = 1e100
"""Represents the absence of a bound. Its square is finite."""

BEYOND = 1e80
"""A bound above this value counts as no bound. This value is smaller than FAR, so that FAR still counts as no bound
after a product with a matrix of small entries."""

TINY = 1e-300

MARGIN = 1e-9
"""The relative margin of radii. It is far above the rounding of the sums and products of non-negative numbers from
which radii are computed."""

ULP = 2.0**-50
"""The assumed relative error of exp, tanh and similar functions in float64, together with the few operations before and
after the function."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Bounds of the difference of two vectors: |x~ - x| <= box entry by entry, (B, H), and |x~ - x|_2 <= ball, (B).
    no_box: whether `box` was derived from `ball` alone."""

    box: Matrix
    ball: Vector
    no_box: bool = False

    @classmethod
    def within(cls, box: Matrix, ball: Vector | None = None) -> Deviation:
        """Builds a deviation from `box` and, if given, `ball`. Each of the two bounds is reduced to the value that the
        other one implies."""
        length = np.linalg.norm(box, axis=1)
        ball = length if ball is None else np.minimum(ball, length)
        return cls(np.minimum(box, ball[:, None]), ball)

    @classmethod
    def ball_only(cls, ball: Vector, width: int) -> Deviation:
        """Builds a deviation of `width` entries from a 2-norm bound alone, which also bounds each entry."""
        return cls(np.broadcast_to(ball[:, None], (len(ball), width)), ball, no_box=True)


class Linear:
    """A matrix (R, I) with its bias (R) and the norms that bound its effect on a deviation.

    `off` (R): the bound of the bias's own error, without the rounding of the sum to which it is added.
    """

    def __init__(self, weight: Matrix, bias: Vector | float = 0.0, off: Vector | float = 0.0) -> None:
        self.weight = weight
        self.bias = np.zeros(len(weight)) + bias
        self.rows = np.linalg.norm(weight, axis=1)
        self._off = roundoff(weight.shape[1]) * np.abs(self.bias) + off

    @cached_property
    def magnitude(self) -> Matrix:
        """The absolute value of each entry of the matrix: (R, I)."""
        result: Matrix = np.abs(self.weight)
        return result

    @cached_property
    def norm(self) -> float:
        """The matrix's spectral norm, rounded up. Its relative error is a few units of rounding per dimension."""
        return float(np.linalg.norm(self.weight, 2)) * (1 + roundoff(4 * max(self.weight.shape)))

    @cached_property
    def _gram(self) -> Matrix:
        result: Matrix = (self.weight @ self.weight.T) ** 2
        return result

    @classmethod
    def behind_norm(cls, weight: Matrix, bias: Vector, gain: Vector, shift: Vector) -> Linear:
        """Returns the linear map from n, the normalised vector of a LayerNorm, to `weight (gain * n + shift) + bias`.
        The entries of n sum to zero, and so do those of the difference of two normalised vectors."""
        scaled = weight * gain
        off = roundoff(weight.shape[1]) * (np.abs(weight) @ np.abs(shift) + np.linalg.norm(scaled, axis=1))
        once = scaled - scaled.mean(axis=1, keepdims=True)
        return cls(once - once.mean(axis=1, keepdims=True), weight @ shift + bias, off)

    def __call__(self, x: Matrix) -> Matrix:
        result: Matrix = x @ self.weight.T + self.bias
        return result

    def rounding(self, x: Matrix) -> Matrix:
        """Returns a bound of the rounding error of `self(x)`, entry by entry: (B, R)."""
        length = np.linalg.norm(x, axis=1, keepdims=True)
        result: Matrix = roundoff(self.weight.shape[1]) * length * self.rows + self._off
        return result

    def moved(self, x: Deviation) -> Matrix:
        """Returns a bound of the change of `self(x)` if x changes by at most the given deviation, entry by entry: (B,
        R)."""
        by_ball: Matrix = x.ball[:, None] * self.rows
        return by_ball if x.no_box else np.minimum(x.box @ self.magnitude.T, by_ball)

    def furthest(self, box: Matrix) -> Vector:
        """Returns an upper bound of `|weight d|_2` over all d with |d_i| <= box_i: (B, I) -> (B).

        `|W d|^2 = sum_ij d_i d_j (W' W)_ij <= sum_ij box_i box_j |(W' W)_ij|`. The off-diagonal terms are small if the
        columns of W are nearly orthogonal, like those of a wide matrix.
        """
        box, between = _nonzero(box, self._between_columns)
        result: Vector = np.sqrt(np.einsum("bi,bi->b", box @ between, box))
        return result

    @cached_property
    def _between_columns(self) -> Matrix:
        columns = np.linalg.norm(self.weight, axis=0)
        result: Matrix = np.abs(self.weight.T @ self.weight) + roundoff(len(self.weight)) * columns[:, None] * columns
        return result

    def scaled_norm(self, scale: Matrix) -> Vector:
        """Returns an upper bound of the spectral norm `|diag(scale) weight|_2`, for scale >= 0: (B, R) -> (B).

        The result is the smaller of two bounds. The first is the largest entry of `scale` times the matrix's spectral
        norm. The second is the Schatten 4-norm of A = diag(scale) weight, which is an upper bound because `|A|_2^4 <=
        |A A'|_F^2`.
        """
        squares, gram = _nonzero(scale**2, self._gram)
        schatten = np.einsum("br,br->b", squares @ gram, squares) ** 0.25
        result: Vector = np.minimum(scale.max(axis=1) * self.norm, schatten)
        return result


def _nonzero(rows: Matrix, square: Matrix) -> tuple[Matrix, Matrix]:
    """Returns `rows` (B, I) without the columns that are zero in every row, and `square` (I, I) without the same rows
    and columns."""
    used = np.flatnonzero(np.any(rows, axis=0))
    return (rows, square) if len(used) == len(square) else (rows[:, used], square[np.ix_(used, used)])


def sigmoid_rise(pre: Matrix, radius: Matrix) -> Matrix:
    """Returns the largest change of the logistic function if its argument changes by at most `radius`.

    Let p be the argument, r the radius, s = sigma(p) and E = exp(r) - 1. Then sigma(p + r) - s = s (1 - s) E / (1 + s
    E), and s - sigma(p - r) = s (1 - s) E / (1 + (1 - s) E). The result is the larger of the two, which has the smaller
    denominator. These formulas avoid cancellation.
    """
    up, down = sigmoid(pre), sigmoid(-pre)
    growth = np.expm1(np.minimum(radius, LARGE))
    rise = up * down * growth / (1 + np.minimum(up, down) * growth)
    result: Matrix = np.where(radius < LARGE, rise, np.maximum(up, down))
    return result


def tanh_rise(pre: Matrix, radius: Matrix) -> Matrix:
    """Returns the largest change of tanh(p) = 2 sigma(2 p) - 1 if its argument changes by at most `radius`."""
    return 2 * sigmoid_rise(2 * pre, 2 * radius)


def sigmoid_slope(pre: Matrix, radius: Matrix) -> Matrix:
    """Returns the greatest derivative of the logistic function within `radius` of `pre`."""
    nearest = np.maximum(0, np.abs(pre) - radius)
    result: Matrix = sigmoid(nearest) * sigmoid(-nearest)
    return result


def tanh_slope(pre: Matrix, radius: Matrix) -> Matrix:
    """Returns the greatest derivative of tanh within `radius` of `pre`."""
    return 4 * sigmoid_slope(2 * pre, 2 * radius)


def longest(kept: Matrix, deviation: Deviation) -> Vector:
    """Returns an upper bound of `|kept * d|_2` over all differences d within the deviation, for kept >= 0: (B, H) ->
    (B)."""
    result: Vector = np.minimum(np.linalg.norm(kept * deviation.box, axis=1), kept.max(axis=1) * deviation.ball)
    return result
