"""How far all tokens' logits of one window move at once, each beside their mean.

`top1.py` pulls the gradient of one lead after another back to the states. For all tokens of a vocabulary it is cheaper
to go by the states: the derivative of what the output layer reads, with respect to the few units whose states are still
uncertain, is one matrix G, and the rows of the output layer times G are all gradients. What a gradient leaves out is
counted as there: token by token where it is little work, by lengths where it is little.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.deviation import MARGIN, Linear
from wane.models.certificate.interval_rounding import Matrix, Vector
from wane.models.certificate.request import WindowBound

CANCELLED = 1e-12
"""Of squares of lengths, added to what their difference is computed to."""

CERTAIN = 0.0005
"""Of all units' errors, as far as a mixing matrix sends them, this share is counted by lengths: those of the most
certain units."""

MOST_OPEN = 128
"""And of those whose errors are sent furthest no more units than these are not."""


class LogitMargins:
    """Of one model with LayerNorms. rows: (V, H), of the output layer; gain: (H), of the last LayerNorm; mixes: by
    layer."""

    def __init__(self, rows: Matrix, gain: Vector, mixes: list[Linear]) -> None:
        read = rows * gain
        self._read = read - read.mean(axis=1, keepdims=True)
        self._squares = np.einsum("vh,vh->v", self._read, self._read)
        self._lengths = np.linalg.norm(rows, axis=1)
        self._mixes = mixes
        self._columns = [np.linalg.norm(mix.weight, axis=0) for mix in mixes]

    def moved(self, bound: WindowBound, row: int, shares: Vector, along: float) -> Vector:
        """How far each `(V_a - mean) . hidden` moves at most, (V), the mean of all V_a by `shares` (V).

        along: how far the last LayerNorm's input moves along itself (`Normalised.along`).
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
                corner = np.linalg.qr(live.inner.T).R  # as long as the inner rows, in fewer numbers
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
        # each product above is off by far less than MARGIN of the lengths that it is made of, which may cancel
        left += MARGIN * (np.sqrt(self._squares) + np.sqrt(of_mean)) * bound.norm.reached(row)
        lead = np.abs(self._beside(unit[:, None], mean)[:, 0])
        first = left + length * float(bound.norm.remainder[row])
        result = np.minimum(first, bound.norm.turned_by(length, lead, row, left, along))
        result = np.minimum(result, length * bound.norm.ball[row])
        hidden = (self._lengths + float(shares @ self._lengths)) * float(bound.off[row])
        moved: Vector = (result + hidden) * (1 + MARGIN)
        return moved

    def _beside(self, columns: Matrix, mean: Vector) -> Matrix:
        """Each row less the mean, times the columns (H, N): (V, N)."""
        result: Matrix = self._read @ columns - mean @ columns
        return result
