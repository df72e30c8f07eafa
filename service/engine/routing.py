"""Chooses the mode and the window of `auto` requests, from the certificate and measured costs."""

from __future__ import annotations

from collections.abc import Callable

from wane.models.manifest import Certificate
from wane.service.engine.bounds import expected, meets, smallest_window
from wane.service.types.common import Mode

AUTO, RECURRENT = Mode.AUTO, Mode.RECURRENT  # faster than looking up the enum member on each use

COST_TOLERANCE = 1.1
"""The measured costs of a window and of all tokens count as equal if they differ by at most this factor. All tokens are
then run, because their bound is smaller."""

UNASKED = 1e-3
"""If the request has no tolerance, `auto` runs the model's default window only if the window's error bound is at most
this value."""

Cost = Callable[[int | None], float]
"""Returns the expected seconds of a run over the last k tokens, or over all tokens for None."""


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
    """Returns the windows that `auto` tries for a sequence of `position` tokens that has no resident state. None stands
    for all tokens.

    A window of k tokens contains the sequence's last k tokens. `window` is the requested k, `own` is the model's
    default k, and `largest` is the largest allowed k. The certificate's curve is its error bound as a function of k.
    `auto` chooses k as follows. If the request has neither a tolerance nor a k, `auto` chooses the default k, provided
    that the certificate's curve at that k is at most UNASKED. If the request has only a k, `auto` chooses that k. If
    the request has only a tolerance, `auto` chooses the smallest k at which the curve meets the tolerance. If the
    request has both, `auto` chooses the requested k, provided that the curve at that k meets the tolerance. In all
    other cases `auto` runs all tokens. It also runs all tokens if that costs at most COST_TOLERANCE times as much as
    the window, because an answer from all tokens has the smallest bound.

    `has_radius_output` says whether the `window` graph outputs a bound for the tokens of its run. This bound may be far
    below the curve. If this function returns two windows, the first is an attempt that relies on this bound. Its answer
    is used if the bound that its run outputs, or that a search for a proof finds, meets the tolerance. Otherwise the
    second window is run. If the rounding depends on the run, a last None stands for the case that the rounding is too
    large. A model that is
    not certified runs all tokens. A k that covers all tokens becomes None.
    """
    if not certificate.certified or not certificate.has_rounding:
        return (None,)
    tried = own if window is None else window
    ways: tuple[int | None, ...]
    sure = _enough(certificate, position, window=window, own=own, largest=largest, tolerance=tolerance)
    if sure is not None and cost(None) <= COST_TOLERANCE * cost(sure):
        sure = None
    # The cost of a failed attempt is wasted. An attempt may cost at most half as much as the run that it can save.
    if (
        has_radius_output
        and tolerance is not None
        and tried != sure
        and tried < position
        and 2 * cost(tried) <= cost(sure)
    ):
        ways = (tried, sure)
    else:
        ways = (sure,)
    # The rounding of a run is known only after the run. It may be too large for the tolerance.
    rounded = tolerance is not None and certificate.readout is not None
    return (*ways, None) if rounded and sure is not None else ways


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
    """Returns the number of latest tokens from which `auto` rebuilds a session's state at `position`. None stands for
    all `held` tokens that the session keeps.

    A state from all tokens has the smallest bound, and it also serves later steps. `used` is the expected number of
    later steps that find the rebuilt state before it is evicted. Let k be the number of tokens of a window that meets
    the tolerance. The state is rebuilt from all tokens if this costs at most as much as 1 + `used` runs over k tokens.
    Otherwise the state is expected to be evicted before it has saved the cost of the rebuild. It is then rebuilt from
    the last k tokens. Such a rebuild costs as much as an answer in mode window, and leaves a state for the next step. A
    model that is not certified needs all tokens. If the request has no tolerance, a model also needs all tokens if the
    certificate's curve at `own`, the model's default k, exceeds UNASKED.
    """
    k = None
    if certificate.certified and certificate.has_rounding:
        k = _enough(certificate, position, window=None, own=own, largest=largest, tolerance=tolerance)
    if k is None or k >= held or cost(None) <= max(1 + used, COST_TOLERANCE) * cost(k):
        return None
    return k


def _enough(
    certificate: Certificate, position: int, *, window: int | None, own: int, largest: int, tolerance: float | None
) -> int | None:
    """Returns the k that `ways` describes, chosen from the certificate alone, before any run. None stands for all
    tokens."""
    if tolerance is None:
        k = window or (own if meets(expected(certificate, own, position), UNASKED) else position)
    elif window is not None:
        k = window if meets(expected(certificate, window, position), tolerance) else position
    else:
        smallest = smallest_window(certificate, tolerance, largest)
        k = position if smallest is None else smallest
    return None if k >= position else k


def of_session(asked: Mode | None, own: Mode) -> Mode:
    """Returns the mode that answers a session's request: the requested mode, or else the session's mode. Auto becomes
    recurrent."""
    mode = own if asked is None or asked is AUTO else asked
    return RECURRENT if mode is AUTO else mode


def is_free(asked: Mode | None, own: Mode) -> bool:
    """Returns whether `auto` chooses how a session's request is answered, because neither the request nor the session
    sets another mode."""
    return asked in (None, Mode.AUTO) and own is Mode.AUTO
