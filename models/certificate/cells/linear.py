"""The linear cell: `h' = W h + U x + b`.

For equal inputs, the difference of two states becomes `W (h - h~)`. A step reduces this difference in any
matrix-weighted norm in which W has a norm below 1 (`scaling.py`).

**One step in a window** (`moved`): dh and dx bound the distances of the window's h and x from those of the
uninterrupted run (`cell_step.py`). Unit by unit, `dh' <= |W| dh + |U| dx`. In the 2-norm, `|dh'|_2 <= |W|_2 |dh|_2 +
|U|_2 |dx|_2`.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.admissible import Inputs
from wane.models.certificate.cell_step import CellStep, Deviations, Moved, Pre, States
from wane.models.certificate.interval_rounding import Matrix
from wane.models.certificate.layer_bound import Layer
from wane.models.certificate.recurrent import RecurrentLayer
from wane.models.certificate.scaling import Gauge, lyapunov
from wane.models.weights import CellWeights


class LinearLayer(RecurrentLayer):
    """The proofs of one linear layer. weight_ih: (H, I), weight_hh: (H, H), biases: (H)."""

    def _gauges(self, matrix: Matrix) -> dict[str, Gauge | None]:
        return super()._gauges(matrix) | {"lyapunov": lyapunov(matrix)}


def build_layer(cell: CellWeights, inputs: Inputs) -> Layer:
    """Builds the proofs of a layer for all admissible inputs."""
    return LinearLayer(cell, inputs)


def moved(step: CellStep, pre: list[Pre], state: States, error: Deviations) -> Moved:
    """Computes the cell's next state in a window, and bounds of the distance between this state and the uninterrupted
    run's state (see `Moved`)."""
    after = pre[0] + Pre.of(step.recurrent[0], state[0], error[0])
    return (after.value,), (after.radius,), (after.ball(np.ones_like(after.value)),)
