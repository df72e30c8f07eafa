"""What is proved of one layer, and what every kind of layer can tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wane.models.certificate.interval_rounding import UP, Matrix, Vector
from wane.models.certificate.norm import Norm
from wane.models.certificate.perturbation import Perturbation

TIE = 1e-9
"""Relative: a later rule wins only if its factor is smaller by more, so that rounding does not choose."""


@dataclass(frozen=True, slots=True)
class Proof:
    """`|phi(s, x) - phi(s~, x)| <= factor |s - s~|` by one rule, in its norm; factor None where it does not apply."""

    rule: str
    norm: Norm
    factor: float | None


@dataclass(frozen=True, slots=True)
class LayerBound:
    """For every admissible x and all states s, s~ within `reach`, by the best of `proofs`.

    reach: by state tensor, in the manifest's order, the greatest |value| of each unit from the zero state, (H).
    input_gain: 2-norm of the state's change in one step for each unit of change of the input; None over embeddings,
    which are the same for both trajectories.
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
        assert factor is not None, "this is a bug: every layer has a rule that always applies"
        return factor

    def distance(self, *differences: Matrix) -> Vector:
        """The best proof's norm of differences of states, (B, H) for each state tensor: (B)."""
        return self.best.norm.distance(*differences)


@dataclass(frozen=True, slots=True)
class Errors:
    """How far apart two trajectories' states of one layer can be, a number of steps after the cut.

    perturbations: by state tensor; the first is what the layer puts out. gauges: bounds in other norms. steps: since
    the cut. cut_only: nothing else has come in since.
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
        """Every bound multiplied by a factor, 1 or more."""
        perturbations = tuple(Perturbation(each.box * factor, each.ball * factor) for each in self.perturbations)
        return Errors(perturbations, tuple(gauge * factor for gauge in self.gauges), self.steps, self.cut_only)

    def flat(self) -> Vector:
        """All numbers in a row."""
        parts = [np.append(perturbation.box, perturbation.ball) for perturbation in self.perturbations]
        return np.concatenate([*parts, np.array(self.gauges)])


class Layer(Protocol):
    """One recurrent layer of a model.

    `step` is monotone: larger errors in give larger errors out. Differences never leave the box of what is reached, so
    neither do the errors. `fed` is how far the layer's inputs are apart, None where they are equal.
    """

    @property
    def bound(self) -> LayerBound:
        """What is proved of the state map."""

    def start(self) -> Errors:
        """Right after the cut: the zero state, and any state that is reached from it."""

    def step(self, errors: Errors, fed: Perturbation | None) -> Errors:
        """One token later."""

    def at_least(self, perturbations: tuple[Perturbation, ...]) -> Errors:
        """These errors of the state tensors, and the gauges that belong to them."""

    def local(self, before_gates: Vector, function: float, unit: float) -> tuple[Perturbation, ...]:
        """What one step of the cell in floating point adds to each state tensor's error.

        Its pre-activations are off by `before_gates` (G H), in the order of the weights' rows, its functions by
        `function`, every multiplication and addition by `unit` of its result.
        """
