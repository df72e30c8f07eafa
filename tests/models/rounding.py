"""Builds a certificate's rounding from given numbers."""

from __future__ import annotations

from collections.abc import Sequence

from wane.models.manifest import Rounding, StateError


def rounding(between_runs: float, *, states: Sequence[str] = (), state: float = 0.0) -> Rounding:
    """Returns a rounding with `between_runs` at `hidden`, and with the error `state` for each of `states`.

    It is of probed sequences, so that `certify` keeps the numbers for a residual network.
    """
    errors = {name: StateError(box=state, ball=state) for name in states}
    return Rounding(
        sequences="probed",
        steps=1,
        safety=2,
        step=errors,
        output=0.0,
        states=errors,
        carried=between_runs / 2,
    )
