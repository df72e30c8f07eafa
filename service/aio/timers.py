"""Coarse timers that are cheap to set and cheap to cancel.

Every request needs a timer for its deadline, and almost every timer is cancelled. For one request, a timer of the event
loop costs more than the decoding of the request. A timer of this module is an entry of a set. One timer of the event
loop serves all entries that fire in the same hundredth of a second. A timer fires late by up to a hundredth of a second
or by up to 1/64 of its delay, whichever is longer. If long delays were exact, the event loop would hold tens of
thousands of timers, most of them for cancelled entries.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

TICK_S = 0.01

EXACT_BITS = 7
"""Timers with a delay below 2^EXACT_BITS * TICK_S seconds fire at multiples of TICK_S. Timers with a longer delay fire
at multiples of a longer tick, which doubles each time the delay doubles."""


def _cancelled() -> None:
    """Does nothing. It replaces the callback of a cancelled timer."""


class Timer:
    """A timer that calls `ring` once on the event loop's thread, unless it is cancelled first."""

    __slots__ = ("_others", "ring")

    def __init__(self, ring: Callable[[], None], others: set[Timer]) -> None:
        self.ring = ring
        self._others = others
        others.add(self)

    def cancel(self) -> None:
        """Cancels the timer. Does nothing if the timer has fired. Drops the callback: if the callback refers to this
        timer, the two form a reference cycle."""
        self._others.discard(self)
        self.ring = _cancelled


class Timers:
    """The timers of one event loop, grouped by the tick in which they fire."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ticks: dict[int, set[Timer]] = {}
        self._latest: tuple[float, int] = -1.0, 0  # the latest requested time, and the tick of its timers

    def at(self, when: float, ring: Callable[[], None]) -> Timer:
        """Returns a timer that calls `ring` at `when`, in seconds on the event loop's clock. If `when` has passed,
        `ring` is called in the next iteration."""
        loop = self.loop
        latest, tick = self._latest
        if when != latest:  # the steps of one call share a deadline, so its tick is computed only once
            tick = math.ceil(when / TICK_S)
            wide = (tick - int(loop.time() / TICK_S)).bit_length() - EXACT_BITS
            if wide > 0:
                tick = -(-tick >> wide) << wide  # rounds up to the next multiple of 2^wide
            self._latest = when, tick
        timers = self._ticks.get(tick)
        if timers is None:
            timers = self._ticks[tick] = set()
            loop.call_at(tick * TICK_S, self._ring, tick)
        return Timer(ring, timers)

    def _ring(self, tick: int) -> None:
        self._ring_all(self._ticks.pop(tick))

    def _ring_all(self, timers: set[Timer]) -> None:
        try:
            while timers:
                timers.pop().ring()
        finally:
            if timers:  # one callback raised an exception, and the other timers still have to fire
                self.loop.call_soon(self._ring_all, timers)


_latest: Timers | None = None


def timers() -> Timers:
    """Returns the timers of the running event loop. Stores the timers of the latest loop only, because a process serves
    requests on one loop only."""
    global _latest
    loop = asyncio.get_running_loop()
    found = _latest
    if found is None or found.loop is not loop:
        found = _latest = Timers(loop)
    return found
