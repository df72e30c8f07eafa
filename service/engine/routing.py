"""Chooses how `auto` answers a request, by the certificate and by measured costs."""

from __future__ import annotations

from collections.abc import Callable

from wane.models.manifest import Certificate
from wane.service.engine.bounds import bound, meets
from wane.service.types import Mode

AUTO, RECURRENT = Mode.AUTO, Mode.RECURRENT  # looking up an enum member takes longer

COST_TOLERANCE = 1.1
"""Measured costs within this factor count as equal: then the way with the smaller bound is taken."""

UNASKED = 1e-3
"""For a request without a tolerance: the largest bound at the model's own k with which `auto` answers by window."""

Cost = Callable[[int | None], float]
"""Seconds that an answer from the last k tokens takes; None: from all tokens."""


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
    """Returns the windows that `auto` tries for `position` tokens without a state; None means all tokens.

    `window` is the requested k, `own` the model's, `largest` the maximum. Without a tolerance, `auto` takes the
    requested k, or else the model's own if the curve is at most UNASKED there, or else all tokens. With a tolerance, it
    takes the requested k if the curve meets the tolerance there, or, if none was requested, the smallest k at which it
    does. It runs all tokens instead if that costs no more, because their bound is the smallest.

    `has_radius_output`: runs of windows compute a bound for their own tokens, which may be far below the curve. Then
    the first k is a try: it answers if its own bound meets the tolerance, and otherwise the last entry answers. A model
    that is not certified runs all tokens. A k that covers all tokens becomes None.
    """
    if not certificate.certified or certificate.rounding is None:
        return (None,)
    tried = own if window is None else window
    sure = _enough(certificate, position, window=window, own=own, largest=largest, tolerance=tolerance)
    if sure is not None and cost(None) <= COST_TOLERANCE * cost(sure):
        sure = None
    # A failed try is wasted: it should cost at most half of what it can save.
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
    """Returns from how many latest tokens `auto` rebuilds the state of a session at `position`; None: from all `held`.

    A state from all tokens has the smallest bound, and also serves later steps: `used` of them, estimated as the number
    of states found resident for each rebuilt one. It runs all tokens if that costs no more than to answer all these
    steps by windows. Otherwise states are evicted too soon, and it rebuilds from the k of a window: that meets the
    tolerance, costs the same, and leaves a state for the next step. A model that is not certified needs all tokens. So
    does one whose curve at its own k is over UNASKED, if the request has no tolerance.
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
    """Returns the k that is known to suffice before any run; None: all tokens."""
    if tolerance is None:
        k = window or (own if meets(bound(certificate, own, position), UNASKED) else position)
    elif window is not None:
        k = window if meets(bound(certificate, window, position), tolerance) else position
    else:
        smallest = certificate.smallest_window(tolerance)
        k = smallest if smallest is not None and smallest <= largest else position
    return None if k >= position else k


def of_session(asked: Mode | None, own: Mode) -> Mode:
    """Returns the mode of a session's request: the requested one, or else the session's own. Auto means recurrent."""
    mode = own if asked is None or asked is AUTO else asked
    return RECURRENT if mode is AUTO else mode


def is_free(asked: Mode | None, own: Mode) -> bool:
    """Returns whether `auto` chooses how a session's request is answered: neither sets another mode."""
    return asked in (None, Mode.AUTO) and own is Mode.AUTO
