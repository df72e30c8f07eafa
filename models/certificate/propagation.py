"""What small errors in a state come to, where a sequence was run in parts that do not quite meet.

Part i of a run starts from a state that is `rho_i` away, unit by unit, from where part i - 1 ended. Its distance from
the run without joints then obeys `e_i <= rho_i + F^n(e_(i-1))`, with n the tokens between two joints at least and F
what one token makes of all errors at most (`models/certificate/stack.py`), which is monotone. Of a single contractive
layer that is `e_i <= rho_i + factor^n e_(i-1)`, in its norm.

One E with `rho + F^n(E) <= E` bounds every e_i, by induction. It is tried with E = rho + rho / ROOM: F is followed
from there until no error is above rho / ROOM, and none grows any more; n must be that many tokens at least. Since no
error grows from then on, whatever is larger until then is all that `hidden` is ever apart.

A front is not in F: after as many tokens as it sees, its state is the same in both runs, but for rounding.

**Rounding.** rho is measured between float32 runs, each of which is off exact arithmetic. To every joint is added how
far the states of two runs can be apart by rounding, which is the certificate's own `rounding.states`, twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from wane.models.certificate.interval_rounding import Vector
from wane.models.certificate.layer_bound import Layer
from wane.models.certificate.perturbation import Perturbation
from wane.models.certificate.stack import Stack
from wane.models.manifest import Architecture, Rounding
from wane.models.weights import Weights

ROOM = 8
"""E is larger than rho by this part of it."""

MAX_TOKENS = 1024
"""Tokens that F is followed at most."""


class Propagation:
    """Of one model, every layer of which is contractive.

    reach: tokens after which a run has forgotten all that its front ever saw before.
    """

    def __init__(self, architecture: Architecture, weights: Weights, layers: list[Layer], rounding: Rounding) -> None:
        self._architecture, self._weights, self._layers = architecture, weights, layers
        self.reach = architecture.front.reach if architecture.front else 0
        self._names = [architecture.layer_states(layer) for layer in range(len(layers))]
        units = architecture.cell_units
        self._off = {
            name: Perturbation.within(np.full(units, 2 * error.box), 2 * error.ball)
            for name, error in rounding.states.items()
        }

    @cached_property
    def _stack(self) -> Stack:
        return Stack(self._architecture, self._weights, self._layers)

    def apart(self, joints: Mapping[str, Vector], tokens: int) -> float | None:
        """How far `hidden` is, after any token, from the run without joints, in the 2-norm and exact arithmetic.

        joints: by state tensor, how far two parts were apart at any joint at most, (units); those of the front are
        left out. tokens: what is between two joints at least, and what a part's start knows of what came before it.
        None where they are too few.
        """
        if tokens < self.reach:
            return None
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
