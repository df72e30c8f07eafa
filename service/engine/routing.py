"""Which way a request is answered."""

from __future__ import annotations

from models.manifest import Certificate
from service.engine.bounds import bound, meets
from service.engine.types import Mode


def ways(
    certificate: Certificate,
    position: int,
    *,
    window: int | None,
    own: int,
    largest: int,
    tolerance: float | None,
    beside: bool,
) -> tuple[int | None, ...]:
    """What `auto` does with `position` tokens and no state: the k to answer with, or None for all of them.

    `window` is the k that was asked for, `own` the model's, `largest` the most that may be used. Without a tolerance
    it is the k asked for or the model's own; with one, the k asked for if the curve meets it there, or else the
    smallest at which it does. `beside`: runs of windows compute a bound for their own tokens, which may be far under
    the curve. Then a k comes first that is to be tried: it answers if its own bound meets the tolerance, or else what
    comes last does. A model that is not certified runs everything, and a k that covers everything is no window.
    """
    if not certificate.certified:
        return (None,)
    if tolerance is None:
        return (_short(own if window is None else window, position),)
    tried = own if window is None else window
    if window is not None:
        sure = window if meets(bound(certificate, window, position), tolerance) else None
    else:
        smallest = certificate.smallest_window(tolerance)
        sure = smallest if smallest is not None and smallest <= largest else None
    sure = _short(sure, position)
    # A try that fails is for nothing: it should cost at most half of what it can save.
    if beside and tried != sure and 2 * tried <= (position if sure is None else sure):
        return (tried, sure)
    return (sure,)


def _short(k: int | None, position: int) -> int | None:
    return None if k is None or k >= position else k


def of_session(asked: Mode | None, own: Mode) -> Mode:
    """The mode of a request to a session: what was asked for, or else the session's own.

    `auto` is recurrent there: a state that is not resident is rebuilt by one run over the tail, which tells at
    least as much as any window of it, and is there for the next step.
    """
    mode = own if asked in (None, Mode.AUTO) else asked
    return Mode.RECURRENT if mode in (None, Mode.AUTO) else mode
