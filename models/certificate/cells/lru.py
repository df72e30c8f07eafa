"""The linear recurrent unit: `s' = lambda * s + U x + b` for complex s.

For equal inputs, a step multiplies the difference of two states by lambda, unit by unit. The modulus of a unit is
therefore multiplied by |lambda| = exp(-exp(nu)), and the factor is the greatest |lambda|, both in the 2-norm and in the
maximum norm of the moduli. From the zero state, a unit's modulus is at most the greatest |U x + b| / (1 - |lambda|).

All bounds are by modulus: the real and the imaginary part of a unit have the same bound.

**Different inputs.** `|s' - s~'| <= |lambda| |s - s~| + |U (x - x~)|` unit by unit, and in the 2-norm with the greatest
|lambda| and |U|_2.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.admissible import Inputs, Rows
from wane.models.certificate.cell_step import CellStep, Deviations, Moved, Pre, States
from wane.models.certificate.deviation import ULP
from wane.models.certificate.interval_rounding import UP, Vector, norm_above
from wane.models.certificate.layer_bound import Errors, Layer, LayerBound, Proof
from wane.models.certificate.norm import Norm
from wane.models.certificate.perturbation import Perturbation
from wane.models.weights import CellWeights


def decay(cell: CellWeights) -> Vector:
    """Returns |lambda| of each complex unit, rounded up, (units / 2). If it rounds to 1 or more, it is at least 1."""
    result: Vector = np.exp(-np.exp(cell.tensors["nu"])) * UP
    return result


def _modulus(pairs: Vector) -> Vector:
    """Returns bounds of the moduli, twice, from bounds of the real and of the imaginary parts: (2N) -> (2N)."""
    real, imaginary = np.split(pairs, 2)
    return np.tile(np.hypot(real, imaginary) * UP, 2)


class LruLayer:
    """The proofs of one layer."""

    def __init__(self, cell: CellWeights, inputs: Inputs) -> None:
        weight, bias = cell.input
        self.kept = np.tile(decay(cell), 2)
        self.into = None if isinstance(inputs, Rows) else inputs.seen_by(weight)
        self.factor = float(self.kept.max())
        # The certificate does not hold for a factor of 1 or more, so the limit of the divisor has no effect there.
        room = np.maximum(1 - self.kept, 1e-12)
        reach = np.where(self.kept < 1, _modulus(inputs.reach(weight, bias).magnitude()) / room * UP, np.inf)
        gain = None if self.into is None else self.into.norm * UP
        self.bound = LayerBound((Proof("decay", Norm("2"), self.factor),), (reach,), gain)

    def start(self) -> Errors:
        (reach,) = self.bound.reach
        return Errors((Perturbation.within(reach, norm_above(reach[: len(reach) // 2])),))

    def step(self, errors: Errors, fed: Perturbation | None) -> Errors:
        before, (reach,) = errors.perturbations[0], self.bound.reach
        box, ball = self.kept * before.box, self.factor * before.ball
        if fed is not None:
            assert self.into is not None, "the layer's inputs are embeddings: this is a bug"
            driven = self.into(fed)
            box, ball = box + _modulus(driven.box), ball + driven.ball
        after = Perturbation.within(np.minimum(box * UP, 2 * reach), ball * UP)
        return Errors((after,), (), errors.steps + 1, errors.cut_only and fed is None)

    def at_least(self, perturbations: tuple[Perturbation, ...]) -> Errors:
        (own,) = perturbations
        return Errors((Perturbation(_modulus(own.box), own.ball),), cut_only=False)

    def local(self, before_gates: Vector, function: float, unit: float) -> tuple[Perturbation, ...]:
        # lambda itself is computed by exp, cos and sin, whose errors are at most `function` each.
        size = self.bound.reach[0]
        return (Perturbation.within(_modulus(before_gates) + 4 * (function + 4 * unit) * size),)


def build_layer(cell: CellWeights, inputs: Inputs) -> Layer:
    """Builds the proofs of a layer for all admissible inputs."""
    return LruLayer(cell, inputs)


def moved(step: CellStep, pre: list[Pre], state: States, error: Deviations) -> Moved:
    """Computes the cell's next state in a window, and bounds of the distance between this state and the uninterrupted
    run's state (see `Moved`)."""
    (driven,), (before,), (apart,) = pre, state, error
    turn = np.exp(1j * np.exp(step.tensors["theta"])) * np.exp(-np.exp(step.tensors["nu"]))
    real, imaginary = np.split(before, 2, axis=1)
    kept = turn * (real + 1j * imaginary)
    size = np.tile(np.abs(turn) * (1 + ULP), 2)
    rounding = ULP * (np.tile(np.abs(kept), 2) + np.abs(driven.value))
    moduli = np.tile(np.hypot(*np.split(apart.box, 2, axis=1)), 2)
    value = np.concatenate([kept.real, kept.imag], axis=1) + driven.value
    ball = float(size.max()) * apart.ball + driven.ball(np.ones_like(value)) + np.linalg.norm(rounding, axis=1)
    return (value,), (size * moduli + driven.radius + rounding,), (ball,)
