"""Coarse timers: cheap to set and cheap to cancel.

Every request has a deadline and a client that may disconnect, and few reach either. A timer of the event loop costs a
request more than its decoding. Here a timer is one entry of a set, and the loop has one timer for all that fire within
the same hundredth of a second. A timer fires up to a hundredth of a second late, or up to a sixty-fourth of its delay.
Exact delays of minutes would keep tens of thousands of loop timers, most of them for cancelled timers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

TICK_S = 0.01

EXACT_BITS = 7
"""A delay is fewer than 2 to this power of ticks. A tick is a hundredth of a second, or 2, 4, 8, ... times that."""


def _cancelled() -> None:
    """Replaces the callback of a cancelled timer."""


class Timer:
    """Calls `ring` once, on the event loop, unless it is cancelled first."""

    __slots__ = ("_others", "ring")

    def __init__(self, ring: Callable[[], None], others: set[Timer]) -> None:
        self.ring = ring
        self._others = others
        others.add(self)

    def cancel(self) -> None:
        """Cancels the timer; does nothing if it has fired. Drops the callback, which may hold this timer."""
        self._others.discard(self)
        self.ring = _cancelled


class Timers:
    """The timers of one event loop, by the tick in which they fire."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ticks: dict[int, set[Timer]] = {}
        self._latest: tuple[float, int] = -1.0, 0  # the latest time, and its tick

    def at(self, when: float, ring: Callable[[], None]) -> Timer:
        """Calls `ring` at `when`, seconds on the event loop's clock, or in the next turn if `when` has passed."""
        loop = self.loop
        latest, tick = self._latest
        if when != latest:  # the steps of one call share a deadline
            tick = math.ceil(when / TICK_S)
            wide = (tick - int(loop.time() / TICK_S)).bit_length() - EXACT_BITS
            if wide > 0:
                tick = -(-tick >> wide) << wide  # the next multiple
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
            if timers:  # one raised, and the others still have to fire
                self.loop.call_soon(self._ring_all, timers)


_latest: Timers | None = None


def timers() -> Timers:
    """Returns the timers of the running event loop. Only the latest loop is remembered: a process serves on one."""
    global _latest
    loop = asyncio.get_running_loop()
    found = _latest
    if found is None or found.loop is not loop:
        found = _latest = Timers(loop)
    return found
