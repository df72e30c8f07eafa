"""Which way a request is answered, and what may be claimed of the answer."""

from __future__ import annotations

from models.manifest import Manifest
from service.engine.types import Mode


def error_bound(manifest: Manifest, k: int, position: int) -> float | None:
    """At most how far, in total variation, an answer is from the never-interrupted model's.

    The answer comes from a state that knows the last `k` of `position` tokens. All of them: 0, it is the same
    computation. Fewer: null, because the certificate holds a contraction factor for each layer, which bounds
    states, and no curve over k that bounds answers.
    """
    del manifest  # a curve would be read from its certificate, here and nowhere else
    return 0.0 if k >= position else None


def choose(
    manifest: Manifest, position: int, *, window: int | None, own: int, largest: int, tolerance: float | None
) -> int | None:
    """What `auto` does with `position` tokens and no state: the k to answer with, or None for all of them.

    `window` is the k that was asked for, `own` the model's, `largest` the most that may be used.
    With a tolerance: the k asked for if its bound meets it, or else the smallest that does. Without: the k asked
    for or the model's own, if anything is known of how far that is off. A k that covers everything is no window.
    """
    k: int | None = own if window is None else window
    if tolerance is None:
        tolerance = 1.0
    elif window is None:
        candidates = range(1, min(largest, position) + 1)
        k = next((k for k in candidates if meets(error_bound(manifest, k, position), tolerance)), None)
    if k is None or k >= position or not meets(error_bound(manifest, k, position), tolerance):
        return None
    return k


def meets(bound: float | None, tolerance: float) -> bool:
    """Whether an answer of this bound is within the tolerance; without a bound it is within none."""
    return bound is not None and bound <= tolerance


def of_session(asked: Mode | None, own: Mode) -> Mode:
    """The mode of a request to a session: what was asked for, or else the session's own.

    `auto` is recurrent there: a state that is not resident is rebuilt by one run over the tail, which tells at
    least as much as any window of it, and is there for the next step.
    """
    mode = own if asked in (None, Mode.AUTO) else asked
    return Mode.RECURRENT if mode in (None, Mode.AUTO) else mode
