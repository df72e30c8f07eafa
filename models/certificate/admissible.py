"""The admissible inputs of a layer (all that a token sequence can cause), and the ranges of its pre-activations.

The first layer's inputs are the embeddings of finitely many tokens, so its bounds are exact maxima over the tokens. The
input of a higher layer is bounded by a box (|x_i| <= b_i) or, after a LayerNorm, by a ball.

All bounds are in float64 and rounded outward. The rounding error of a sum of I products is at most about I * 2^-53
times the sum of the products' absolute values. Because products may cancel, this error may be far larger than the last
digit of the sum. Every interval is therefore widened by at least this error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wane.models.certificate.interval_rounding import SPARE, UNIT, Matrix, Vector, product_above, roundoff
from wane.models.certificate.perturbation import LinearMap
from wane.models.reference.functions import layer_norm, sigmoid

ROWS_AT_ONCE = 4096
EVERY = slice(None)


@dataclass(frozen=True, slots=True)
class Reach:
    """The intervals of R pre-activations."""

    low: Vector
    high: Vector

    def __getitem__(self, rows: slice) -> Reach:
        return Reach(self.low[rows], self.high[rows])

    def wider(self, radius: Vector) -> Reach:
        """Returns the intervals that result if a term of absolute value at most `radius` is added to each
        pre-activation."""
        return Reach(np.nextafter(self.low - radius, -np.inf), np.nextafter(self.high + radius, np.inf))

    def plus(self, other: Reach) -> Reach:
        """Returns the intervals of the sums of two pre-activations."""
        low, high = self.low + other.low, self.high + other.high
        return Reach(np.nextafter(low, -np.inf), np.nextafter(high, np.inf))

    def magnitude(self) -> Vector:
        """Returns the greatest absolute value in each interval."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def sigmoid_slope(self) -> Vector:
        """Returns the greatest derivative of the logistic function on each interval."""
        nearest = self._nearest_to_zero()
        return sigmoid(nearest) * sigmoid(-nearest)

    def tanh_slope(self) -> Vector:
        """Returns the greatest derivative of tanh on each interval. The derivative is computed as a product of
        sigmoids, because the terms of `1 - tanh^2` may cancel."""
        doubled = 2 * self._nearest_to_zero()
        return 4 * sigmoid(doubled) * sigmoid(-doubled)

    def _nearest_to_zero(self) -> Vector:
        return np.maximum(0, np.maximum(self.low, -self.high))


class Inputs(Protocol):
    """A set of inputs x (I)."""

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        """Returns the range of `weight x + bias`; weight: (R, I), bias: (R)."""

    def magnitude(self, weight: Matrix) -> Vector:
        """Returns an upper bound of `|weight| |x|`: (R)."""

    def seen_by(self, weight: Matrix) -> LinearMap:
        """Returns the linear map from the difference of two inputs to the difference of `weight x`, with `weight` (R,
        I). If the inputs are outputs of a LayerNorm, the map is from the difference of the two normalised vectors n,
        before gain and shift."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One computed input for each token, (V, I). Each differs from the input in exact arithmetic by at most `error`
    (I)."""

    rows: Matrix
    error: Vector | float = 0.0

    @classmethod
    def normalised(cls, rows: Matrix, gain: Vector, shift: Vector, epsilon: float) -> Rows:
        """Returns the outputs of a LayerNorm over `rows`.

        Let u be the roundoff of I terms. The error of each entry of the centred input c is at most e = u max|x|. The
        standard deviation s is the 2-norm of c divided by sqrt(I), so its error is at most e as well. Hence the error
        of n = c / s is at most (1 + |n|) e / s + |n| u.
        """
        relative = roundoff(rows.shape[1])
        centring = relative * np.abs(rows).max(axis=1)
        deviation = np.sqrt(rows.var(axis=1) + epsilon)
        least = np.maximum(deviation - 2 * centring, np.sqrt(epsilon) / 2)
        largest = np.sqrt(rows.shape[1])  # an upper bound of |n|
        off = 2 * float(np.max((1 + largest) * centring / least + largest * relative))
        result = layer_norm(rows, gain, shift, epsilon)
        return cls(result, np.abs(gain) * off + SPARE * UNIT * np.abs(shift))

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        low, high = np.full(len(bias), np.inf), np.full(len(bias), -np.inf)
        for start in range(0, len(self.rows), ROWS_AT_ONCE):
            reached = self.rows[start : start + ROWS_AT_ONCE] @ weight.T
            low, high = np.minimum(low, reached.min(axis=0)), np.maximum(high, reached.max(axis=0))
        relative = roundoff(weight.shape[1])
        off = relative * np.abs(self.rows).max(axis=0) + (1 + relative) * self.error
        return Reach(low + bias, high + bias).wider(product_above(np.abs(weight), off) + relative * np.abs(bias))

    def parts(self) -> list[slice]:
        """Returns slices of at most ROWS_AT_ONCE rows that together cover all rows."""
        return [slice(start, start + ROWS_AT_ONCE) for start in range(0, len(self.rows), ROWS_AT_ONCE)]

    def each(self, weight: Matrix, bias: Vector, part: slice = EVERY) -> Matrix:
        """Returns an upper bound of `weight x + bias` for each row: (V, R)."""
        rows, relative = self.rows[part], roundoff(weight.shape[1])
        off = relative * np.abs(rows).max(axis=0) + (1 + relative) * self.error
        margin = product_above(np.abs(weight), off) + relative * np.abs(bias)
        above: Matrix = np.nextafter(rows @ weight.T + (bias + margin), np.inf)
        return above

    def magnitude(self, weight: Matrix) -> Vector:
        return product_above(np.abs(weight), np.abs(self.rows).max(axis=0) + self.error)

    def seen_by(self, weight: Matrix) -> LinearMap:
        return LinearMap(weight)


@dataclass(frozen=True, slots=True)
class Box:
    """All x with |x_i| <= bound_i. If one bound is not finite, all entries of x are unbounded."""

    bound: Vector

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        if not np.isfinite(self.bound).all():
            return Reach(np.full(len(bias), -np.inf), np.full(len(bias), np.inf))
        return Reach(bias, bias).wider(product_above(np.abs(weight), self.bound))

    def magnitude(self, weight: Matrix) -> Vector:
        return product_above(np.abs(weight), self.bound)

    def seen_by(self, weight: Matrix) -> LinearMap:
        return LinearMap(weight)


@dataclass(frozen=True, slots=True)
class Normalised:
    """All outputs of a LayerNorm: gain * n + shift, where |n|_2 <= sqrt(I) and the entries of n sum to zero."""

    gain: Vector
    shift: Vector

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        relative = roundoff(len(self.gain))
        length = self.seen_by(weight).rows
        centre = weight @ self.shift + bias
        off = relative * (np.abs(weight) @ np.abs(self.shift) + np.abs(bias))
        return Reach(centre, centre).wider((1 + relative) * (np.sqrt(len(self.gain)) * length + off))

    def magnitude(self, weight: Matrix) -> Vector:
        return product_above(np.abs(weight), np.abs(self.gain) * np.sqrt(len(self.gain)) + np.abs(self.shift))

    def seen_by(self, weight: Matrix) -> LinearMap:
        scaled = weight * self.gain
        # The entries of n sum to zero, so subtracting each row's mean does not change the product.
        centred = scaled - scaled.mean(axis=1, keepdims=True)
        return LinearMap(centred, 2 * roundoff(len(self.gain)) * np.linalg.norm(scaled, axis=1))
