"""Bounds the changes of all tokens' logits between one window and any uninterrupted run, relative to the mean of the
logits.

`top1.py` propagates the gradient of the difference of two logits back to the states, for one pair of tokens at a time.
For a whole vocabulary it is cheaper to start from the states. Let n be the last LayerNorm's output without gain and
shift, and let the rows be those of the output layer, multiplied by the gain. Let G be the derivative of n with respect
to the states of a layer. The rows times G are then the gradients of all tokens. G is a multiple of the layer's mixing
matrix, plus a matrix of low rank: one column for the last LayerNorm, and one for each unit of a feed-forward block that
may be active. The products of the rows and the mixing matrices are computed once for the model. So a window needs only
the products with the columns of the low-rank matrix. Terms beyond the gradient are bounded as in `top1.py`. Where the
terms are small, a product of two vectors is bounded by the product of their lengths.

Tokens whose probabilities add nearly nothing to the total variation are bounded by the radius, the 2-norm bound of the
change of n, alone. The products are computed in float32, which takes half the time. Their rounding is added to the
bound.
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
LARGEST = 1e8
"""There is no bound if a number exceeds this limit. Products of numbers within the limit do not overflow in float32."""
TINY = 1e-25
"""Bounds the error of a float32 product that underflows, if its factors are at most LARGEST."""
BLOCK = 256  # the number of rows that are added in float32 before the sum is continued in float64
ROWS_AT_ONCE = 256  # the number of tokens whose products are computed together, so that they fit into the cache

Matrix32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Derivative:
    """The derivative of the last LayerNorm's output with respect to the LayerNorm's input, or to the input of a lower
    layer's feed-forward block: `factor I + columns rows`.

    columns: (H, C). rows: (C, H). size: the bound of the derivative's spectral norm.
    """

    factor: float
    columns: Matrix
    rows: Matrix
    size: float

    def times(self, matrix: Matrix) -> Matrix:
        """Returns the derivative times `matrix`, (H, N): (H, N)."""
        return self.factor * matrix + self.columns @ (self.rows @ matrix)

    def plus(self, columns: Matrix, rows: Matrix) -> Derivative:
        """Returns the sum of the derivative and `columns rows`."""
        size = self.size + float(np.linalg.norm(columns) * np.linalg.norm(rows))
        return Derivative(self.factor, np.hstack([self.columns, columns]), np.vstack([self.rows, rows]), size)


class LogitMargins:
    """Bounds the changes of logits for one model with LayerNorms.

    rows: the output matrix, (V, H). gain: the last LayerNorm's gain, (H). mixes: the mixing matrices, by layer.

    The object needs 4 bytes for each weight of the output layer, and 4 bytes for each token and each unit of the
    states.
    """

    def __init__(self, rows: Matrix, gain: Vector, mixes: list[Linear]) -> None:
        read = rows * gain
        read -= read.mean(axis=1, keepdims=True)
        self._fits = _fits_float32(read, *(mix.weight for mix in mixes))
        if not self._fits:
            return
        self._read: Matrix32 = read.astype(np.float32)
        self._squares = np.einsum("vh,vh->v", read, read)
        self._sizes = np.sqrt(self._squares)
        self._lengths = np.linalg.norm(rows, axis=1)
        self._mixes: list[Matrix32] = [mix.weight.astype(np.float32) for mix in mixes]
        self._columns = [np.linalg.norm(mix.weight, axis=0) for mix in mixes]
        self._mixed: list[Matrix32] = [self._read @ mix for mix in self._mixes]
        self._longest = float(self._sizes.max())

    def moved(self, bound: WindowBound, row: int, shares: Vector, along: float) -> tuple[Vector, float]:
        """Bounds, for each token a, the change of `(W_a - mean) . hidden`, (V). W_a is the token's row of the output
        matrix, and `mean` is the computed mean of all rows, weighted by `shares`, shape (V). Also bounds the absolute
        value of the mean of these changes, weighted by `shares`. It would be 0 if `mean` were exact.

        along: the bound of how far the last LayerNorm's input changes in its own direction (`Normalised.along`).
        """
        assert bound.norm is not None, "the network is plain, so it has no logit margins: this is a bug"
        if not self._fits:
            return np.full(len(shares), np.inf), np.inf
        ball = float(bound.norm.ball[row])
        mean, off = self.mean(shares)
        of_mean = float(mean @ mean)
        lengths = self._sizes + np.sqrt(of_mean)
        square = self._squares - 2 * (self._read @ mean.astype(np.float32)) + of_mean
        # A float32 product of two vectors is off by at most (H + 4) u / (1 - (H + 4) u) times the product of their
        # lengths.
        cancelled = 2 * (len(mean) + 8) * UNIT * lengths * np.sqrt(of_mean) + MARGIN * lengths**2 + TINY
        length = np.sqrt(np.maximum(square, 0) + cancelled)
        result = length * ball
        tokens = _those_that_matter(shares, result)
        result[tokens] = np.minimum(result[tokens], self._by_direction(bound, row, tokens, mean, length[tokens], along))
        hidden = (self._lengths + float(shares @ self._lengths)) * float(bound.off[row])
        moved: Vector = (result + hidden) * (1 + MARGIN)
        return moved, off * ball

    def mean(self, shares: Vector) -> tuple[Vector, float]:
        """Returns the mean of the rows after multiplication by the gain, weighted by `shares` (V): float64 (H). Also
        bounds the 2-norm of its error. The entries of each row and of the mean sum to zero. Each block of rows is added
        in float32."""
        whole = len(shares) // BLOCK * BLOCK
        blocks = shares[:whole].astype(np.float32).reshape(-1, 1, BLOCK)
        sums = blocks @ self._read[:whole].reshape(len(blocks), BLOCK, self._read.shape[1])
        mean: Vector = sums.sum(axis=(0, 1), dtype=np.float64) + shares[whole:] @ self._read[whole:]
        mean -= mean.mean()
        return mean, 2 * (BLOCK + 8) * UNIT * self._longest + TINY

    def _by_direction(
        self, bound: WindowBound, row: int, tokens: NDArray[np.intp], mean: Vector, length: Vector, along: float
    ) -> Vector:
        """Bounds the change of `(W_a - mean) . hidden` for the given tokens a, (P). mean: the mean of the rows, after
        multiplication by the LayerNorm's gain. length: (P), the length of each token's `W_a - mean`, after the same
        multiplication."""
        assert bound.norm is not None, "the network is plain, so it has no logit margins: this is a bug"
        unit, factor = bound.norm.derivative(row)
        read = Beside(self._read[tokens], self._sizes[tokens], mean)
        derivative = Derivative(factor, unit[:, None], -factor * unit[None], factor)
        by_column = read.products(derivative.columns)
        lead = np.abs(by_column[:, 0].astype(np.float64)) + read.off(1.0)
        left = np.zeros(len(tokens))
        for layer, step in reversed(list(enumerate(bound.steps))):
            left += length * (derivative.size * float(step.off[row]))
            if step.fed is not None and step.norm is not None:
                live = step.fed.live(row)
                outer = derivative.times(live.outer)
                inner_unit, inner_factor = step.norm.derivative(row)
                centred = live.inner - live.inner.mean(axis=1, keepdims=True)
                turned = inner_factor * (centred - np.outer(centred @ inner_unit, inner_unit))
                if not _fits_float32(outer, live.slack, live.inner, turned):
                    return np.full(len(tokens), np.inf)
                products, sizes = read.products(outer), np.linalg.norm(outer, axis=0)
                left += np.abs(products) @ live.slack + read.off(float(sizes @ live.slack), float(live.slack.sum()))
                left += length * (derivative.size * live.off)
                second = live.lengths(products * live.slope)
                inner = float(np.linalg.norm(live.inner))
                second += read.off(float(np.linalg.norm(sizes * live.slope)) * inner, inner)
                left += second * step.norm.remainder[row]
                by_column = np.hstack([by_column, products])
                derivative = derivative.plus(outer, live.slope[:, None] * turned)
                left += length * (derivative.size * float(step.mixed[row]))
            left += self._by_unit(layer, tokens, read, by_column, derivative, mean, step.error[0].box[row])
        left += length * (derivative.size * float(bound.below[row]))
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
        by_column: Matrix32,
        derivative: Derivative,
        mean: Vector,
        box: Vector,
    ) -> Vector:
        """Bounds `sum_i |gradient_i| box_i` for each token: (P). The gradients are those of the difference between the
        token's logit and the mean, with respect to the units of a layer's state. by_column: (P, C), `read` times
        `derivative.columns`. box: (units), the bounds of the units' changes."""
        mix, factor = self._mixes[layer], derivative.factor
        # The gradients are `factor (rows mix - mean mix + by_column (derivative.rows / factor) mix)`.
        scaled = derivative.rows / factor
        of_mean = mean.astype(np.float32) @ mix
        if not _fits_float32(scaled, of_mean, box):
            return np.full(len(tokens), np.inf)
        low_rank = np.vstack([scaled.astype(np.float32) @ mix, -of_mean])
        by_column = np.hstack([by_column, np.ones((len(by_column), 1), np.float32)])
        if not _fits_float32(low_rank):
            return np.full(len(tokens), np.inf)
        total, box32 = np.empty(len(tokens)), box.astype(np.float32)
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            gradients = by_column[part] @ low_rank
            gradients += self._mixed[layer][tokens[part]]
            total[part] = np.abs(gradients, out=gradients) @ box32
        total *= factor * (1 + 2 * (len(box) + 4) * UNIT)
        # Each gradient is a sum of products of up to three float32 matrices. Each of them has the error of a product of
        # H or C numbers, relative to the product of the lengths.
        sizes = np.linalg.norm(derivative.columns, axis=0) @ np.linalg.norm(derivative.rows, axis=1)
        length = (factor + float(sizes)) * float(self._columns[layer] @ box)
        terms = 2 * len(mean) + by_column.shape[1]
        result: Vector = total + read.off(length, max(1.0, factor) * (1 + float(box.sum())), terms)
        return result


