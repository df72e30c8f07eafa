"""What a layer may be fed, and how far its pre-activations then reach.

A token is one of finitely many, so the first layer's bounds are exact maxima over the vocabulary; above it, a layer's
input is known by a box (|x_i| <= b_i) or, behind a LayerNorm, by a ball. All in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from models.reference import sigmoid

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Reach:
    """The interval that each of R pre-activations stays in."""

    low: Vector
    high: Vector

    def __getitem__(self, rows: slice) -> Reach:
        return Reach(self.low[rows], self.high[rows])

    def wider(self, radius: Vector) -> Reach:
        """The interval when something of at most `radius` is added."""
        return Reach(self.low - radius, self.high + radius)

    def magnitude(self) -> Vector:
        """The greatest absolute value."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def sigmoid_slope(self) -> Vector:
        """The greatest derivative of the logistic function."""
        nearest = self._nearest_to_zero()
        return sigmoid(nearest) * sigmoid(-nearest)

    def tanh_slope(self) -> Vector:
        """The greatest derivative of tanh."""
        return 1 - np.tanh(self._nearest_to_zero()) ** 2

    def _nearest_to_zero(self) -> Vector:
        return np.maximum(0, np.maximum(self.low, -self.high))


class Inputs(Protocol):
    """A set of inputs x (I)."""

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        """How far `weight x + bias` reaches; weight: (R, I), bias: (R)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Exactly these inputs, (V, I): one for each token."""

    rows: Matrix

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        low, high = np.full(len(bias), np.inf), np.full(len(bias), -np.inf)
        for start in range(0, len(self.rows), ROWS_AT_ONCE):
            reached = self.rows[start : start + ROWS_AT_ONCE] @ weight.T
            low, high = np.minimum(low, reached.min(axis=0)), np.maximum(high, reached.max(axis=0))
        return Reach(low + bias, high + bias)


@dataclass(frozen=True, slots=True)
class Box:
    """All x with |x_i| <= bound_i."""

    bound: Vector

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        return Reach(bias, bias).wider(np.abs(weight) @ self.bound)


@dataclass(frozen=True, slots=True)
class Normalised:
    """All outputs of a LayerNorm: gain * n + shift, where |n|_2 <= sqrt(I) and the entries of n sum to zero."""

    gain: Vector
    shift: Vector

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        scaled = weight * self.gain
        scaled = scaled - scaled.mean(axis=1, keepdims=True)  # n is orthogonal to the constant vector
        centre = weight @ self.shift + bias
        return Reach(centre, centre).wider(np.sqrt(len(self.gain)) * np.linalg.norm(scaled, axis=1))
