"""Bounds the distance of a floating-point run from exact arithmetic by propagating the error of each step through the
later steps.

Every step of the floating-point run starts from the run's own state and adds an error of at most delta. Let x bound the
run's distance from exact arithmetic before a step. The distance after the step is then at most F(x) + delta, where F is
the monotone function that `stack.py` uses. Any X with F(X) + delta <= X bounds the distance after any number of steps:
the distance is 0 at first, and if it is at most X before a step, it is at most F(X) + delta <= X after the step.

- `carry` uses a measured delta (`models/export/rounding.py`). The certificate's bounds include its result.
- `of_finite` needs no propagation from step to step: it bounds the error of a model with finite memory, layer by layer.
- `worst_case` uses an a priori bound of delta. In any order, the error of a sum of n products is at most gamma_n times
  the sum of their absolute values, where gamma_n = n u / (1 - n u) and u is the unit roundoff. exp, tanh and the
  sigmoid are assumed to be within FUNCTION u of their values. A LayerNorm is assumed to subtract the mean from its
  input before it squares. The result bounds the distance of two runs, which is twice the bound of one run.

`worst_case` is to first order in u, because the slopes and the bounds of states are those of exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from wane.models.architecture import Architecture
from wane.models.certificate.admissible import FUNCTION
from wane.models.certificate.interval_rounding import UP, Matrix, Vector, gamma, norm_above
from wane.models.certificate.layer_bound import Errors, Layer
from wane.models.certificate.layers import inputs_of
from wane.models.certificate.perturbation import Perturbation
from wane.models.certificate.stack import BlockNoise, Noise, Stack
from wane.models.layer_parts import load
from wane.models.manifest import StateError
from wane.models.weights import CellWeights, Weights, head_weight

DType = Literal["float32", "float64"]
UNITS: dict[DType, float] = {"float32": 2.0**-24, "float64": 2.0**-53}

ROUNDS = (16, 48, 96, 192, 384, 768)
"""The numbers of steps after which `worst_case` tests whether twice the current errors bound all later errors."""

ROOM = 2.0
"""`carry` tests whether the current errors times this factor bound all later errors."""

MAX_STEPS = 4096
"""`carry` gives up if it has found no bound after this many steps."""

SETTLING, SETTLED = 1 << 12, 1e-11
"""The largest number of iterations that reduce a bound, and the relative change of the bound at which the iterations
stop."""


def carry(stack: Stack, step: Mapping[str, StateError]) -> tuple[dict[str, StateError], float]:
    """Bounds the errors of a run of any length and any tokens by the errors of one step.

    step: the largest error of one step, by state tensor of the layers. Returns the errors of a whole run, by state
    tensor, and the error of `hidden`, in the 2-norm. If no bound is found, returns the largest possible distances.
    """
    names = [stack.architecture.layer_states(layer) for layer in range(len(stack.layers))]
    delta = [
        layer.at_least(
            tuple(
                Perturbation.within(np.full(len(reach), step[name].box), step[name].ball)
                for name, reach in zip(row, layer.bound.reach, strict=True)
            )
        )
        for row, layer in zip(names, stack.layers, strict=True)
    ]
    perturbations, carried = _bound_of_sums(stack, delta)
    states = {
        name: StateError(box=float(perturbation.box.max()), ball=perturbation.ball)
        for row, layer in zip(names, perturbations, strict=True)
        for name, perturbation in zip(row, layer, strict=True)
    }
    return states, carried


def _bound_of_sums(stack: Stack, delta: list[Errors]) -> tuple[list[tuple[Perturbation, ...]], float]:
    """Returns bounds of the errors of the states, and of the error of `hidden`, if every step adds an error of at most
    `delta`."""

    def step(errors: list[Errors]) -> list[Errors]:
        after, _ = stack.step(errors)
        return [moved + local for moved, local in zip(after, delta, strict=True)]

    errors = [replace(each, steps=stack.reach) for each in stack.at_rest()]
    for count in range(1, MAX_STEPS + 1):
        errors = step(errors)
        if count & (count - 1):
            continue
        bound = [each.times(ROOM) for each in errors]
        after = step(bound)
        if all(np.all(new.flat() <= old.flat()) for new, old in zip(after, bound, strict=True)):
            after = _settled(step, after)
            return [each.perturbations for each in after], min(stack.hidden_apart(after), stack.furthest())
    anywhere = [tuple(Perturbation.within(2 * each) for each in layer.bound.reach) for layer in stack.layers]
    return anywhere, stack.furthest()


def _settled(step: Callable[[list[Errors]], list[Errors]], bound: list[Errors]) -> list[Errors]:
    """Returns a smaller bound: if F(X) + delta <= X, then F(X) + delta is a bound too.

    The iteration stops near the least bound, so that the result hardly depends on the machine's rounding. If the bound
    still changes after SETTLING iterations, the iteration stops, too.
    """
    before = np.concatenate([each.flat() for each in bound])
    for _ in range(SETTLING):
        bound = step(bound)
        now = np.concatenate([each.flat() for each in bound])
        if np.all(before - now <= SETTLED * now):
            break
        before = now
    return bound


def worst_case(architecture: Architecture, weights: Weights, stack: Stack, dtype: DType) -> float | None:
    """Bounds the 2-norm distance between the `hidden` of two runs that differ only in rounding. Returns None if the
    model has layers with finite memory."""
    if architecture.finite:
        return None
    noise = _Writer(architecture, weights, stack.layers, UNITS[dtype]).noise()
    errors = stack.at_rest()
    for step in range(1, ROUNDS[-1] + 1):
        errors, _ = stack.step(errors, noise)
        if step in ROUNDS:
            doubled = [each + each for each in errors]
            after, apart = stack.step(doubled, noise)
            if all(np.all(new.flat() <= old.flat()) for new, old in zip(after, doubled, strict=True)):
                return 2 * min(apart, stack.furthest())
    return 2 * stack.furthest()


def of_finite(architecture: Architecture, weights: Weights, diameter: float) -> float:
    """Bounds the distance of a computed `hidden` from exact arithmetic, in the 2-norm, for a model of layers with
    finite memory alone. The bound includes the error of the logits, divided by the output matrix's `diameter`.

    It holds for every order of the sums, so also where the bits of two graphs differ. No error is carried from token to
    token. In a residual network, whose LayerNorms may amplify rounding without limit, the bound is the largest possible
    distance.
    """
    if architecture.residual:
        return Stack(architecture, weights, []).furthest()
    unit, head = UNITS["float32"], np.abs(head_weight(weights).astype(np.float64))
    size = np.abs(weights["embedding.weight"].astype(np.float64)).max(axis=0)
    error = np.zeros(len(size))
    for placed in architecture.placed(finite=True):
        part, cell = load("certificate", placed.layer.module), CellWeights.of(placed, weights)
        size, error = part.furthest(cell, size), part.rounding(cell, size, error, unit)
    logits = gamma(len(size) + 1, unit) * (head @ (size + error) + np.abs(weights["head.bias"]))
    return (norm_above(error) + 2 * float(logits.max()) / max(diameter, 1e-30)) * UP


@dataclass(frozen=True, slots=True)
class _Writer:
    architecture: Architecture
    weights: Weights
    layers: list[Layer]
    unit: float

    def noise(self) -> Noise:
        """Returns the rounding errors that one step adds at each position in the network."""
        architecture, residual = self.architecture, self.architecture.residual
        states, normalised, blocks = [], [], []
        stream = float(np.linalg.norm(self._tensor("embedding.weight"), axis=1).max())
        for index, layer in enumerate(self.layers):
            at_norm = self._layer_norm(stream) if residual else 0.0
            normalised.append(at_norm)
            states.append(layer.local(self._before_gates(index, at_norm), FUNCTION * self.unit, self.unit))
            if residual:
                block, stream = self._block(index, layer.bound.reach[0], stream)
                blocks.append(block)
        if not residual:
            return Noise(states, normalised, blocks, 0.0, 0.0)
        gain, shift = self._tensor("norm.weight"), self._tensor("norm.bias")
        widest = float(np.abs(gain).max()) * np.sqrt(architecture.hidden) + norm_above(shift)
        return Noise(states, normalised, blocks, self._layer_norm(stream), 3 * self.unit * widest)

    def _before_gates(self, index: int, at_norm: float) -> Vector:
        """Returns the error that rounding adds to a layer's pre-activations, (G H). For the first layer, the error
        includes `at_norm`, the 2-norm error of its LayerNorm."""
        cell = CellWeights.of(self.architecture.placed(finite=False)[index], self.weights)
        into, bias = cell.input
        sizes = inputs_of(self.architecture, self.weights, index, self.layers).magnitude(into) + np.abs(bias)
        terms = into.shape[1] + 4
        if cell.layer.recurrent_tensors is not None:
            again, bias = cell.recurrent
            sizes = sizes + np.abs(bias) + np.abs(again) @ self.layers[index].bound.reach[0]
            terms += again.shape[1]
        off = self._gamma(terms) * sizes
        if index == 0 and at_norm:
            off = off + np.linalg.norm(into * self._tensor("layers.0.norm.weight"), axis=1) * at_norm
        return off

    def _block(self, index: int, reach: Vector, stream: float) -> tuple[BlockNoise, float]:
        """Returns the rounding errors of a block whose input has a 2-norm of at most `stream`, and a bound of the
        output's 2-norm."""
        prefix, width = f"layers.{index}.", self.architecture.fading[index].feed_forward
        mix = self._tensor(prefix + "mix.weight")
        mixed = np.abs(mix) @ reach
        stream += norm_above(mixed)
        perturbation = Perturbation.within(self._gamma(len(reach)) * mixed + self.unit * stream)
        if not width:
            return BlockNoise(perturbation, 0.0, np.zeros(0), perturbation), stream
        at_norm = self._layer_norm(stream)
        gain, shift = (self._tensor(f"{prefix}feed_forward_norm.{name}") for name in ("weight", "bias"))
        into, bias = (self._tensor(f"{prefix}feed_forward_in.{name}") for name in ("weight", "bias"))
        out, out_bias = (self._tensor(f"{prefix}feed_forward_out.{name}") for name in ("weight", "bias"))
        widest = np.linalg.norm(into * gain, axis=1) * np.sqrt(len(gain)) + np.abs(into) @ np.abs(shift) + np.abs(bias)
        sizes = np.abs(into) @ (np.abs(gain) * np.sqrt(len(gain)) + np.abs(shift)) + np.abs(bias)
        narrow = np.abs(out) @ widest + np.abs(out_bias)
        stream += norm_above(narrow)
        added = Perturbation.within(self._gamma(width + 1) * narrow + self.unit * stream)
        return BlockNoise(perturbation, at_norm, self._gamma(len(gain) + 4) * sizes, added), stream

    def _layer_norm(self, stream: float) -> float:
        """Returns the 2-norm error of a LayerNorm's normalised vector. The input's 2-norm is at most `stream`."""
        width = self.architecture.hidden
        gamma = self._gamma(width + 8)
        return float(np.sqrt(width) * gamma * (1 + 4 * stream / np.sqrt(width * self.architecture.norm_epsilon)))

    def _gamma(self, terms: int) -> float:
        return gamma(terms, self.unit)

    def _tensor(self, name: str) -> Matrix:
        return self.weights[name].astype(np.float64)
