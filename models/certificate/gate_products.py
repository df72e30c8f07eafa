"""Bounds the 2-norm (length) of a vector r after k elementwise products with one row f(x) of a table of gates.

For row x, the squared length `q_x(k) = sum_i r_i^2 f_i(x)^(2k)` is log-convex in k. Between two values of k, it is at
most the geometric interpolation of its values at these two. The lengths of all rows are therefore computed only for
every STRIDE-th k. For the other k, only the lengths of the rows that may have the greatest length are computed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.interval_rounding import TINY, UP, Matrix, Vector

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
