"""The RNN: `h' = rho(W h + U x + b)`, rho = tanh (`rnn_tanh`) or max(0, .) (`rnn_relu`).

For equal inputs, one step multiplies the difference of two states by at most `|N W|`. N is the greatest slope of rho
over all reachable states (`models/certificate/recurrent.py`). |tanh| <= 1 bounds the state. The bounded state limits
the pre-activation, which gives a smaller bound of the state, and so on.

**One step in a window** (`moved`): dh and dx bound the distances of the window's h and x from those of the
uninterrupted run (`cell_step.py`). Let slope be each unit's greatest slope of rho within these distances. Unit by unit,
`dh' <= slope (|W| dh + |U| dx)`. In the 2-norm, `|dh'|_2 <= |diag(slope) W|_2 |dh|_2 + |diag(slope) U|_2 |dx|_2`.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.admissible import Inputs, Reach
from wane.models.certificate.cell_step import CellStep, Deviations, Moved, Pre, States
from wane.models.certificate.deviation import tanh_rise, tanh_slope
from wane.models.certificate.interval_rounding import UP, Matrix, Vector, product_above
from wane.models.certificate.layer_bound import Layer
from wane.models.certificate.perturbation import Perturbation
from wane.models.certificate.recurrent import SETTLING, RecurrentLayer
from wane.models.weights import CellWeights


class TanhLayer(RecurrentLayer):
    """The proofs of a layer whose rho is tanh."""

    def _slope_and_reach(self, driven: Reach, magnitude: Matrix) -> tuple[Vector, Vector]:
        reach = np.ones(self.hidden)
        for _ in range(SETTLING):
            within = driven.wider(product_above(magnitude, reach))
            reach = np.minimum(reach, np.tanh(within.magnitude()) * UP)
        return np.minimum(within.tanh_slope() * UP, 1.0), reach

    def local(self, before_gates: Vector, function: float, unit: float) -> tuple[Perturbation, ...]:
        del unit  # the state is the result of tanh, so only tanh adds an error
        return (Perturbation.within(before_gates + function),)


def build_layer(cell: CellWeights, inputs: Inputs) -> Layer:
    """Builds the proofs of a layer for all admissible inputs."""
    return TanhLayer(cell, inputs) if cell.layer.kind == "rnn_tanh" else RecurrentLayer(cell, inputs)


def moved(step: CellStep, pre: list[Pre], state: States, error: Deviations) -> Moved:
    """Computes the cell's next state in a window, and bounds of the distance between this state and the uninterrupted
    run's state (see `Moved`)."""
    both = pre[0] + Pre.of(step.recurrent[0], state[0], error[0])
    p, radius = both.value, both.radius
    if step.layer.kind == "rnn_tanh":
        return (np.tanh(p),), (tanh_rise(p, radius),), (both.ball(tanh_slope(p, radius)),)
    live = (p + radius > 0).astype(np.float64)
    return (np.maximum(p, 0),), (np.minimum(radius, np.maximum(0, p + radius)),), (both.ball(live),)
