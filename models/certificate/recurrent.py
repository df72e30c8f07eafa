"""The common base of linear and RNN layers: `h' = rho(W h + U x + b)`, where rho is the identity, tanh or relu.

`|h' - h~'| <= N |W (h - h~) + U (x - x~)|` unit by unit, where N <= 1 is the greatest slope of rho over all reachable
states. For equal inputs, a step therefore multiplies the difference by at most |N W|, in the 2-norm or the maximum
norm. Either norm may have a weight for each unit. For a linear layer, the same holds in any matrix-weighted norm
(`models/certificate/scaling.py`).

**Reach.** For tanh, |h| <= 1. The bounded state limits the pre-activation, which gives a smaller bound of |h|, and so
on. For linear and relu layers, |h'| <= |W h + U x + b|. In each norm in which W has a norm r < 1, the states reached
from zero therefore satisfy |h| <= max |U x + b| / (1 - r). Without such a norm there is no bound.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.admissible import Inputs, Reach, Rows
from wane.models.certificate.interval_rounding import UP, Matrix, Vector
from wane.models.certificate.layer_bound import Errors, LayerBound, Proof
from wane.models.certificate.norm import Norm
from wane.models.certificate.perron_vector import perron_vector
from wane.models.certificate.perturbation import LinearMap, Perturbation
from wane.models.certificate.scaling import Gauge, balanced
from wane.models.weights import CellWeights

SETTLING = 12
"""The number of times that a smaller bound of |h| is computed from the current one."""


class RecurrentLayer:
    """The proofs of a layer whose rho has a slope of at most 1 and is unbounded."""

    def __init__(self, cell: CellWeights, inputs: Inputs) -> None:
        (weight_ih, bias_ih), (weight_hh, bias_hh) = cell.input, cell.recurrent
        bias = bias_ih + bias_hh
        self.hidden = len(bias)
        driven = inputs.reach(weight_ih, bias)
        slope, reach = self._slope_and_reach(driven, np.abs(weight_hh))
        self.recurrent = LinearMap(weight_hh).scaled(slope)
        self.into = None if isinstance(inputs, Rows) else inputs.seen_by(weight_ih).scaled(slope)
        proofs, self.gauges = self._proofs()
        if reach is None:
            reach = self._settle(Perturbation.within(driven.magnitude()), proofs)
        gain = self.into.norm if self.into else None
        self.bound = LayerBound(proofs, (reach,), gain)
        self.cap = Perturbation.within(2 * reach)

    def _proofs(self) -> tuple[tuple[Proof, ...], tuple[Gauge, ...]]:
        matrix, magnitude = self.recurrent.matrix, self.recurrent.magnitude
        norm = self.recurrent.norm
        factor, self.weights = perron_vector(lambda bound: magnitude @ bound, self.hidden)
        proofs = [
            Proof("spectral_norm", Norm("2"), norm),
            Proof("row_sum", Norm("inf"), float(magnitude.sum(axis=1).max()) * UP),
            Proof("elementwise_comparison", Norm("inf", (self.weights,)), factor),
        ]
        tried = self._gauges(matrix)
        for rule, gauge in tried.items():
            proofs.append(Proof(rule, gauge.norm if gauge else Norm("2"), gauge.factor if gauge else None))
        return tuple(proofs), tuple(gauge for gauge in tried.values() if gauge and gauge.factor < norm)

    def _slope_and_reach(self, driven: Reach, magnitude: Matrix) -> tuple[Vector, Vector | None]:
        """Returns the greatest slope of rho over all reachable states, and the greatest |h|, both (H). The second
        result is None if rho is unbounded.

        driven: the range of `U x + b`. magnitude: |W|.
        """
        del driven, magnitude
        return np.ones(self.hidden), None

    def _gauges(self, matrix: Matrix) -> dict[str, Gauge | None]:
        """Returns the weighted 2-norm that each rule finds for the matrix `diag(slope) W`, or None if the rule finds
        none. The keys are the rules' names."""
        return {"diagonal_scaling": balanced(matrix)}

    def _settle(self, driven: Perturbation, proofs: tuple[Proof, ...]) -> Vector:
        """Returns the greatest |h| of a layer with an unbounded rho, (H). It is infinite if no norm has a factor below
        1."""
        hidden = self.hidden
        bounds: list[Vector] = [np.full(hidden, np.inf)]
        if self.recurrent.norm < 1:
            bounds.append(np.full(hidden, driven.ball / (1 - self.recurrent.norm) * UP))
        bounds += [
            gauge.perturbation(gauge.of(driven) / (1 - gauge.factor) * UP, hidden).box
            for gauge in self.gauges
            if gauge.factor < 1
        ]
        for proof in proofs:
            (scale,) = proof.norm.scales
            if proof.norm.order == "inf" and proof.factor is not None and proof.factor < 1:
                bounds.append(scale * float(np.max(driven.box / scale)) / (1 - proof.factor) * np.full(hidden, UP))
        reach: Vector = np.min(bounds, axis=0)
        if np.isfinite(reach).all():
            for _ in range(SETTLING):
                reach = np.minimum(reach, (self.recurrent.magnitude @ reach + driven.box) * UP)
        return reach

    def start(self) -> Errors:
        perturbation = Perturbation.within(self.bound.reach[0])
        return Errors((perturbation,), tuple(gauge.of(perturbation) for gauge in self.gauges))

    def step(self, errors: Errors, fed: Perturbation | None) -> Errors:
        after = self.recurrent(errors.perturbations[0])
        driven = self.into(fed) if self.into is not None and fed is not None else None
        if driven is not None:
            after = after + driven
        values = []
        for gauge, value in zip(self.gauges, errors.gauges, strict=True):
            grown = gauge.factor * value * UP + (gauge.of(driven) if driven is not None else 0.0)
            after = after.cut(gauge.perturbation(grown * UP, self.hidden))
            values.append(grown * UP)
        after = after.cut(self.cap)
        gauges = tuple(min(value, gauge.of(after)) for value, gauge in zip(values, self.gauges, strict=True))
        return Errors((after,), gauges, errors.steps + 1)

    def at_least(self, perturbations: tuple[Perturbation, ...]) -> Errors:
        return Errors(perturbations, tuple(gauge.of(perturbations[0]) for gauge in self.gauges))

    def local(self, before_gates: Vector, function: float, unit: float) -> tuple[Perturbation, ...]:
        del function, unit  # computing the identity or relu adds no error
        return (Perturbation.within(before_gates),)
