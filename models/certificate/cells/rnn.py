"""The RNN: `h' = rho(W h + U x + b)`, rho = tanh (`rnn_tanh`) or max(0, .) (`rnn_relu`).

Its difference shrinks by `|N W|`, N the greatest slope of rho within reach (`models/certificate/recurrent.py`). |tanh|
is at most 1. Each repetition with the bounded state gives a smaller bound.

**One window** (`moved`): `dh' <= |slope| (|W| dh + |U| dx)`, or in the 2-norm `|diag(slope) W|_2 |dh|_2`, with the
greatest slopes within reach.
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
    """A layer whose rho is tanh."""

    def _slope_and_reach(self, driven: Reach, magnitude: Matrix) -> tuple[Vector, Vector]:
        reach = np.ones(self.hidden)
        for _ in range(SETTLING):
            within = driven.wider(product_above(magnitude, reach))
            reach = np.minimum(reach, np.tanh(within.magnitude()) * UP)
        return np.minimum(within.tanh_slope() * UP, 1.0), reach

    def local(self, before_gates: Vector, function: float, unit: float) -> tuple[Perturbation, ...]:
        del unit  # no arithmetic follows the function
        return (Perturbation.within(before_gates + function),)


def build_layer(cell: CellWeights, inputs: Inputs) -> Layer:
    """Builds the proofs of a layer for all admissible inputs."""
    return TanhLayer(cell, inputs) if cell.cell == "rnn_tanh" else RecurrentLayer(cell, inputs)


def moved(step: CellStep, pre: list[Pre], state: States, error: Deviations) -> Moved:
    """Computes one step of a window and the bounds of its distance from the run."""
    both = pre[0] + Pre.of(step.recurrent[0], state[0], error[0])
    p, radius = both.value, both.radius
    if step.cell == "rnn_tanh":
        return (np.tanh(p),), (tanh_rise(p, radius),), (both.ball(tanh_slope(p, radius)),)
    live = (p + radius > 0).astype(np.float64)
    return (np.maximum(p, 0),), (np.minimum(radius, np.maximum(0, p + radius)),), (both.ball(live),)
