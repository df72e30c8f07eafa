"""The admissible inputs of a layer (all that a token sequence can cause), and the ranges of its pre-activations.

The first layer's inputs are the embeddings of finitely many tokens, so its bounds are exact maxima over the tokens. The
input of a higher layer is bounded by a box (|x_i| <= b_i) or, after a LayerNorm, by a ball.

The inputs of a cell that `models/certificate/readout.py` bounds are those that float32 graphs compute. In exact
arithmetic they are outputs of a LayerNorm. If the LayerNorm's input nearly vanishes, the computed output may be far
from the exact one, and so may the gates and candidates. `ComputedRows` and `ComputedNormalised` bound the computed
values.

All bounds are in float64 and rounded outward. The rounding error of a sum of I products is at most about I * 2^-53
times the sum of the products' absolute values. Because products may cancel, this error may be far larger than the last
digit of the sum. Every interval is therefore widened by at least this error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wane.models.architecture import Architecture
from wane.models.certificate.interval_rounding import SPARE, UNIT, UP, Matrix, Vector, product_above, roundoff
from wane.models.certificate.perturbation import LinearMap
from wane.models.layer_registry import InputGated
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


UNIT_FLOAT32 = 2.0**-24
"""The unit roundoff of float32."""

SUMS = 4.0
"""See the docstring of `models/certificate/readout.py`. On x86-64 processors with AVX2, the largest value that was
measured with trained weights is below 1. With equal weights and inputs it is 64."""

NORM = 4.0
"""See the docstring of `models/certificate/readout.py`."""

FUNCTION = 8
"""The assumed absolute error of the sigmoid and tanh, whose values are at most 1, in units of roundoff."""

ROOM = 1 + 2.0**-10
"""The factor by which bounds of exact values are multiplied to bound the computed values."""


def has_readout(architecture: Architecture) -> bool:
    """Returns whether `models/certificate/readout.py` bounds the rounding of the architecture."""
    fading = architecture.fading
    if not architecture.residual or len(fading) != 1:
        return False
    return isinstance(fading[0], InputGated) and fading[0].candidate == "tanh"


@dataclass(frozen=True, slots=True)
class ComputedNormalised(Normalised):
    """Computed outputs of a LayerNorm whose input is not known. Its input may nearly vanish, so nothing bounds the
    pre-activations."""

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        nothing = np.full(len(weight), np.inf) + bias
        return Reach(-nothing, nothing)


@dataclass(frozen=True, slots=True)
class ComputedRows(Rows):
    """The computed output of a LayerNorm for each token.

    gain: the LayerNorm's gain, (I). apart: bounds of the 2-norm distances of the computed normalised vectors from the
    exact ones, (V). sums: bounds of the further errors of the pre-activations, (V).
    """

    gain: Vector = field(kw_only=True)
    apart: Vector = field(kw_only=True)
    sums: Vector = field(kw_only=True)

    @classmethod
    def of(
        cls, rows: Matrix, norm: tuple[Vector, Vector], epsilon: float, product: tuple[Matrix, Vector]
    ) -> ComputedRows:
        """rows: the LayerNorm's inputs, (V, I). norm: its gain and shift. product: the weight, (R, I), and the bias,
        (R), of the matrix product that reads its outputs."""
        (gain, shift), (weight, bias) = norm, product
        exact = Rows.normalised(rows, gain, shift, epsilon)
        width, size = rows.shape[1], np.abs(gain)
        apart = _normalised_apart(rows, epsilon) + UNIT_FLOAT32 * (NORM + 3) * np.sqrt(width)
        sums = np.empty(len(rows))
        magnitude, slope = np.abs(weight).T, np.abs(weight) @ size
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            sizes = (np.abs(exact.rows[part]) + exact.error) @ magnitude + np.abs(bias) + apart[part, None] * slope
            sums[part] = UNIT_FLOAT32 * (width + 2) * np.linalg.norm(sizes, axis=1)
        sums += UNIT_FLOAT32 * (NORM + 3) * np.linalg.norm(np.abs(weight) @ np.abs(shift))
        return cls(exact.rows, exact.error, gain=gain, apart=apart, sums=sums * ROOM)

    def _wider(self, weight: Matrix, part: slice) -> Matrix:
        """Returns bounds of the errors of computed pre-activations: (V, R)."""
        lengths = np.linalg.norm(weight * self.gain, axis=1)
        result: Matrix = (np.outer(self.apart[part], lengths) + self.sums[part, None]) * UP
        return result

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        parts = self.parts()
        high = np.max([self.each(weight, bias, part).max(axis=0) for part in parts], axis=0)
        low = np.max([self.each(-weight, -bias, part).max(axis=0) for part in parts], axis=0)
        return Reach(-low, high)

    def each(self, weight: Matrix, bias: Vector, part: slice = EVERY) -> Matrix:
        exact = Rows(self.rows, self.error).each(weight, bias, part)
        above: Matrix = np.nextafter(exact + self._wider(weight, part), np.inf)
        return above


def _normalised_apart(rows: Matrix, epsilon: float) -> Vector:
    """Bounds the 2-norm distances of the LayerNorms of `rows` from those of rows that are NORM u |x| away (see
    `models/certificate/layer_norm.py`)."""
    width = rows.shape[1]
    lifted = width * min(epsilon, float(np.float32(epsilon)))
    off = NORM * UNIT_FLOAT32 * np.linalg.norm(rows, axis=1) * ROOM
    least = np.maximum(np.linalg.norm(rows - rows.mean(axis=1, keepdims=True), axis=1) / ROOM - off, 0.0)
    anywhere, near = off / np.sqrt(off**2 / 4 + lifted), off / np.sqrt(least**2 + lifted)
    result: Vector = np.sqrt(width) * np.minimum(np.minimum(anywhere, near), 2.0) * ROOM
    return result
