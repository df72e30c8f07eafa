"""The proved bounds of one layer, and the interface of every kind of layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wane.models.certificate.interval_rounding import UP, Matrix, Vector
from wane.models.certificate.norm import Norm
from wane.models.certificate.perturbation import Perturbation

TIE = 1e-9
"""A later rule replaces an earlier one only if its factor is relatively smaller by more than this, so that rounding
does not decide."""


@dataclass(frozen=True, slots=True)
class Proof:
    """`|phi(s, x) - phi(s~, x)| <= factor |s - s~|`, proved by one rule, in the rule's norm. factor is None if the rule
    does not apply."""

    rule: str
    norm: Norm
    factor: float | None


@dataclass(frozen=True, slots=True)
class LayerBound:
    """The bounds of one layer, for every admissible x and all states s, s~ within `reach`. The best of `proofs` counts.

    reach: the greatest |value| of each unit, (H), from the zero state, by state tensor in the manifest's order.
    input_gain: the 2-norm of the state's change in one step per unit change of the input. None if the inputs are
    embeddings, which are the same for both trajectories.
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
        """Returns the norm, by the best proof, of differences of states: (B, H) for each state tensor -> (B)."""
        return self.best.norm.distance(*differences)


@dataclass(frozen=True, slots=True)
class Errors:
    """Bounds of the distance between two trajectories' states of one layer, some steps after the cut.

    perturbations: by state tensor. The first one is the layer's output. gauges: bounds in other norms. steps: the
    number of steps since the cut. cut_only: whether no other error has entered since the cut.
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

    `step` is monotone: larger input errors give larger output errors. Differences and errors stay within the box of
    reachable states. `fed` is the distance of the layer's inputs, or None if the inputs are equal.
    """

    @property
    def bound(self) -> LayerBound:
        """The proved bounds of the state map."""

    def start(self) -> Errors:
        """Returns the errors right after the cut: the distances between the zero state and any reachable state."""

    def step(self, errors: Errors, fed: Perturbation | None) -> Errors:
        """Returns the errors one token later."""

    def at_least(self, perturbations: tuple[Perturbation, ...]) -> Errors:
        """Returns errors with these perturbations of the state tensors, and with the gauges that follow from them."""

    def local(self, before_gates: Vector, function: float, unit: float) -> tuple[Perturbation, ...]:
        """Returns the error that one floating-point step of the cell adds to each state tensor.

        before_gates: the error of its pre-activations, (G H), in the order of the weights' rows. function: the error of
        its functions. unit: the error of every multiplication and addition, relative to its result.
        """
