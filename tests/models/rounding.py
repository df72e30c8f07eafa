"""A certificate's rounding with given numbers."""

from __future__ import annotations

from collections.abc import Sequence

from wane.models.manifest import Rounding, StateError


def rounding(between_runs: float, *, states: Sequence[str] = (), state: float = 0.0) -> Rounding:
    """What says that two runs are `between_runs` apart at `hidden`, and each of `states` of one is `state` from exact.

    It is of probed sequences, so `certify` takes the numbers as they are for a residual network."""
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
