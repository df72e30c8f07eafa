"""Whether the first token of an answer is proved to be the never-interrupted model's, by the margin it leads by.

With output rows V_a, logits are l_a = V_a . h + b_a. If the two models' h are at most E apart, the lead l_a - l_b of
a token over another moves by at most |V_a - V_b|_2 E. So the first token is proved where, for every other b,

    l_a - l_b  >  |V_a - V_b|_2 E + rounding of the four logits.

Tokens for which that fails are rivals: whether they are by direction too, `direction.py` says.

The rounding is a theorem too: n terms summed in float32, in whatever order, are off by at most gamma = n u / (1 - n u)
of the sum of their magnitudes, u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2);
here |V_a|_2 |h|_2 + |b_a|, and |h|_2 + E for the other run. All of it is evaluated in float64.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from models.weights import Weights, head_weight
from service.engine.batch import Row
from service.engine.outputs import Top

UNIT = 2.0**-24  # u of float32
OUTWARD = 1 + 1e-9  # relative: far above what float64 makes of distances and norms
AT_ONCE = 64  # rows whose distance from the first token's row is computed in one go


class Margin:
    """The output layer's geometry, of which whatever does not depend on a request is computed once."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._rows = head_weight(weights)
        rows = self._rows.astype(np.float64)
        self._norms: NDArray[np.float64] = np.sqrt((rows**2).sum(axis=1)) * OUTWARD
        terms = rows.shape[1] + 2  # the products, the bias, and one to spare
        self._gamma = terms * UNIT / (1 - terms * UNIT) * OUTWARD
        self._of_bias: NDArray[np.float64] = 2 * self._gamma * np.abs(weights["head.bias"].astype(np.float64))
        self._of_norm: NDArray[np.float64] = 2 * self._gamma * self._norms
        # By token, as plain floats: of one or two at a time that is a good deal less work.
        self._norm_of: list[float] = self._norms.tolist()
        self._rounding_of: list[tuple[float, float]] = list(
            zip(self._of_norm.tolist(), self._of_bias.tolist(), strict=True)
        )
        self._largest_norm = float(self._norms.max())
        self._largest_of_norm = float(self._of_norm.max())
        self._largest_of_bias = float(self._of_bias.max())

    def proves(
        self, logits: NDArray[np.float32], hidden: NDArray[np.float32], error: float, top: Top | None = None
    ) -> bool:
        """Whether the first token of `logits` (V), which came of `hidden` (H), is first for every h within `error`
        of it, in any float32 run of the output layer. `top`: of the same logits."""
        settled = self._at_a_look(logits, hidden, error, top)
        return self._has_no_rival(logits, hidden, error) if settled is None else settled

    def proves_of_row(self, row: Row, error: float) -> bool:
        """As `proves`, of a row that has logits and hidden."""
        largest = row.largest(2)
        settled: bool | None = None
        if largest is not None:
            ids, values = largest.ids, largest.logits
            settled = self._over(ids[0], ids[1], values[0] - values[1], row.length, error)
        if settled is not None:
            return settled
        logits, hidden = row.logits, row.hidden
        assert logits is not None and hidden is not None, "a step without an answer: this is a bug"
        return self.proves(logits, hidden, error)

    def _at_a_look(
        self, logits: NDArray[np.float32], hidden: NDArray[np.float32], error: float, top: Top | None = None
    ) -> bool | None:
        """Whether it is, or None, where that takes a look at all tokens and not only at the second.

        If the second is so far behind that it would not matter which row was its own, nobody comes before the first:
        where the error is that of rounding, that settles nearly all. And one rival is enough: mostly it is the second.
        """
        largest = None if top is None else top.first(2)
        if largest is not None:
            first, second = largest.ids[:2]
        else:
            first = int(logits.argmax())
            others = logits.copy()
            others[first] = -np.inf
            second = int(others.argmax())
        if first == second:  # there is one token
            return math.isfinite(error)
        exact = hidden.astype(np.float64)
        lead = float(logits[first]) - float(logits[second])
        return self._over(first, second, lead, math.sqrt(exact @ exact), error)

    def _over(self, first: int, second: int, lead: float, length: float, error: float) -> bool | None:
        """The same, of the largest two and by how much one leads; `length` is the 2-norm of what they came of."""
        length = length * OUTWARD + error
        of_norm, of_bias = self._rounding_of[first]
        lead -= of_norm * length + of_bias
        most = self._largest_of_norm * length + self._largest_of_bias
        if lead - most > (self._largest_norm + self._norm_of[first]) * error:
            return True
        of_norm, of_bias = self._rounding_of[second]
        gap = self._rows[second].astype(np.float64) - self._rows[first]
        if not lead - (of_norm * length + of_bias) > math.sqrt(gap @ gap) * OUTWARD * error:
            return False
        return None

    def _has_no_rival(self, logits: NDArray[np.float32], hidden: NDArray[np.float32], error: float) -> bool:
        found = self.rivals(logits, hidden, error, most=0)
        return found is not None and not len(found)

    def rivals(
        self, logits: NDArray[np.float32], hidden: NDArray[np.float32], error: float, most: int
    ) -> NDArray[np.intp] | None:
        """The tokens that may come before the first one of `logits` for an h within `error`, those that follow it most
        closely first; none are left where it is proved. None: more than `most`, or nothing could prove it."""
        if not math.isfinite(error):
            return None
        first = int(logits.argmax())
        length = float(np.sqrt(np.square(hidden, dtype=np.float64).sum())) * OUTWARD + error
        lead: NDArray[np.float64] = float(logits[first]) - logits.astype(np.float64)
        lead -= self.rounding(slice(None), length)
        lead -= float(self.rounding(first, length))
        lead[first] = np.inf
        second = int(lead.argmin())
        if lead[second] <= 0 or (most == 0 and not self._leads(lead, first, np.array([second]), error).all()):
            return None
        # |V_a - V_b| <= |V_a| + |V_b| settles nearly all; the rest are looked at, nearest first.
        unsettled = np.flatnonzero(lead <= (self._norms + self._norms[first]) * error)
        unsettled = unsettled[np.argsort(lead[unsettled])]
        left: list[NDArray[np.intp]] = []
        for start in range(0, len(unsettled), AT_ONCE):
            chunk = unsettled[start : start + AT_ONCE]
            left.append(chunk[~self._leads(lead, first, chunk, error)])
            if sum(map(len, left)) > most:
                return None
        return np.concatenate([*left, unsettled[:0]])

    def rounding(self, tokens: NDArray[np.intp] | slice | int, length: float) -> NDArray[np.float64]:
        """Twice what float32 may put these tokens' logits off, for an h of at most this length: of two runs."""
        result: NDArray[np.float64] = np.asarray(self._of_norm[tokens] * length + self._of_bias[tokens])
        return result

    def _leads(
        self, lead: NDArray[np.float64], first: int, others: NDArray[np.intp], error: float
    ) -> NDArray[np.bool_]:
        """Whether the first token leads over each of the others by more than the error can take away."""
        apart = np.sqrt(np.square(self._rows[others].astype(np.float64) - self._rows[first]).sum(axis=1)) * OUTWARD
        result: NDArray[np.bool_] = lead[others] > apart * error
        return result
