"""Which way a request is answered: by what the certificate is good for, and by what ways cost."""

from __future__ import annotations

from collections.abc import Callable

from wane.models.manifest import Certificate
from wane.service.engine.bounds import bound, meets
from wane.service.types import Mode

AUTO, RECURRENT = Mode.AUTO, Mode.RECURRENT  # a class's member takes longer to find

COST_TOLERANCE = 1.1
"""Costs are measured, and two that are this near are the same: the way with the smaller bound is taken."""

UNASKED = 1e-3
"""Where no tolerance was asked for: the largest bound at the model's own k with which `auto` answers by a window."""

Cost = Callable[[int | None], float]
"""Seconds that an answer from the last k tokens takes, or, for None, one from all of them."""


def ways(
    certificate: Certificate,
    position: int,
    *,
    window: int | None,
    own: int,
    largest: int,
    tolerance: float | None,
    has_radius_output: bool,
    cost: Cost,
) -> tuple[int | None, ...]:
    """What `auto` does with `position` tokens and no state: the k to answer with, or None for all of them.

    `window` is the k that was asked for, `own` the model's, `largest` the most that may be used. Without a tolerance
    it is the k asked for, or the model's own if the curve is at most UNASKED there, or else all of the tokens; with
    one, the k asked for if the curve meets it there, or else the smallest at which it does. All of the tokens are run
    instead where that costs no more: no answer from them has a smaller bound.
    `has_radius_output`: runs of windows compute a bound for their own tokens, which may be far under the curve. Then
    the first k is a try: it answers if its own bound meets the tolerance; otherwise the last entry answers. A model
    that is not certified runs everything, and a k that covers everything is no window.
    """
    if not certificate.certified or certificate.rounding is None:
        return (None,)
    tried = own if window is None else window
    sure = _enough(certificate, position, window=window, own=own, largest=largest, tolerance=tolerance)
    if sure is not None and cost(None) <= COST_TOLERANCE * cost(sure):
        sure = None
    # A try that fails is for nothing: it should cost at most half of what it can save.
    if (
        has_radius_output
        and tolerance is not None
        and tried != sure
        and tried < position
        and 2 * cost(tried) <= cost(sure)
    ):
        return (tried, sure)
    return (sure,)


def rebuilt_from(
    certificate: Certificate,
    position: int,
    held: int,
    *,
    own: int,
    largest: int,
    tolerance: float | None,
    used: float,
    cost: Cost,
) -> int | None:
    """From how many of its latest tokens `auto` rebuilds the state of a session at `position`; None: from all `held`.

    All of them tell the most, and the state serves later steps too: `used` of them, so often as a state was found
    that had been there before, for each that had to be rebuilt. They are run where that costs no more than to answer
    all of these steps by windows. Otherwise states do not last, and one is made of the k that a window would be made
    of: it meets the tolerance, costs the same, and is there for the next step. A model that is not certified, and one
    of which the curve at its own k is over UNASKED where no tolerance was asked for, needs all of its tokens.
    """
    k = None
    if certificate.certified and certificate.rounding is not None:
        k = _enough(certificate, position, window=None, own=own, largest=largest, tolerance=tolerance)
    if k is None or k >= held or cost(None) <= max(1 + used, COST_TOLERANCE) * cost(k):
        return None
    return k


def _enough(
    certificate: Certificate, position: int, *, window: int | None, own: int, largest: int, tolerance: float | None
) -> int | None:
    """The k that is known to do before anything is run; None: all tokens."""
    if tolerance is None:
        k = window or (own if meets(bound(certificate, own, position), UNASKED) else position)
    elif window is not None:
        k = window if meets(bound(certificate, window, position), tolerance) else position
    else:
        smallest = certificate.smallest_window(tolerance)
        k = smallest if smallest is not None and smallest <= largest else position
    return None if k >= position else k


def of_session(asked: Mode | None, own: Mode) -> Mode:
    """The mode of a request to a session: what was asked for, or else the session's own; auto is recurrent there."""
    mode = own if asked is None or asked is AUTO else asked
    return RECURRENT if mode is AUTO else mode


def is_free(asked: Mode | None, own: Mode) -> bool:
    """Whether a session's request leaves it to `auto` how its answer is made: neither it nor the session has a mode."""
    return asked in (None, Mode.AUTO) and own is Mode.AUTO
