"""Bounds the changes of all tokens' logits between one window and any uninterrupted run, relative to the mean of the
logits.

`top1.py` propagates the gradient of the difference of two logits back to the states, for one pair of tokens at a time.
For a whole vocabulary it is cheaper to start from the states. Let G be the derivative of the output layer's input with
respect to those units of the states whose errors have a large effect. The rows of the output layer times G are then the
gradients of all tokens. Terms beyond the gradient are bounded as in `top1.py`. Where the terms are small, a product of
two vectors is bounded by the product of their lengths.

Tokens whose probabilities add nearly nothing to the total variation are bounded by the radius, the 2-norm bound of the
change of `hidden`, alone. The products for all other tokens are computed in float32, which takes half the time. Their
rounding is added to the bound.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.deviation import MARGIN, Linear
from wane.models.certificate.interval_rounding import Matrix, Vector
from wane.models.certificate.request import WindowBound

CANCELLED = 1e-12
"""The error of a computed difference of squared lengths, relative to the sum of the squares. It is added to the
difference."""

CERTAIN = 0.0005
"""The effect of a unit is its error multiplied by the norm of its column of the mixing matrix. The units with the
smallest effects are bounded together, by a product of 2-norms, as long as their effects add up to at most this share of
the sum of all effects. All other units are bounded one by one."""

MOST_OPEN = 128
"""The largest number of units whose effects are bounded one by one. These are the units with the largest effects."""

NEGLIGIBLE = 1e-4
"""The tokens whose logits are bounded by the radius alone may together add at most this share of the total variation's
bound that the radius alone implies."""

MOST_MOVED = 60.0
"""If the radius allows a logit to change by more than this, the token is never bounded by the radius alone."""

UNIT = 2.0**-24  # the unit roundoff of float32
LARGEST = 1e15  # columns with larger entries are not multiplied in float32, because their squares would overflow
TINY = 1e-25  # added to float32 products; far above their error if they underflow


class LogitMargins:
    """Bounds the changes of logits for one model with LayerNorms.

    rows: the output matrix, (V, H). gain: the last LayerNorm's gain, (H). mixes: the mixing matrices, by layer.
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
        """Bounds, for each token a, the change of `(W_a - mean) . hidden`. W_a is the token's row of the output matrix,
        and `mean` is the mean of all rows, weighted by `shares`, shape (V). Returns shape (V).

        along: the bound of how far the last LayerNorm's input changes in its own direction (`Normalised.along`).
        """
        assert bound.norm is not None, "the network is plain, so it has no logit margins: this is a bug"
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
        """Bounds the change of `(W_a - mean) . hidden` for the given tokens a, (P). mean: the mean of the rows, after
        multiplication by the LayerNorm's gain. length: (P), the length of each token's `W_a - mean`, after the same
        multiplication."""
        assert bound.norm is not None, "the network is plain, so it has no logit margins: this is a bug"
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
                # R' is `corner.T`. |x R'| = |x inner| for every row x, and R' has at most as many columns as `inner`.
                corner = np.linalg.qr(live.inner.T).R
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
        # The terms of a product may cancel. The product's error in float64 is far below MARGIN times the product of its
        # factors' lengths.
        left += MARGIN * (self._sizes[tokens] + float(np.linalg.norm(mean))) * bound.norm.reached(row)
        lead = read.sums(unit[:, None])
        first = left + length * float(bound.norm.remainder[row])
        result: Vector = np.minimum(first, bound.norm.turned_by(length, lead, row, left, along))
        return result


class Beside:
    """P rows r_j minus a vector m, which are multiplied in float32 by columns. Every result is rounded up.

    rows: float32 (P, H), r. sizes: (P), the 2-norms of the rows. mean: (H), m. Let two vectors of H numbers be rounded
    to float32 and multiplied in float32. The error of their product is at most (H + 4) u / (1 - (H + 4) u) times the
    product of the two 2-norms, where u is the unit roundoff.
    """

    def __init__(self, rows: NDArray[np.float32], sizes: Vector, mean: Vector) -> None:
        self._rows, self._mean = rows, mean
        terms = (rows.shape[1] + 4) * UNIT
        self._off: Vector = 2 * terms / (1 - terms) * (sizes + float(np.linalg.norm(mean)))

    def sums(self, columns: Matrix) -> Vector:
        """Bounds `sum_i |(r_j - m) . c_i|` for each row r_j, (P), where c_i are the columns, (H, N)."""
        if not np.abs(columns).max(initial=0.0) < LARGEST:
            return np.full(len(self._rows), np.inf)
        products = self._products(columns)
        total: Vector = np.abs(products, out=products).sum(axis=1) * (1 + 2 * columns.shape[1] * UNIT)
        return total + self._off * float(np.linalg.norm(columns, axis=0).sum()) + TINY

    def lengths(self, columns: Matrix) -> Vector:
        """Bounds the 2-norm of `(r_j - m) C` for each row r_j, (P), where C is the matrix of the columns, (H, N)."""
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
    """Returns the ids of the tokens that need a sharper bound than `moved` (V), the bound of each logit's change that
    the radius implies. All other tokens together add at most the share NEGLIGIBLE of the total variation's bound that
    the radius implies."""
    added = np.where(moved < MOST_MOVED, shares * np.expm1(np.minimum(moved, MOST_MOVED)), np.inf)
    order = np.argsort(added)
    negligible = np.cumsum(added[order]) <= NEGLIGIBLE * np.tanh(moved.max() / 2)
    return np.sort(order[int(np.count_nonzero(negligible)) :])
