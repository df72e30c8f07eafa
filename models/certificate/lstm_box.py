"""What every unit of an LSTM stays within."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.certificate.admissible import Inputs, Reach
from models.certificate.outward import UP, Matrix, Vector, product_above
from models.reference import sigmoid

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
        return box
