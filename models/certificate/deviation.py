"""How far a value that is known only to within a radius is from the one that was computed, one operation at a time.

Everything is batched: B rows, each with its own computed value and its own radius. A `Deviation` bounds the difference
of two vectors twice over, entry by entry and by its 2-norm, since neither bound implies the other's best.

Float64's own rounding is part of the radius, not of the theorem's fine print: where a value is computed, what its
computation may be off by is added (`models/certificate/admissible.py` has the unit), so that the radius holds between
the value as computed here and that of exact arithmetic. What radii are made of, sums and products of non-negative
numbers, is off by some 1e-13 relative, which is left to one margin at the end, MARGIN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wane.models.certificate.interval_rounding import Matrix, Vector, roundoff
from wane.models.reference.functions import sigmoid

LARGE = 50.0
"""A pre-activation that may move by more than this moves its sigmoid from end to end."""

FAR = 1e100
"""Stands for no bound at all, and leaves room for its square."""

BEYOND = 1e80
"""What is not bounded by less is not bounded: leaves room for what small matrices make of FAR."""

TINY = 1e-300

MARGIN = 1e-9
"""Relative: what radii are made of is positive, and float64 adds and multiplies it to far better than this."""

ULP = 2.0**-50
"""Of exp, tanh and the like and the few operations around them, relative."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """|x~ - x| <= box entry by entry, (B, H), and |x~ - x|_2 <= ball, (B); no_box: the ball is all that is known."""

    box: Matrix
    ball: Vector
    no_box: bool = False

    @classmethod
    def within(cls, box: Matrix, ball: Vector | None = None) -> Deviation:
        """Each bound, made no larger than what the other implies."""
        length = np.linalg.norm(box, axis=1)
        ball = length if ball is None else np.minimum(ball, length)
        return cls(np.minimum(box, ball[:, None]), ball)

    @classmethod
    def ball_only(cls, ball: Vector, width: int) -> Deviation:
        """What a ball says of each entry is the ball."""
        return cls(np.broadcast_to(ball[:, None], (len(ball), width)), ball, no_box=True)


class Linear:
    """A matrix (R, I) with the norms that bound what it makes of a deviation, and its bias (R).

    `off` (R) is how far the bias may be off, beyond one rounding.
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
        """The matrix's spectral norm, from above: it is computed to a few units of rounding per dimension, relative."""
        return float(np.linalg.norm(self.weight, 2)) * (1 + roundoff(4 * max(self.weight.shape)))

    @cached_property
    def _gram(self) -> Matrix:
        result: Matrix = (self.weight @ self.weight.T) ** 2
        return result

    @classmethod
    def behind_norm(cls, weight: Matrix, bias: Vector, gain: Vector, shift: Vector) -> Linear:
        """`weight (gain * n + shift) + bias` as a function of n, whose entries sum to zero, as differences of n do."""
        scaled = weight * gain
        off = roundoff(weight.shape[1]) * (np.abs(weight) @ np.abs(shift) + np.linalg.norm(scaled, axis=1))
        once = scaled - scaled.mean(axis=1, keepdims=True)
        return cls(once - once.mean(axis=1, keepdims=True), weight @ shift + bias, off)

    def __call__(self, x: Matrix) -> Matrix:
        result: Matrix = x @ self.weight.T + self.bias
        return result

    def rounding(self, x: Matrix) -> Matrix:
        """How far `self(x)` is off, entry by entry: (B, R)."""
        length = np.linalg.norm(x, axis=1, keepdims=True)
        result: Matrix = roundoff(self.weight.shape[1]) * length * self.rows + self._off
        return result

    def moved(self, x: Deviation) -> Matrix:
        """Entry by entry, how far the product moves: (B, R)."""
        by_ball: Matrix = x.ball[:, None] * self.rows
        return by_ball if x.no_box else np.minimum(x.box @ self.magnitude.T, by_ball)

    def furthest(self, box: Matrix) -> Vector:
        """The greatest `|weight d|_2` over all |d_i| <= box_i, from above: (B, I) -> (B).

        `|W d|^2 = sum_ij d_i d_j (W' W)_ij`, of which each term is at most its magnitude: columns that are nearly at
        right angles, as those of a wide matrix are, hardly add up.
        """
        result: Vector = np.sqrt(np.einsum("bi,bi->b", box @ self._between_columns, box))
        return result

    @cached_property
    def _between_columns(self) -> Matrix:
        columns = np.linalg.norm(self.weight, axis=0)
        result: Matrix = np.abs(self.weight.T @ self.weight) + roundoff(len(self.weight)) * columns[:, None] * columns
        return result

    def scaled_norm(self, scale: Matrix) -> Vector:
        """`|diag(scale) weight|_2` from above, scale >= 0: (B, R) -> (B).

        The largest of `scale` times the matrix's norm, or, as `|A|_2^4 <= |A A'|_F^2`, the Schatten 4-norm.
        """
        squares = scale**2
        schatten = np.einsum("br,br->b", squares @ self._gram, squares) ** 0.25
        result: Vector = np.minimum(scale.max(axis=1) * self.norm, schatten)
        return result


def sigmoid_rise(pre: Matrix, radius: Matrix) -> Matrix:
    """The most that the logistic function moves where its argument moves by at most `radius`, without cancellation.

    With s = sigma(p) and E = exp(r) - 1: sigma(p + r) - s = s (1 - s) E / (1 + s E), and downward the same with 1 - s
    for s; the smaller denominator gives the larger.
    """
    up, down = sigmoid(pre), sigmoid(-pre)
    growth = np.expm1(np.minimum(radius, LARGE))
    rise = up * down * growth / (1 + np.minimum(up, down) * growth)
    result: Matrix = np.where(radius < LARGE, rise, np.maximum(up, down))
    return result


def tanh_rise(pre: Matrix, radius: Matrix) -> Matrix:
    """The same for tanh(p) = 2 sigma(2 p) - 1."""
    return 2 * sigmoid_rise(2 * pre, 2 * radius)


def sigmoid_slope(pre: Matrix, radius: Matrix) -> Matrix:
    """The greatest derivative of the logistic function within `radius` of `pre`."""
    nearest = np.maximum(0, np.abs(pre) - radius)
    result: Matrix = sigmoid(nearest) * sigmoid(-nearest)
    return result


def tanh_slope(pre: Matrix, radius: Matrix) -> Matrix:
    """The greatest derivative of tanh within `radius` of `pre`."""
    return 4 * sigmoid_slope(2 * pre, 2 * radius)


def longest(kept: Matrix, deviation: Deviation) -> Vector:
    """The greatest `|kept * d|_2` over all d within the deviation, from above, kept >= 0: (B, H) -> (B)."""
    result: Vector = np.minimum(np.linalg.norm(kept * deviation.box, axis=1), kept.max(axis=1) * deviation.ball)
    return result
