"""Bounds the distance between a feed-forward block's outputs in the window and in the uninterrupted run, in the 2-norm
and along a direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.deviation import TINY, Linear
from wane.models.certificate.interval_rounding import Matrix, Vector, roundoff

UnitBounds = Callable[[NDArray[np.intp]], Matrix]
"""From the indices of E inner units, returns bounds of the changes of their pre-activations: (B, E)."""


class FeedForward:
    """The feed-forward block `W_2 relu(W_1 x + b_1) + b_2`. `inner` is the first linear map and `outer` the second."""

    def __init__(self, inner: Linear, outer: Linear) -> None:
        self.inner = inner
        self.outer = outer
        self.columns = Linear(outer.weight.T)

    def __call__(self, x: Matrix, ball: Vector, unit_bounds: UnitBounds | None = None) -> Fed:
        """Returns the block's output and the bound of its change. x: (B, H). x changes by at most `ball` (B) in the
        2-norm. unit_bounds: a function that returns sharper bounds for some inner units."""
        return Fed(self, x, ball, unit_bounds)


@dataclass(frozen=True, slots=True)
class Live:
    """The U inner units that may be active in one row of the batch.

    outer: these units' columns of the outer matrix, (H, U).
    inner: these units' rows of the inner matrix, (U, H).
    slope: the slopes of the lines that approximate relu, (U).
    slack: the largest distances of relu from these lines, (U).
    off: the bound of the effect of all other units and of rounding on `g . value`, for any vector g with |g|_2 = 1.
    """

    outer: Matrix
    inner: Matrix
    slope: Vector
    slack: Vector
    off: float

    def lengths(self, x: Matrix) -> Vector:
        """Bounds the 2-norm of `x inner` for each row of x, (P, U): (P). It is computed from the products of two rows
        of `inner`, which are fewer than the entries of a product `x inner`. The rounding of the sum, whose terms may
        cancel, is added."""
        rows = np.linalg.norm(self.inner, axis=1)
        squares = np.einsum("pu,pu->p", x @ (self.inner @ self.inner.T), x)
        cancelled = 4 * roundoff(self.inner.shape[1] + 2 * len(rows)) * (np.abs(x) @ rows) ** 2
        result: Vector = np.sqrt(np.maximum(squares, 0) + cancelled)
        return result


class Fed:
    """The output of a feed-forward block, `value` (B, H), and the 2-norm bound of its change, `ball` (B).

    A unit that stays inactive has no effect on the change, and a unit that stays active is linear. A unit may become
    active or inactive if its pre-activation p may change by r > |p|. On [p - r, p + r], relu is then within (r - |p|) /
    2 of a line with the slope (r + p) / (2 r).
    """

    def __init__(self, layer: FeedForward, x: Matrix, ball: Vector, unit_bounds: UnitBounds | None = None) -> None:
        self._layer = layer
        p, off = layer.inner(x), layer.inner.rounding(x)
        r = ball[:, None] * layer.inner.rows + off
        if unit_bounds is not None:
            # A unit that stays inactive for this r has no effect, so it needs no sharper bound.
            open_ = np.flatnonzero((p + r > 0).any(axis=0))
            r[:, open_] = np.minimum(r[:, open_], unit_bounds(open_) + off[:, open_])
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
        """Returns the gradients (P, H) of linear functions of x that approximate the changes of `g . value`, and the
        bounds of their errors, (P). g: (P, H). Vector j of g belongs to row `rows[j]` of the batch."""
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
        """Returns the units that may be active in one row of the batch."""
        live = self._slope[row] > 0
        off = float(self._layer.columns.rows[~live] @ self._slack[row, ~live]) + float(self._off[row])
        outer, inner = self._layer.outer.weight[:, live], self._layer.inner.weight[live]
        return Live(outer, inner, self._slope[row, live], self._slack[row, live], off)

    @cached_property
    def _alone(self) -> Live:
        return self.live(0)
