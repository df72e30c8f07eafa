"""Bounds the changes of all tokens' logits of one window, relative to their mean.

`top1.py` pulls the gradient of one lead after another back to the states. For a whole vocabulary it is cheaper to start
from the states: the derivative of the output layer's input, with respect to the few units whose states are still
uncertain, is one matrix G, and the rows of the output layer times G are all gradients. Terms beyond the gradient are
bounded as in `top1.py`: token by token where that is cheap, by lengths where the terms are small.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.deviation import MARGIN, Linear
from wane.models.certificate.interval_rounding import Matrix, Vector
from wane.models.certificate.request import WindowBound

CANCELLED = 1e-12
"""Relative to squares of lengths; added to their computed difference."""

CERTAIN = 0.0005
"""Share of the units' errors, after a mixing matrix, that is bounded by lengths: those of the most certain units."""

MOST_OPEN = 128
"""Largest number of units whose errors are bounded one by one: those with the largest effect."""


class LogitMargins:
    """The margins of one model with LayerNorms.

    rows: (V, H), of the output layer; gain: (H), of the last LayerNorm; mixes: the mixing matrices by layer.
    """

    def __init__(self, rows: Matrix, gain: Vector, mixes: list[Linear]) -> None:
        read = rows * gain
        self._read = read - read.mean(axis=1, keepdims=True)
        self._squares = np.einsum("vh,vh->v", self._read, self._read)
        self._lengths = np.linalg.norm(rows, axis=1)
        self._mixes = mixes
        self._columns = [np.linalg.norm(mix.weight, axis=0) for mix in mixes]

    def moved(self, bound: WindowBound, row: int, shares: Vector, along: float) -> Vector:
        """Bounds the change of each `(V_a - mean) . hidden`, (V), with the mean of all V_a weighted by `shares` (V).

        along: the bound of the last LayerNorm's input's change along itself (`Normalised.along`).
        """
        assert bound.norm is not None, "this is a bug"
        unit, factor = bound.norm.derivative(row)
        mean = shares @ self._read
        of_mean = float(mean @ mean)
        square = self._squares - 2 * (self._read @ mean) + of_mean
        length = np.sqrt(np.maximum(square, 0) + CANCELLED * (self._squares + of_mean))

        passed = factor * (np.eye(len(unit)) - np.outer(unit, unit))
        size, left = factor, np.zeros(len(shares))
        for step, mix, columns in zip(
            reversed(bound.steps), reversed(self._mixes), reversed(self._columns), strict=True
        ):
            left += length * (size * float(step.off[row]))
            if step.fed is not None and step.norm is not None:
                live = step.fed.live(row)
                outer = passed @ live.outer
                left += np.abs(self._beside(outer, mean)) @ live.slack + length * (size * live.off)
                corner = np.linalg.qr(
                    live.inner.T
                ).R  # products with its columns are as long as those with the inner rows
                inner = self._beside((outer * live.slope) @ corner.T, mean)
                left += np.linalg.norm(inner, axis=1) * step.norm.remainder[row]
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
            left += np.abs(self._beside(passed @ mix.weight[:, open_], mean)) @ box[open_]
            rest = box.copy()
            rest[open_] = 0
            left += length * (size * min(float(sent[certain].sum()), float(mix.furthest(rest[None])[0])))
        left += length * (size * float(bound.below[row]))
        # the error of each product above is far below MARGIN of its factors' lengths; its terms may cancel
        left += MARGIN * (np.sqrt(self._squares) + np.sqrt(of_mean)) * bound.norm.reached(row)
        lead = np.abs(self._beside(unit[:, None], mean)[:, 0])
        first = left + length * float(bound.norm.remainder[row])
        result = np.minimum(first, bound.norm.turned_by(length, lead, row, left, along))
        result = np.minimum(result, length * bound.norm.ball[row])
        hidden = (self._lengths + float(shares @ self._lengths)) * float(bound.off[row])
        moved: Vector = (result + hidden) * (1 + MARGIN)
        return moved

    def _beside(self, columns: Matrix, mean: Vector) -> Matrix:
        """Returns each row less the mean, times the columns (H, N): (V, N)."""
        result: Matrix = self._read @ columns - mean @ columns
        return result
