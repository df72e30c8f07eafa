"""Proves that a window and the uninterrupted run have the same most probable token, and bounds the distance of the two
distributions.

Let W_a be the row of the output matrix for token a. The lead of token a over token b is the difference of their logits.
Between the window and the run, the lead changes by `(W_a - W_b) . (hidden~ - hidden)`. a has the larger logit in the
run if a bound of this change is below the window's lead. There are three bounds. Each is computed only for the tokens b
for which the previous bound is too large:

1. `(|W_a| + |W_b|) radius`, which is enough for nearly all tokens. The radius bounds |hidden~ - hidden|.
2. `|W_a - W_b| radius`.
3. A bound by the lead's gradient. The gradient is propagated back through the last LayerNorm, the feed-forward blocks
   and the mixing matrices to each layer's state, at the window's values. The bound of each state's error is known unit
   by unit, so the lead changes by at most `sum_i |gradient_i| error_i`, to first order. Two kinds of terms beyond the
   first order are added to the bound: the second order of a LayerNorm (`layer_norm.py`), and the relu units that may
   become active or inactive (`feed_forward.py`).

The distributions: relative to the logits' mean under the window's distribution, each logit changes by `(W_a - mean) .
(hidden~ - hidden)`, where `mean` is the mean of all W_a under this distribution. `logit_margins.py` bounds this change
in the same way, for all tokens in one computation. `total_variation.py` derives the bound of the total variation.

The bounds hold for the run's logits in exact arithmetic. The window's logits are computed here, and the bounds include
their rounding.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wane.models.architecture import Architecture
from wane.models.certificate.deviation import BEYOND, MARGIN, TINY
from wane.models.certificate.interval_rounding import Matrix, Vector, roundoff
from wane.models.certificate.logit_margins import LogitMargins
from wane.models.certificate.mixture import LogitMoves, first_is_proved
from wane.models.certificate.request import RequestBound, WindowBound
from wane.models.certificate.total_variation import variation_by_token
from wane.models.weights import Weights, head_weight

PAIRS_AT_ONCE = 4096

Flags = NDArray[np.bool_]


class Top1:
    """The proofs for one model. Each method reads the values and bounds of windows that the model's `RequestBound` has
    computed."""

    def __init__(self, architecture: Architecture, weights: Weights, request: RequestBound) -> None:
        self.mixes = [layer.mix for layer in request.layers] if architecture.residual else []
        """The mixing matrices, by layer. Empty for a plain network."""
        self.rows = head_weight(weights).astype(np.float64)
        """The output matrix: (V, H)."""
        self._bias = weights["head.bias"].astype(np.float64)
        self._norms = np.linalg.norm(self.rows, axis=1) * (1 + MARGIN) + TINY
        self.gain = weights["norm.weight"].astype(np.float64) if self.mixes else np.ones(architecture.hidden)
        """The last LayerNorm's gain: (H)."""

    def proved(self, bound: WindowBound) -> Flags:
        """Returns, for each window, whether its most probable token is proved to be the most probable one of every run:
        (B)."""
        logits = bound.hidden @ self.rows.T + self._bias
        length = np.linalg.norm(bound.hidden, axis=1)[:, None]
        off = 2 * roundoff(self.rows.shape[1]) * (length * self._norms + np.abs(self._bias))
        first, every = logits.argmax(axis=1), np.arange(len(logits))
        lead = logits[every, first][:, None] - logits - off - off[every, first][:, None]
        lead[every, first] = np.inf
        radius = bound.radius
        taken = (self._norms + self._norms[first][:, None]) * radius[:, None]
        rows, others = np.nonzero(~(lead > taken))
        proved = np.ones(len(logits), dtype=np.bool_)
        proved[rows[lead[rows, others] <= 0]] = False
        for start in range(0, len(rows), PAIRS_AT_ONCE):
            part = slice(start, start + PAIRS_AT_ONCE)
            row, other = rows[part], others[part]
            going = proved[row]
            row, other = row[going], other[going]
            gap = self.rows[first[row]] - self.rows[other]
            settled = lead[row, other] > (np.linalg.norm(gap, axis=1) * (1 + MARGIN) + TINY) * radius[row]
            row, other, gap = row[~settled], other[~settled], gap[~settled]
            proved[row[~(lead[row, other] > self.moved(bound, gap, row))]] = False
        return proved

    def variation(self, bound: WindowBound) -> Vector:
        """Returns, for each window, the bound of the total variation between its distribution and any run's: (B)."""
        return np.array([variation(self.moves(bound, row)) for row in range(len(bound.hidden))])

    def proved_in_mixture(self, bound: WindowBound, row: int, first: int, weight: float, added: Vector) -> bool:
        """Returns whether `first` is proved to be the most probable token of every run's mixture with a cache. The
        mixture multiplies the network's distribution by `weight` and adds `added` (V)."""
        moves = self.moves(bound, row)
        length = float(np.linalg.norm(bound.hidden[row]))
        off: Vector = 2 * roundoff(self.rows.shape[1]) * (length * self._norms + np.abs(self._bias))

        def lead_moved(others: NDArray[np.intp]) -> Vector:
            gap = self.rows[first] - self.rows[others]
            moved: Vector = self.moved(bound, gap, np.full(len(others), row, np.intp)) + off[first] + off[others]
            return moved

        wider = moves._replace(moved=moves.moved + moves.off + off + off.max())
        return first_is_proved(first, weight, added, wider, lead_moved)

    @cached_property
    def margins(self) -> LogitMargins:
        """The logit margins. They are computed on first use, because they need more memory than the output layer."""
        return LogitMargins(self.rows, self.gain, self.mixes)

    def moves(self, bound: WindowBound, row: int) -> LogitMoves:
        """Returns the bounds of the distance between one window's logits, as computed here, and any run's."""
        radius = float(bound.radius[row])
        logits = self.rows @ bound.hidden[row] + self._bias
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        if not np.isfinite(radius):
            return LogitMoves(logits, shares, np.full(len(shares), np.inf), np.inf)
        # `off` bounds |sum(shares * changes of the logits relative to their mean)|, which is not 0 because of the
        # rounding of the logits, the shares and the mean.
        longest, largest = float(self._norms.max()), float(np.abs(self._bias).max())
        logit = roundoff(self.rows.shape[1]) * (longest * float(np.linalg.norm(bound.hidden[row])) + largest)
        off = (2 * logit + roundoff(len(shares))) * longest * radius
        if bound.norm is None:
            gaps = self.rows - shares @ self.rows
            moved = self.moved(bound, gaps, np.full(len(gaps), row, np.intp))
        else:
            windows = np.array([row])
            along = float(self.stream(bound, bound.norm.along(windows), windows)[0])
            moved, of_mean = self.margins.moved(bound, row, shares, along)
            off += of_mean
        return LogitMoves(logits, shares, moved, off)

    def moved(self, bound: WindowBound, gap: Matrix, rows: NDArray[np.intp]) -> Vector:
        """Returns bounds of the changes of `gap . hidden`: (P). gap: (P, H). Vector j of `gap` belongs to window
        `rows[j]`."""
        if bound.norm is None:
            error = bound.steps[-1].error[0]
            moved = _support(gap, error.box[rows], error.ball[rows]) * (1 + MARGIN)
            return np.where(error.ball[rows] < BEYOND, moved, np.inf)
        g = gap * self.gain
        windows, row = np.unique(rows, return_inverse=True)
        gradient, left = bound.norm.pull(g, rows)
        pulled = np.concatenate([gradient, bound.norm.along(windows)])
        changed = self.stream(bound, pulled, np.concatenate([rows, windows]))
        moved, along = changed[: len(rows)], changed[len(rows) :][row]
        moved = np.minimum(moved + left, bound.norm.turned(g, rows, moved, along))
        moved = np.minimum(moved, np.linalg.norm(g, axis=1) * bound.norm.ball[rows])
        result: Vector = (moved + np.linalg.norm(gap, axis=1) * bound.off[rows]) * (1 + MARGIN)
        return result

    def stream(self, bound: WindowBound, g: Matrix, rows: NDArray[np.intp]) -> Vector:
        """Returns bounds of the changes of `g . x`, where x is the last LayerNorm's input: (P). g: (P, H). Vector j of
        g belongs to window `rows[j]`."""
        left = np.zeros(len(g))
        for step, mix in zip(reversed(bound.steps), reversed(self.mixes), strict=True):
            left = left + np.linalg.norm(g, axis=1) * step.off[rows]
            if step.fed is not None and step.norm is not None:
                inner, units_left = step.fed.pull(g, rows)
                inner, norm_left = step.norm.pull(inner, rows)
                g = g + inner
                left = left + units_left + norm_left + np.linalg.norm(g, axis=1) * step.mixed[rows]
            error = step.error[0]
            left = left + _support(g @ mix.weight, error.box[rows], error.ball[rows])
        result: Vector = left + np.linalg.norm(g, axis=1) * bound.below[rows]
        return result


def variation(moves: LogitMoves) -> float:
    """Returns the bound of the total variation between a window's distribution and any run's."""
    return variation_by_token(moves.shares, moves.moved, moves.off)


def _support(g: Matrix, box: Matrix, ball: Vector) -> Vector:
    """Returns the greatest `g . d` over all d with |d_i| <= box_i and |d|_2 <= ball, plus the rounding of g itself:
    (P)."""
    by_unit = np.einsum("pu,pu->p", np.abs(g), box)
    length = np.linalg.norm(g, axis=1)
    result: Vector = np.minimum(by_unit, length * ball) + MARGIN * length * ball
    return result
