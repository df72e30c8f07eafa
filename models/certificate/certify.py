"""The certificate of a model's weights."""

from __future__ import annotations

import numpy as np

from wane.models.architecture import Architecture
from wane.models.certificate.admissible import has_readout
from wane.models.certificate.interval_rounding import norm_above
from wane.models.certificate.layer_bound import Layer, LayerBound
from wane.models.certificate.layers import build_layers
from wane.models.certificate.readout import readout_of
from wane.models.certificate.rounding import carry, worst_case
from wane.models.certificate.stack import Stack, state_error_curve
from wane.models.certificate.total_variation import head_diameter, total_variation
from wane.models.manifest import Certificate, Condition, Contraction, Rounding
from wane.models.weights import Weights, head_weight

CERTIFIED = 1e-3
"""A model is certified if, for the largest window, the bound of the total variation between the next-token
distributions of the window and of the uninterrupted run, in exact arithmetic, is at most this value."""


def certify(
    architecture: Architecture,
    weights: Weights,
    max_window: int,
    rounding: Rounding | None,
    layers: list[Layer] | None = None,
) -> Certificate:
    """Computes the certificate of float32 weights, for windows of up to `max_window` tokens.

    `rounding`, if given, is the measured rounding of the float32 graphs. The errors of a whole run are computed from
    the measured errors of one step. `rounding.worst_case` is computed, too. In a residual network, the error of the
    output is the largest possible distance. The certificate of a model that is not contractive has no rounding. Neither
    has that of a model whose rounding is bounded without measurements (`models/certificate/readout.py`). `layers` are
    the layers of these weights, if the caller has already built them.
    """
    layers = build_layers(architecture, weights) if layers is None else layers
    bounds = [layer.bound for layer in layers]
    diameter = head_diameter(head_weight(weights).astype(np.float64))
    reason: str | None
    failing = [(layer, bound) for layer, bound in enumerate(bounds) if not bound.factor < 1]
    proved = tuple(_contraction(layer, bound) for layer, bound in enumerate(bounds))
    if failing:
        layer, bound = failing[0]
        reason = (
            f"layer {layer} is not proved to forget: the smallest factor found by which two of its states come closer "
            f"at a token is {bound.factor:.4g} ({bound.best.rule}), and it would have to be below 1"
        )
        return Certificate(contractive=False, reason=reason, layers=proved, head_diameter=diameter)
    stack = Stack(architecture, weights, layers)
    state_error = state_error_curve(stack, max_window)
    readout = readout_of(architecture, weights, layers) if has_readout(architecture) else None
    if readout is not None:
        rounding = None
    if rounding:
        states, carried = carry(stack, rounding.step)
        carried, worst = carried + rounding.output, worst_case(architecture, weights, stack, "float32")
        if architecture.residual:
            # No measured step shows the rounding at a LayerNorm whose input nearly vanishes, or that of a gate which is
            # closed in exact arithmetic and which the rounding of its input opens.
            carried = max(carried, stack.furthest())
        rounding = rounding.model_copy(
            update={"sequences": "all", "worst_case": worst, "states": states, "carried": carried}
        )
    error = total_variation(diameter, state_error)
    certified = bool(error[-1] <= CERTIFIED)
    reason = (
        None
        if certified
        else (f"the bound on the total variation is still {error[-1]:.3g} at k = {max_window}, the largest window")
    )
    return Certificate(
        contractive=True,
        certified=certified,
        reason=reason,
        layers=proved,
        state_error=tuple(state_error.tolist()),
        error_bound=tuple(error.tolist()),
        head_diameter=diameter,
        rounding=rounding,
        readout=readout,
    )


def _contraction(layer: int, bound: LayerBound) -> Contraction:
    best, reach = bound.best, norm_above(bound.reach[0])
    return Contraction(
        layer=layer,
        factor=bound.factor,
        rule=best.rule,
        norm=str(best.norm),
        weights=best.norm.stated_weights,
        conditions=tuple(
            Condition(rule=proof.rule, norm=str(proof.norm), factor=proof.factor) for proof in bound.proofs
        ),
        input_gain=bound.input_gain,
        reach=reach if np.isfinite(reach) else None,
    )