class Beside:
    """P rows r_j minus a vector m, which are multiplied in float32 by columns.

    rows: float32 (P, H), r. sizes: (P), the 2-norms of the rows. mean: (H), m. Let two vectors of n numbers be rounded
    to float32 and multiplied in float32. The error of their product is at most (n + 4) u / (1 - (n + 4) u) times the
    product of the two 2-norms, where u is the unit roundoff.
    """

    def __init__(self, rows: Matrix32, sizes: Vector, mean: Vector) -> None:
        self._rows, self._mean = rows, mean
        self._sizes: Vector = sizes + float(np.linalg.norm(mean))

    def products(self, columns: Matrix) -> Matrix32:
        """Returns (r_j - m) . c_i for the columns c_i, (H, N): (P, N). `off` bounds the rounding errors."""
        products = self._rows @ columns.astype(np.float32)
        products -= (self._mean @ columns).astype(np.float32)
        return products

    def off(self, length: float, weight: float = 1.0, terms: int = 0) -> Vector:
        """Bounds the rounding error of each row's product with a column of this length, (P). It also bounds the error
        of a weighted sum of such products. `length` is then the weighted sum of the columns' lengths, and `weight` the
        sum of the weights. terms: the number of additional float32 operations for each result."""
        terms += self._rows.shape[1] + 16
        result: Vector = self._sizes * (length * 2 * terms * UNIT / (1 - terms * UNIT)) + TINY * weight
        return result


def _fits_float32(*arrays: Matrix | Vector | Matrix32) -> bool:
    """Returns whether no number exceeds LARGEST."""
    return all(bool(np.abs(values).max(initial=0.0) < LARGEST) for values in arrays)


def _those_that_matter(shares: Vector, moved: Vector) -> NDArray[np.intp]:
    """Returns the ids of the tokens that need a sharper bound than `moved` (V), the bound of each logit's change that
    the radius implies. All other tokens together add at most the share NEGLIGIBLE of the total variation's bound that
    the radius implies."""
    added = np.where(moved < MOST_MOVED, shares * np.expm1(np.minimum(moved, MOST_MOVED)), np.inf)
    order = np.argsort(added)
    negligible = np.cumsum(added[order]) <= NEGLIGIBLE * np.tanh(moved.max() / 2)
    matter = np.ones(len(moved), np.bool_)
    matter[order[: np.count_nonzero(negligible)]] = False
    return np.flatnonzero(matter)
