"""Bounds the changes of all tokens' logits of one window, relative to the mean of the logits.

`top1.py` propagates the gradient of each lead separately back to the states. For a whole vocabulary it is cheaper to
start from the states. Let G be the derivative of the output layer's input with respect to the few units whose states
are still uncertain. The rows of the output layer times G are then the gradients of all tokens. Terms beyond the
gradient are bounded as in `top1.py`: token by token where that is cheap, and by lengths where the terms are small.

Tokens whose probabilities add nearly nothing to the total variation are bounded by the radius alone. The products for
all other tokens are computed in float32, which takes half the time. Their rounding is added to the bound.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.deviation import MARGIN, Linear
from wane.models.certificate.interval_rounding import Matrix, Vector
from wane.models.certificate.request import WindowBound

CANCELLED = 1e-12
"""The error of a computed difference of squared lengths, relative to the squares. It is added to the difference."""

CERTAIN = 0.0005
"""The share of the units' errors, after a mixing matrix, that is bounded by lengths. These are the errors of the most
certain units."""

MOST_OPEN = 128
"""The largest number of units whose errors are bounded one by one. These are the units with the largest effect."""

NEGLIGIBLE = 1e-4
"""The largest amount that all tokens bounded by the radius alone may add to the total variation, as a share of the
total variation's bound by the radius."""

MOST_MOVED = 60.0
"""A token whose logit may change by more than this is never bounded by the radius alone."""

UNIT = 2.0**-24  # the unit roundoff of float32
LARGEST = 1e15  # columns with larger entries are not multiplied in float32, where their squares overflow
TINY = 1e-25  # far above the error of products that underflow in float32


class LogitMargins:
    """The margins of one model with LayerNorms.

    rows: (V, H), of the output layer. gain: (H), of the last LayerNorm. mixes: the mixing matrices, by layer.
    """

    def __init__(self, rows: Matrix, gain: Vector, mixes: list[Linear]) -> None:
        read = rows * gain
        self._read = read - read.mean(axis=1, keepdims=True)
        self._read32 = self._read.astype(np.float32)
        self._squares = np.einsum("vh,vh->v", self._read, self._read)
        self._sizes = np.sqrt(self._squares)
        self._lengths = np.linalg.norm(rows, axis=1)
        self._mixes = mixes
        self._columns = [np.linalg.norm(mix.weight, axis=0) for mix in mixes]

    def moved(self, bound: WindowBound, row: int, shares: Vector, along: float) -> Vector:
        """Bounds the change of each `(V_a - mean) . hidden`, (V), with the mean of all V_a weighted by `shares` (V).

        along: the bound of the change of the last LayerNorm's input along itself (`Normalised.along`).
        """
        assert bound.norm is not None, "this is a bug"
        mean = shares @ self._read
        of_mean = float(mean @ mean)
        square = self._squares - 2 * (self._read @ mean) + of_mean
        length = np.sqrt(np.maximum(square, 0) + CANCELLED * (self._squares + of_mean))
        result = length * bound.norm.ball[row]
        tokens = _those_that_matter(shares, result)
        result[tokens] = np.minimum(result[tokens], self._by_direction(bound, row, tokens, mean, length[tokens], along))
        hidden = (self._lengths + float(shares @ self._lengths)) * float(bound.off[row])
        moved: Vector = (result + hidden) * (1 + MARGIN)
        return moved

    def _by_direction(
        self, bound: WindowBound, row: int, tokens: NDArray[np.intp], mean: Vector, length: Vector, along: float
    ) -> Vector:
        """Bounds the change for some of the tokens (P). length: (P), the lengths of their `V_a - mean`, as the last
        LayerNorm reads them."""
        assert bound.norm is not None, "this is a bug"
        unit, factor = bound.norm.derivative(row)
        read = Beside(self._read32[tokens], self._sizes[tokens], mean)
        passed = factor * (np.eye(len(unit)) - np.outer(unit, unit))
        size, left = factor, np.zeros(len(tokens))
        for step, mix, columns in zip(
            reversed(bound.steps), reversed(self._mixes), reversed(self._columns), strict=True
        ):
            left += length * (size * float(step.off[row]))
            if step.fed is not None and step.norm is not None:
                live = step.fed.live(row)
                outer = passed @ live.outer
                left += read.sums(outer * live.slack) + length * (size * live.off)
                corner = np.linalg.qr(
                    live.inner.T
                ).R  # products with these columns are as long as products with the inner rows
                left += read.lengths((outer * live.slope) @ corner.T) * step.norm.remainder[row]
                inner_unit, inner_factor = step.norm.derivative(row)
                centred = live.inner - live.inner.mean(axis=1, keepdims=True)
                turned = inner_factor * (centred - np.outer(centred @ inner_unit, inner_unit))
                through = (outer * live.slope) @ turned
                passed, size = passed + through, size + float(np.linalg.norm(through))
                left += length * (size * float(step.off[row]))
            box = step.error[0].box[row]
            sent = columns * box
            order = np.argsort(-sent)
            known = int(np.searchsorted(np.cumsum(sent[order]), (1 - CERTAIN) * sent.sum())) + 1
            open_, certain = np.split(order, [min(known, MOST_OPEN)])
            left += read.sums((passed @ mix.weight[:, open_]) * box[open_])
            rest = box.copy()
            rest[open_] = 0
            left += length * (size * min(float(sent[certain].sum()), float(mix.furthest(rest[None])[0])))
        left += length * (size * float(bound.below[row]))
        # The terms of a product may cancel. Its error in float64 is far below MARGIN times its factors' lengths.
        left += MARGIN * (self._sizes[tokens] + float(np.linalg.norm(mean))) * bound.norm.reached(row)
        lead = read.sums(unit[:, None])
        first = left + length * float(bound.norm.remainder[row])
        result: Vector = np.minimum(first, bound.norm.turned_by(length, lead, row, left, along))
        return result


