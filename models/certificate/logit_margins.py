"""Bounds the changes of all tokens' logits between one window and any uninterrupted run, relative to the mean of the
logits.

`top1.py` propagates the gradient of the difference of two logits back to the states, for one pair of tokens at a time.
For a whole vocabulary it is cheaper to start from the states. Let G be the derivative of the output layer's input with
respect to the states. The rows of the output layer times G are then the gradients of all tokens. G is a multiple of the
last mixing matrix, plus a matrix of low rank: one column for the LayerNorm, and one for each unit of the feed-forward
block that may be active. The products of the output layer and the mixing matrix are computed once for the model. So a
window needs only the products with the low-rank matrix. Terms beyond the gradient are bounded as in `top1.py`. Where
the terms are small, a product of two vectors is bounded by the product of their lengths.

Tokens whose probabilities add nearly nothing to the total variation are bounded by the radius, the 2-norm bound of the
change of `hidden`, alone. The products are computed in float32, which takes half the time. Their rounding is added to
the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.deviation import MARGIN, Linear
from wane.models.certificate.interval_rounding import Matrix, Vector
from wane.models.certificate.request import WindowBound

NEGLIGIBLE = 1e-3
"""The tokens whose logits are bounded by the radius alone may together add at most this share of the total variation's
bound that the radius alone implies."""

MOST_MOVED = 60.0
"""If the radius allows a logit to change by more than this, the token is never bounded by the radius alone."""

UNIT = 2.0**-24  # the unit roundoff of float32
LARGEST = 1e15  # larger numbers are not multiplied in float32, because their squares would overflow
TINY = 1e-25  # added to float32 products; far above their error if they underflow
BLOCK = 64  # the number of rows that are added in float32 before the sum is continued in float64
ROWS_AT_ONCE = 256  # the number of tokens whose products are computed together, so that they fit into the cache


@dataclass(frozen=True, slots=True)
class Passed:
    """The derivative of the output layer's input with respect to the input x of the last LayerNorm, or to the input of
    a lower layer's block: `factor I + left right`.

    left: (H, C). right: (C, H). size: the bound of the derivative's spectral norm.
    """

    factor: float
    left: Matrix
    right: Matrix
    size: float

    def times(self, columns: Matrix) -> Matrix:
        """Returns the derivative times `columns`: (H, N)."""
        return self.factor * columns + self.left @ (self.right @ columns)

    def plus(self, left: Matrix, right: Matrix) -> Passed:
        """Returns the sum of the derivative and `left right`."""
        size = self.size + float(np.linalg.norm(left @ right))
        return Passed(self.factor, np.hstack([self.left, left]), np.vstack([self.right, right]), size)


class LogitMargins:
    """Bounds the changes of logits for one model with LayerNorms.

    rows: the output matrix, (V, H). gain: the last LayerNorm's gain, (H). mixes: the mixing matrices, by layer.

    It needs about as much memory as the output layer, and 4 bytes for each token and each unit of the states.
    """

    def __init__(self, rows: Matrix, gain: Vector, mixes: list[Linear]) -> None:
        read = rows * gain
        read -= read.mean(axis=1, keepdims=True)
        self._read = read.astype(np.float32)
        self._squares = np.einsum("vh,vh->v", read, read)
        self._sizes = np.sqrt(self._squares)
        self._lengths = np.linalg.norm(rows, axis=1)
        self._mixes = [mix.weight for mix in mixes]
        self._columns = [np.linalg.norm(mix.weight, axis=0) for mix in mixes]
        self._mixed = [(read @ mix.weight).astype(np.float32) for mix in mixes]
        self.mean_off = 2 * (BLOCK + 8) * UNIT * float(self._sizes.max())
        """The bound of the 2-norm error of the computed mean of the rows."""

    def moved(self, bound: WindowBound, row: int, shares: Vector, along: float) -> Vector:
        """Bounds, for each token a, the change of `(W_a - mean) . hidden`. W_a is the token's row of the output matrix,
        and `mean` is the mean of all rows, weighted by `shares`, shape (V). The mean of these changes, with the same
        weights, is at most `mean_off` times the distance of the LayerNorm's outputs. Returns shape (V).

        along: the bound of how far the last LayerNorm's input changes in its own direction (`Normalised.along`).
        """
        assert bound.norm is not None, "the network is plain, so it has no logit margins: this is a bug"
        mean = self._mean(shares)
        of_mean = float(mean @ mean)
        lengths = self._sizes + np.sqrt(of_mean)
        square = self._squares - 2 * (self._read @ mean.astype(np.float32)) + of_mean
        # A float32 product of two vectors is off by at most (H + 4) u times the product of their lengths.
        cancelled = 2 * (len(mean) + 4) * UNIT * lengths * np.sqrt(of_mean) + MARGIN * lengths**2
        length = np.sqrt(np.maximum(square, 0) + cancelled)
        result = length * bound.norm.ball[row]
        tokens = _those_that_matter(shares, result)
        result[tokens] = np.minimum(result[tokens], self._by_direction(bound, row, tokens, mean, length[tokens], along))
        hidden = (self._lengths + float(shares @ self._lengths)) * float(bound.off[row])
        moved: Vector = (result + hidden) * (1 + MARGIN)
        return moved

    def _mean(self, shares: Vector) -> Vector:
        """Returns the mean of the rows, weighted by `shares` (V): float64 (H). Each block of rows is added in float32.
        The entries of the mean sum to zero, like those of each row."""
        whole = len(shares) // BLOCK * BLOCK
        blocks = shares[:whole].astype(np.float32).reshape(-1, 1, BLOCK)
        sums = blocks @ self._read[:whole].reshape(len(blocks), BLOCK, self._read.shape[1])
        mean: Vector = sums.sum(axis=(0, 1), dtype=np.float64) + shares[whole:] @ self._read[whole:]
        mean -= mean.mean()
        return mean

    def _by_direction(
        self, bound: WindowBound, row: int, tokens: NDArray[np.intp], mean: Vector, length: Vector, along: float
    ) -> Vector:
        """Bounds the change of `(W_a - mean) . hidden` for the given tokens a, (P). mean: the mean of the rows, after
        multiplication by the LayerNorm's gain. length: (P), the length of each token's `W_a - mean`, after the same
        multiplication."""
        assert bound.norm is not None, "the network is plain, so it has no logit margins: this is a bug"
        unit, factor = bound.norm.derivative(row)
        read = Beside(self._read[tokens], self._sizes[tokens], mean)
        passed = Passed(factor, unit[:, None], -factor * unit[None], factor)
        known = read.products(passed.left)
        lead = np.abs(known[:, 0].astype(np.float64)) + read.off(1.0)
        left = np.zeros(len(tokens))
        for layer, step in reversed(list(enumerate(bound.steps))):
            left += length * (passed.size * float(step.off[row]))
            if step.fed is not None and step.norm is not None:
                live = step.fed.live(row)
                outer = passed.times(live.outer)
                inner_unit, inner_factor = step.norm.derivative(row)
                centred = live.inner - live.inner.mean(axis=1, keepdims=True)
                turned = inner_factor * (centred - np.outer(centred @ inner_unit, inner_unit))
                if not _small(outer, live.slack, live.inner, turned):
                    return np.full(len(tokens), np.inf)
                products, columns = read.products(outer), np.linalg.norm(outer, axis=0)
                left += np.abs(products) @ live.slack + read.off(float(columns @ live.slack))
                left += length * (passed.size * live.off)
                # R' is `corner.T`. |x R'| = |x inner| for every row x, and R' has at most as many columns as `inner`.
                corner = np.linalg.qr(live.inner.T).R
                second = np.linalg.norm((products * live.slope) @ corner.T, axis=1)
                second += read.off(float(np.linalg.norm(columns * live.slope) * np.linalg.norm(corner)))
                left += second * step.norm.remainder[row]
                known = np.hstack([known, products])
                passed = passed.plus(outer, live.slope[:, None] * turned)
                left += length * (passed.size * float(step.off[row]))
            left += self._by_unit(layer, tokens, read, known, passed, mean, step.error[0].box[row])
        left += length * (passed.size * float(bound.below[row]))
        # The terms of a product may cancel. The product's error in float64 is far below MARGIN times the product of its
        # factors' lengths.
        left += MARGIN * (self._sizes[tokens] + float(np.linalg.norm(mean))) * bound.norm.reached(row)
        first = left + length * float(bound.norm.remainder[row])
        result: Vector = np.minimum(first, bound.norm.turned_by(length, lead, row, left, along))
        return result

    def _by_unit(
        self,
        layer: int,
        tokens: NDArray[np.intp],
        read: Beside,
        known: NDArray[np.float32],
        passed: Passed,
        mean: Vector,
        box: Vector,
    ) -> Vector:
        """Bounds `sum_i |gradient_i| box_i` for each token: (P). The gradients are those of the token's logit with
        respect to the units of a layer's state. known: (P, C), `read` times `passed.left`. box: (units), the bounds of
        the units' changes."""
        mix, columns = self._mixes[layer], self._columns[layer]
        through = passed.right @ mix
        added = np.vstack([through / passed.factor, -mean @ mix])
        if not _small(added, through, box):
            return np.full(len(tokens), np.inf)
        sizes = passed.factor * columns + np.linalg.norm(passed.left, axis=0) @ np.abs(through)
        known = np.hstack([known, np.ones((len(known), 1), np.float32)])
        low_rank, box32 = added.astype(np.float32), box.astype(np.float32)
        total = np.empty(len(tokens))
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            gradients = known[part] @ low_rank
            gradients += self._mixed[layer][tokens[part]]
            total[part] = np.abs(gradients, out=gradients) @ box32
        total *= passed.factor * (1 + 2 * (len(box) + 4) * UNIT)
        result: Vector = total + read.off(float(sizes @ box), known.shape[1]) + TINY * max(1.0, passed.factor)
        return result


