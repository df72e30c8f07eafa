"""A feed-forward beside a run that is somewhere near: how far its output moves, as a whole and along a direction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.deviation import TINY, Linear
from wane.models.certificate.interval_rounding import Matrix, Vector


class FeedForward:
    """`W_2 relu(W_1 x + b_1) + b_2`."""

    def __init__(self, inner: Linear, outer: Linear) -> None:
        self.inner = inner
        self.outer = outer
        self.columns = Linear(outer.weight.T)

    def __call__(self, x: Matrix, ball: Vector, units: Matrix | None = None) -> Fed:
        """x: (B, H), which moves by at most `ball` (B), and `inner x` by no more than `units` (B, R)."""
        return Fed(self, x, ball, units)


@dataclass(frozen=True, slots=True)
class Live:
    """A row's units that may be on, U of them: their columns of the outer matrix (H, U) and rows of the inner one (U,
    H), the slopes of the lines that stand for relu, and how far that is from those, (U); off: of all the rest, for a
    function of length 1."""

    outer: Matrix
    inner: Matrix
    slope: Vector
    slack: Vector
    off: float


class Fed:
    """What a feed-forward puts out, `value` (B, H), and how far that moves, `ball` (B).

    A unit that stays off moves nothing and one that stays on is linear. In between, with a pre-activation p that
    moves by at most r > |p|, relu is within (r - |p|) / 2 of a line of slope (r + p) / 2 r.
    """

    def __init__(self, layer: FeedForward, x: Matrix, ball: Vector, units: Matrix | None = None) -> None:
        self._layer = layer
        p, off = layer.inner(x), layer.inner.rounding(x)
        r = ball[:, None] * layer.inner.rows
        r = (r if units is None else np.minimum(r, units)) + off
        live = (p + r > 0).astype(np.float64)
        unit = np.minimum(r, np.maximum(0, p + r))
        through = layer.inner.scaled_norm(live) * ball + np.linalg.norm(live * off, axis=1)
        through = np.minimum(through, np.linalg.norm(unit, axis=1))
        active = np.maximum(p, 0)
        self.value: Matrix = layer.outer(active)
        self._off = np.linalg.norm(layer.outer.rounding(active), axis=1)
        self.ball: Vector = (
            np.minimum(layer.columns.scaled_norm(live) * through, layer.outer.furthest(unit)) + self._off
        )
        self._slope = np.clip((p + r) / (2 * np.maximum(r, TINY)), 0, 1)
        self._slack = np.maximum(0, (r - np.abs(p)) / 2) + off

    def pull(self, g: Matrix, rows: NDArray[np.intp]) -> tuple[Matrix, Vector]:
        """Of functions `g . value` (P, H), each of one of the rows (P): a linear function of x, and how far off."""
        if len(self._slope) == 1:
            alone = self._alone
            units = g @ alone.outer
            left = np.abs(units) @ alone.slack + np.linalg.norm(g, axis=1) * alone.off
            return (units * alone.slope) @ alone.inner, left
        units = g @ self._layer.outer.weight
        left = np.einsum("pu,pu->p", np.abs(units), self._slack[rows])
        left = left + np.linalg.norm(g, axis=1) * self._off[rows]
        return (units * self._slope[rows]) @ self._layer.inner.weight, left

    def live(self, row: int) -> Live:
        """What may be on of one row."""
        live = self._slope[row] > 0
        off = float(self._layer.columns.rows[~live] @ self._slack[row, ~live]) + float(self._off[row])
        outer, inner = self._layer.outer.weight[:, live], self._layer.inner.weight[live]
        return Live(outer, inner, self._slope[row, live], self._slack[row, live], off)

    @cached_property
    def _alone(self) -> Live:
        return self.live(0)
