"""The proved bounds of one layer, and the interface of every kind of layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wane.models.certificate.interval_rounding import UP, Matrix, Vector
from wane.models.certificate.norm import Norm
from wane.models.certificate.perturbation import Perturbation

TIE = 1e-9
"""The least relative improvement of the factor for which a later rule is preferred to an earlier one. It prevents
rounding from deciding between equal factors."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof of `|phi(s, x) - phi(s~, x)| <= factor |s - s~|` by one rule, where phi is the layer's state map and |.|
    is the norm `norm`. `factor` is None if the rule does not apply."""

    rule: str
    norm: Norm
    factor: float | None


@dataclass(frozen=True, slots=True)
class LayerBound:
    """The bounds of one layer, for every admissible input x and all states s, s~ within `reach`.

    proofs: the proofs of the layer's contraction, one for each rule. The layer's factor is the smallest of their
        factors.
    reach: for each state tensor in the manifest's order, the greatest absolute value of each unit, (H), over all states
        that are reached from zero.
    input_gain: the bound of the state's change in one step, in the 2-norm, per unit change of the input. It is None if
        the inputs are embeddings, which are equal in both trajectories.
    """

    proofs: tuple[Proof, ...]
    reach: tuple[Vector, ...]
    input_gain: float | None = None

    @property
    def best(self) -> Proof:
        """The proof with the smallest factor."""
        chosen = self.proofs[0]
        for proof in self.proofs[1:]:
            if proof.factor is not None and (chosen.factor is None or proof.factor < chosen.factor * (1 - TIE)):
                chosen = proof
        return chosen

    @property
    def factor(self) -> float:
        factor = self.best.factor
        assert factor is not None, "no rule applies to the layer: this is a bug"
        return factor

    def distance(self, *differences: Matrix) -> Vector:
        """Returns the norms of differences of states, in the best proof's norm: (B, H) for each state tensor -> (B)."""
        return self.best.norm.distance(*differences)


@dataclass(frozen=True, slots=True)
class Errors:
    """Bounds of the distance between two trajectories' states of one layer, some steps after the cut. The cut is the
    start of the window, where the window's state is zero.

    perturbations: the bounds by state tensor. The first tensor is the layer's output.
    gauges: bounds of the same distance in other norms.
    steps: the number of steps since the cut.
    cut_only: whether the cut is the only cause of the distance.
    """

    perturbations: tuple[Perturbation, ...]
    gauges: tuple[float, ...] = ()
    steps: int = 0
    cut_only: bool = True

    def __add__(self, other: Errors) -> Errors:
        perturbations = tuple(one + more for one, more in zip(self.perturbations, other.perturbations, strict=True))
        gauges = tuple((one + more) * UP for one, more in zip(self.gauges, other.gauges, strict=True))
        return Errors(perturbations, gauges, self.steps, self.cut_only and other.cut_only)

    def times(self, factor: float) -> Errors:
        """Returns every bound multiplied by a factor of at least 1."""
        perturbations = tuple(Perturbation(each.box * factor, each.ball * factor) for each in self.perturbations)
        return Errors(perturbations, tuple(gauge * factor for gauge in self.gauges), self.steps, self.cut_only)

    def flat(self) -> Vector:
        """Returns all bounds as one vector."""
        parts = [np.append(perturbation.box, perturbation.ball) for perturbation in self.perturbations]
        return np.concatenate([*parts, np.array(self.gauges)])


class Layer(Protocol):
    """One recurrent layer of a model.

    `step` is monotone: larger errors before a token give larger errors after it. Its argument `fed` bounds the distance
    between the layer's inputs in the two trajectories, and is None if the inputs are equal. Errors never exceed the
    largest distance of two reachable states.
    """

    @property
    def bound(self) -> LayerBound:
        """The proved bounds of the state map."""

    def start(self) -> Errors:
        """Returns the errors right after the cut: the distances between the zero state and any reachable state."""

    def step(self, errors: Errors, fed: Perturbation | None) -> Errors:
        """Returns the errors one token later."""

    def at_least(self, perturbations: tuple[Perturbation, ...]) -> Errors:
        """Returns errors with the given bounds of the state tensors, and with the bounds in other norms that follow
        from them."""

    def local(self, before_gates: Vector, function: float, unit: float) -> tuple[Perturbation, ...]:
        """Returns the error that one floating-point step of the cell adds to each state tensor.

        before_gates: the errors of the pre-activations of all G gates, (G H), in the order of the weights' rows.
        function: the absolute error of the sigmoid and tanh. unit: the error of every multiplication and addition,
        relative to its result.
        """
