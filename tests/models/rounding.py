"""Builds the rounding errors of a certificate from given numbers."""

from __future__ import annotations

from collections.abc import Sequence

from wane.models.manifest import Contraction, Rounding, StateError


def rounding(between_runs: float, *, states: Sequence[str] = (), state: float = 0.0) -> Rounding:
    """Returns rounding errors. `between_runs`: the largest distance of the vectors `hidden` of two runs. `states`: the
    names of the state tensors. `state`: the error of each state tensor.

    `certify` replaces the errors of whole runs by those that follow from the errors of one step.
    """
    errors = {name: StateError(box=state, ball=state) for name in states}
    return Rounding(
        sequences="all",
        steps=1,
        safety=2,
        step=errors,
        output=0.0,
        states=errors,
        carried=between_runs / 2,
    )


LAYERS = (Contraction(layer=0, factor=0.5, rule="a rule", norm="|h|_2"),)
"""The layers in the certificate of a recurrent model. A certificate without layers is that of a finite memory."""
