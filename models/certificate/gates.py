"""Bounds of gates.

**Two trajectories** (`GatePieces`). A sigmoid gate in two trajectories: joint bounds of its value and its change.

Let g = cap sigma(a), g~ = cap sigma(a~) and m the smaller pre-activation. Then min(g, g~) = cap sigma(m). By the mean
value theorem |g - g~| <= cap F(m) |a - a~|, where F(m) is the greatest slope of the sigmoid between m and the greatest
pre-activation. The slope F(m) is small where sigma(m) is close to 1, so a nearly open gate hardly changes. The range of
m is split into intervals (pieces), and each interval has its own bounds of the value and of the slope.

**Products** (`GateProducts`). Bounds the 2-norm (length) of a vector r after k elementwise products with one row f(x)
of a table of gates.

For row x, the squared length `q_x(k) = sum_i r_i^2 f_i(x)^(2k)` is log-convex in k. Between two values of k, it is at
most the geometric interpolation of its values at these two. The lengths of all rows are therefore computed only for
every STRIDE-th k. For the other k, only the lengths of the rows that may have the greatest length are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.admissible import Reach
from wane.models.certificate.interval_rounding import TINY, UP, Matrix, Vector
from wane.models.reference.functions import sigmoid

PIECES = 16


@dataclass(frozen=True, slots=True)
class GatePieces:
    """Bounds of a gate in each of C intervals of m, by interval and unit, (C, H). The smaller of the two gates is
    between `low` and `high`. The two gates differ by at most `slope * |a - a~|`."""

    low: Matrix
    high: Matrix
    slope: Matrix

    @classmethod
    def of(cls, reach: Reach, cap: float = 1.0) -> GatePieces:
        """Returns the bounds of all intervals for a gate whose pre-activations stay within `reach` (H)."""
        low, high = np.maximum(reach.low, -800.0), np.minimum(reach.high, 800.0)
        # The limits are made finite. The sigmoid is saturated at these limits.
        low, high = np.minimum(low, 700.0), np.maximum(high, -700.0)
        shares = np.linspace(0, 1, PIECES + 1)[:, None]
        # The intervals have equal widths in the gate's value. The intervals near the gate's maximum, which determine
        # the result, are therefore as narrow as the others.
        gates = sigmoid(low) + shares * (sigmoid(high) - sigmoid(low))
        with np.errstate(divide="ignore"):
            inner = np.log(gates) - np.log1p(-gates)
        edges = np.clip(inner, low, high)
        edges[0], edges[-1] = low, high
        edges = np.maximum.accumulate(edges, axis=0)
        start, stop = edges[:-1], edges[1:]
        nearest = np.maximum(0.0, np.maximum(start, -high))
        slope = cap * sigmoid(nearest) * sigmoid(-nearest) * UP
        return cls(cap * sigmoid(start) / UP, np.minimum(cap * sigmoid(stop) * UP, cap), slope)


DOUBLINGS = 4
STRIDE = 2**DOUBLINGS

ALIKE = 1 + 1e-9
"""The exact length of a row is computed if the row's interpolated squared length times this factor reaches the greatest
squared length found before. Rounding therefore cannot exclude the row with the greatest length."""


class GateProducts:
    """The function `max_x |r f(x)^k|_2` of k >= 1, rounded up. table: (V, H), upper bounds of f(x). start: the vector
    r, (H). No result is below TINY."""

    def __init__(self, table: Matrix, start: Vector) -> None:
        self._table, self._leap = table, table
        for _ in range(DOUBLINGS):
            self._leap = self._leap * self._leap
        self._rows: Matrix = np.maximum(np.tile(start, (len(table), 1)), TINY)
        self._squares = _squares(self._rows)
        self._lengths: list[float] = []

    def __call__(self, k: int) -> float:
        while len(self._lengths) < k:
            self._stride()
        return self._lengths[k - 1]

    def _stride(self) -> None:
        """Computes the greatest length over all rows for each of the next STRIDE values of k."""
        before, rows = self._squares, self._rows
        self._rows = np.maximum(rows * self._leap, TINY)
        self._squares = _squares(self._rows)
        ends = np.unique(np.array([before.argmax(), self._squares.argmax()]))
        reached = self._between(rows, ends)
        shares = np.arange(1, STRIDE) / STRIDE
        logs = np.log(before)[:, None] * (1 - shares) + np.log(self._squares)[:, None] * shares
        open_ = np.flatnonzero((np.exp(logs) * ALIKE >= reached).any(axis=1))
        inner = self._between(rows, open_)
        self._lengths += [float(np.sqrt(square)) * UP for square in (*inner, self._squares.max())]

    def _between(self, rows: Matrix, chosen: NDArray[np.intp]) -> Vector:
        """Returns the largest squared length of the chosen rows after 1, ..., STRIDE - 1 further products."""
        powers, table, largest = rows[chosen], self._table[chosen], []
        for _ in range(STRIDE - 1):
            powers = np.maximum(powers * table, TINY)
            largest.append(float(_squares(powers).max()))
        return np.array(largest)


def _squares(rows: Matrix) -> Vector:
    result: Vector = np.einsum("vh,vh->v", rows, rows)
    return result
