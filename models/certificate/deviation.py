"""How far a value that is known only to within a radius is from the one that was computed, one operation at a time.

Everything is batched: B rows, each with its own computed value and its own radius. A `Deviation` bounds the difference
of two vectors twice over, entry by entry and by its 2-norm, since neither bound implies the other's best.

Float64's own rounding is part of the radius, not of the theorem's fine print: where a value is computed, what its
computation may be off by is added (`models/certificate/admissible.py` has the unit), so that the radius holds between
the value as computed here and that of exact arithmetic. What radii are made of, sums and products of non-negative
numbers, is off by some 1e-13 relative, which is left to one margin at the end (`models/certificate/request.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.certificate.admissible import Matrix, Vector, roundoff
from models.reference import sigmoid

LARGE = 50.0
"""A pre-activation that may move by more than this moves its sigmoid from end to end."""

ULP = 2.0**-50
"""Of exp, tanh and the like and the few operations around them, relative."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """|x~ - x| <= box entry by entry, (B, H), and |x~ - x|_2 <= ball, (B)."""

    box: Matrix
    ball: Vector

    @classmethod
    def within(cls, box: Matrix, ball: Vector | None = None) -> Deviation:
        """Each bound, made no larger than what the other implies."""
        length = np.linalg.norm(box, axis=1)
        ball = length if ball is None else np.minimum(ball, length)
        return cls(np.minimum(box, ball[:, None]), ball)


class Linear:
    """A matrix (R, I) with the norms that bound what it makes of a deviation, and its bias (R).

    `off` (R) is how far the bias may be off, beyond one rounding.
    """

    def __init__(self, weight: Matrix, bias: Vector | float = 0.0, off: Vector | float = 0.0) -> None:
        self.weight = weight
        self.bias = np.zeros(len(weight)) + bias
        self.magnitude = np.abs(weight)
        self.rows = np.linalg.norm(weight, axis=1)
        self._off = roundoff(weight.shape[1]) * np.abs(self.bias) + off
        self._gram = (weight @ weight.T) ** 2
        # a spectral norm is computed to a few units of rounding per dimension, relative
        self.norm = float(np.linalg.norm(weight, 2)) * (1 + roundoff(4 * max(weight.shape)))

    @classmethod
    def behind_norm(cls, weight: Matrix, bias: Vector, gain: Vector, shift: Vector) -> Linear:
        """`weight (gain * n + shift) + bias` as a function of n, whose entries sum to zero, as differences of n do."""
        scaled = weight * gain
        off = roundoff(weight.shape[1]) * (np.abs(weight) @ np.abs(shift) + np.linalg.norm(scaled, axis=1))
        return cls(scaled - scaled.mean(axis=1, keepdims=True), weight @ shift + bias, off)

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
        result: Matrix = np.minimum(x.box @ self.magnitude.T, x.ball[:, None] * self.rows)
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
    """The greatest `|kept * d|_2` over all d within the deviation, kept >= 0: (B, H) -> (B).

    The most of the ball's squared length goes where `kept` is largest, as far as the box lets it.
    """
    order = np.argsort(-kept, axis=1)
    factors = np.take_along_axis(kept, order, axis=1) ** 2
    room = np.take_along_axis(deviation.box, order, axis=1) ** 2
    before = np.cumsum(room, axis=1) - room
    spent = np.clip(deviation.ball[:, None] ** 2 - before, 0, room)
    result: Vector = np.sqrt((factors * spent).sum(axis=1))
    return result


def normalised(x: Matrix, epsilon: float, ball: Vector) -> tuple[Matrix, Vector]:
    """A LayerNorm without gain and shift: (x - mean) / sqrt(variance + epsilon), and how far in the 2-norm it is
    from that of any x~ with |x~ - x|_2 <= ball.

    Let v be x less its mean. Centring shortens differences, and `n = sqrt(d) v / w`, w = sqrt(|v|^2 + d epsilon), is
    sqrt(d) times the unit vector along v with sqrt(d epsilon) for one more coordinate. Two such vectors at most r
    apart, one of them w long, are at most asin(r / w) apart in angle. For larger r, as both roots are at least
    sqrt(d epsilon), |n - n~| <= r / sqrt(epsilon); and neither n is longer than its own |v| allows.
    """
    width = x.shape[1]
    relative = roundoff(width)
    centred = x - x.mean(axis=1, keepdims=True)
    length = np.linalg.norm(centred, axis=1)
    whole = np.sqrt(length**2 + width * epsilon)
    n = np.sqrt(width) * centred / whole[:, None]

    # centring is off by relative * |x|, entry by entry; that moves n as the same deviation of x would
    ball = ball + relative * np.sqrt(width) * np.abs(x).max(axis=1)
    turned = np.arcsin(np.minimum(ball / whole, 1.0))
    near = np.where(ball < whole, 2 * np.sqrt(width) * np.sin(turned / 2), np.inf)
    farthest = length + ball
    apart = np.sqrt(width) * (length / whole + farthest / np.sqrt(farthest**2 + width * epsilon))
    moved = np.minimum(np.minimum(near, apart), ball / np.sqrt(epsilon))
    return n, moved + relative * np.sqrt(width)
