"""Bounds the effect of small state errors in a sequence that is computed in parts whose states do not match exactly.

A joint is the position between two parts. The state at the start of part i differs by `rho_i`, unit by unit, from the
state at the end of part i - 1. Let n be the least number of tokens between two joints, and F the monotone function that
bounds the errors after a token by the errors before it (`models/certificate/stack.py`). Let e_i bound the distance
between the state at the start of part i and the state of the run without joints. Then `e_i <= rho_i + F^n(e_(i-1))`.
For a single contractive layer this is `e_i <= rho_i + factor^n e_(i-1)`, in the layer's norm.

If one E satisfies `rho + F^n(E) <= E`, it bounds every e_i, by induction. The candidate is E = rho + rho / ROOM. F is
iterated from E until no error is above rho / ROOM and no error grows. n must be at least the number of these
iterations. After them, errors do not grow. The largest distance of `hidden` during the iterations therefore bounds the
distance of `hidden` after any token. F does not include the convolution blocks: after as many tokens as their receptive
field, their state is equal in both runs, except for rounding.

**Readout.** In a model with a `Readout` (`models/certificate/readout.py`), the two runs read the same bits in their
gates, and a unit's state is multiplied by its gate. The effect of all joints on a unit's state is therefore at most
rho / (1 - factor^n), and the effect of rounding is at most E, as without joints. `Propagation.mixed` bounds the effect
of the joints after the mixing matrix. The `Readout` bounds what the LayerNorms of an answer make of it.

**Rounding.** rho is measured between float32 runs, each of which differs from exact arithmetic. Rounding alone moves
the states of two runs apart by at most the certificate's `states_apart`. This bound is added to every rho_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from wane.models.architecture import Architecture
from wane.models.certificate.interval_rounding import Vector
from wane.models.certificate.layer_bound import Layer
from wane.models.certificate.perturbation import Perturbation
from wane.models.certificate.readout import furthest
from wane.models.certificate.stack import Stack
from wane.models.manifest import StateError
from wane.models.weights import Weights

ROOM = 8
"""E is larger than rho by rho / ROOM."""

ROUNDED = 1 + 2.0**-20
"""The factor by which differences that were computed in float32 are multiplied to bound the exact differences."""

MAX_TOKENS = 1024
"""The largest number of tokens over which F is iterated."""


class Propagation:
    """The propagation of state errors in one model whose layers are all contractive.

    reach: the number of preceding tokens on which the output of the convolution blocks depends.
    """

    def __init__(
        self, architecture: Architecture, weights: Weights, layers: list[Layer], states_apart: Mapping[str, StateError]
    ) -> None:
        self._architecture, self._weights, self._layers = architecture, weights, layers
        self.reach = architecture.reach
        self._names = [architecture.layer_states(layer) for layer in range(len(layers))]
        units = {tensor.name: tensor.shape[0] for tensor in architecture.state_tensors()}
        self._off = {
            name: Perturbation.within(np.full(units[name], error.box), error.ball)
            for name, error in states_apart.items()
        }

    @cached_property
    def _stack(self) -> Stack:
        return Stack(self._architecture, self._weights, self._layers)

    def mixed(self, joints: Mapping[str, Vector], tokens: int, gate: float) -> float | None:
        """Bounds the 2-norm distance that the joints cause at the sum after the mixing matrix, after any token, in a
        model with a `Readout`. joints, tokens: see `apart`. gate: `Readout.gate`. Returns None if there is no bound."""
        ((name,),) = self._names
        factor = self._layers[0].bound.factor * (1 + gate)
        others = any(np.any(value) for other, value in joints.items() if other != name)
        if tokens < self.reach or others or not np.max(factor) < 1:
            return None
        states = joints[name].astype(np.float64).ravel() / (1 - factor ** max(tokens, 1)) * ROUNDED
        return furthest(self._weights["layers.0.mix.weight"].astype(np.float64), states)

    def apart(self, joints: Mapping[str, Vector], tokens: int) -> float | None:
        """Bounds the 2-norm distance between `hidden` and the `hidden` of the run without joints, after any token, in
        exact arithmetic.

        joints: for each state tensor of the layers, the largest rho_i of all joints, (units). tokens: the least number
        of tokens between two joints, and before the first one. Returns None if `tokens` is too small for a bound.
        """
        if tokens < self.reach:
            return None
        if not self._layers:
            return 0.0
        perturbations = [
            tuple(Perturbation.within(joints[name].astype(np.float64).ravel()) + self._off[name] for name in names)
            for names in self._names
        ]
        small = [tuple(Perturbation(each.box / ROOM, each.ball / ROOM) for each in layer) for layer in perturbations]
        layers = self._layers
        settled = [layer.at_least(perturbation) for layer, perturbation in zip(layers, small, strict=True)]
        errors = [
            replace(layer.at_least(perturbation) + less, steps=self.reach)
            for layer, perturbation, less in zip(layers, perturbations, settled, strict=True)
        ]
        limit = np.concatenate([each.flat() for each in settled])
        before = np.concatenate([each.flat() for each in errors])
        furthest = 0.0
        for _ in range(min(tokens, MAX_TOKENS)):
            errors, apart = self._stack.step(errors)
            furthest = max(furthest, apart)
            now = np.concatenate([each.flat() for each in errors])
            if np.all(now <= limit) and np.all(now <= before):
                return furthest
            before = now
        return None
