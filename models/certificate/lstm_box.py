"""What every unit of an LSTM stays within."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.admissible import Inputs, Reach, Rows
from wane.models.certificate.outward import UP, Matrix, Vector, product_above
from wane.models.reference import sigmoid

ITERATIONS = 100
SETTLED = 1e-13

SATURATED = 1e-9
"""A forget gate that may come this close to 1 leaves c without a bound worth the name: the factor is then >= 1."""


@dataclass(frozen=True, slots=True)
class LstmBox:
    """The pre-activations of i, f, g, o, and the greatest |c| and |h|, (H) each, from the zero state."""

    reach: tuple[Reach, Reach, Reach, Reach]
    c: Vector
    h: Vector
    saturated: NDArray[np.bool_]

    @classmethod
    def settle(cls, weight_ih: Matrix, weight_hh: Matrix, bias: Vector, inputs: Inputs) -> LstmBox:
        """The fixed point, from |h| < 1 inward."""
        hidden = weight_hh.shape[1]
        driven, magnitude = inputs.reach(weight_ih, bias), np.abs(weight_hh)
        h = np.ones(hidden)
        for _ in range(ITERATIONS):
            reach = driven.wider(product_above(magnitude, h))
            i, f, g, o = (reach[rows : rows + hidden] for rows in range(0, 4 * hidden, hidden))
            room = sigmoid(-f.high)  # 1 - f^
            saturated = room < SATURATED
            c = sigmoid(i.high) * np.tanh(g.magnitude()) / np.where(saturated, SATURATED, room) * UP
            shown = np.where(saturated, 1.0, np.tanh(c))
            box = cls((i, f, g, o), c, np.minimum(sigmoid(o.high) * shown * UP, 1.0), saturated)
            if np.all(h - box.h <= SETTLED):
                break
            h = np.minimum(h, box.h)
        return box._token_by_token(weight_ih, weight_hh, bias, inputs) if isinstance(inputs, Rows) else box

    def _token_by_token(self, weight_ih: Matrix, weight_hh: Matrix, bias: Vector, inputs: Rows) -> LstmBox:
        """A smaller box for c, the gates and the candidate at their greatest for one token, not each for its own.

        `|c'| <= f(x) |c| + i(x) |g(x)|`, so |c| <= the greatest of `i |g| / (1 - f)` over x.
        """
        recalled = product_above(np.abs(weight_hh), self.h)
        mirrored = np.split(-weight_ih, 4)[2], np.split(recalled - bias, 4)[2]
        c = np.zeros_like(self.c)
        for part in inputs.parts():
            i, f, g, _ = np.split(inputs.each(weight_ih, bias + recalled, part), 4, axis=1)
            g = np.maximum(np.abs(g), inputs.each(*mirrored, part))
            room = np.maximum(sigmoid(-f) / UP, SATURATED)
            c = np.maximum(c, (sigmoid(i) * np.tanh(g) / room).max(axis=0) * UP)
        return replace(self, c=np.where(self.saturated, self.c, np.minimum(c, self.c)))