class Beside:
    """P rows r_j minus a vector m, which are multiplied in float32 by columns.

    rows: float32 (P, H), r. sizes: (P), the 2-norms of the rows. mean: (H), m. Let two vectors of n numbers be rounded
    to float32 and multiplied in float32. The error of their product is at most (n + 4) u / (1 - (n + 4) u) times the
    product of the two 2-norms, where u is the unit roundoff.
    """

    def __init__(self, rows: NDArray[np.float32], sizes: Vector, mean: Vector) -> None:
        self._rows, self._mean = rows, mean
        self._sizes: Vector = sizes + float(np.linalg.norm(mean))

    def products(self, columns: Matrix) -> NDArray[np.float32]:
        """Returns (r_j - m) . c_i for the columns c_i, (H, N): (P, N)."""
        products = self._rows @ columns.astype(np.float32)
        products -= (self._mean @ columns).astype(np.float32)
        return products

    def off(self, length: float, terms: int = 0) -> Vector:
        """Bounds the rounding error of each row's product with a column of this length, (P). It also bounds the error
        of a sum of such products if their columns' lengths add up to `length`. terms: the number of further float32
        operations of which each result consists."""
        terms += self._rows.shape[1] + 16
        result: Vector = self._sizes * (length * 2 * terms * UNIT / (1 - terms * UNIT)) + TINY
        return result


def _small(*arrays: Matrix | Vector) -> bool:
    """Returns whether all numbers can be multiplied in float32."""
    return all(bool(np.abs(values).max(initial=0.0) < LARGEST) for values in arrays)


def _those_that_matter(shares: Vector, moved: Vector) -> NDArray[np.intp]:
    """Returns the ids of the tokens that need a sharper bound than `moved` (V), the bound of each logit's change that
    the radius implies. All other tokens together add at most the share NEGLIGIBLE of the total variation's bound that
    the radius implies."""
    added = np.where(moved < MOST_MOVED, shares * np.expm1(np.minimum(moved, MOST_MOVED)), np.inf)
    order = np.argsort(added)
    negligible = np.cumsum(added[order]) <= NEGLIGIBLE * np.tanh(moved.max() / 2)
    return np.sort(order[int(np.count_nonzero(negligible)) :])