class Beside:
    """P rows r_j less their mean m, multiplied in float32. Every result is rounded up.

    rows: float32 (P, H), r. sizes: (P), their 2-norms. mean: (H), m. Take a product of two vectors of H numbers in
    float32, after both are rounded to float32. Its error is at most (H + 4) u / (1 - (H + 4) u) times the product of
    their 2-norms.
    """

    def __init__(self, rows: NDArray[np.float32], sizes: Vector, mean: Vector) -> None:
        self._rows, self._mean = rows, mean
        terms = (rows.shape[1] + 4) * UNIT
        self._off: Vector = 2 * terms / (1 - terms) * (sizes + float(np.linalg.norm(mean)))

    def sums(self, columns: Matrix) -> Vector:
        """Bounds `sum_i |(r_j - m) . c_i|` for the columns (H, N): (P)."""
        if not np.abs(columns).max(initial=0.0) < LARGEST:
            return np.full(len(self._rows), np.inf)
        products = self._products(columns)
        total: Vector = np.abs(products, out=products).sum(axis=1) * (1 + 2 * columns.shape[1] * UNIT)
        return total + self._off * float(np.linalg.norm(columns, axis=0).sum()) + TINY

    def lengths(self, columns: Matrix) -> Vector:
        """Bounds the 2-norm of `(r_j - m) C` for the matrix C (H, N): (P)."""
        if not np.abs(columns).max(initial=0.0) < LARGEST:
            return np.full(len(self._rows), np.inf)
        products = self._products(columns)
        squares = np.einsum("pn,pn->p", products, products).astype(np.float64)
        length: Vector = np.sqrt(squares * (1 + 4 * columns.shape[1] * UNIT))
        return length + self._off * float(np.linalg.norm(columns)) + TINY

    def _products(self, columns: Matrix) -> NDArray[np.float32]:
        products = self._rows @ columns.astype(np.float32)
        products -= (self._mean @ columns).astype(np.float32)
        return products


def _those_that_matter(shares: Vector, moved: Vector) -> NDArray[np.intp]:
    """Returns the tokens (V) for which the radius' bound, `moved`, is too large: with it alone they would add more than
    NEGLIGIBLE to the total variation."""
    added = np.where(moved < MOST_MOVED, shares * np.expm1(np.minimum(moved, MOST_MOVED)), np.inf)
    order = np.argsort(added)
    negligible = np.cumsum(added[order]) <= NEGLIGIBLE * np.tanh(moved.max() / 2)
    return np.sort(order[int(np.count_nonzero(negligible)) :])
