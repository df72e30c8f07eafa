"""Coarse timers: cheap to set and cheap to take back, for what hardly ever comes to pass.

Every request has a deadline and a client that may hang up, and next to none of them meets either. A timer of the event
loop costs a request more than its decoding; here it is one entry of a set, and the loop has one timer for all that ring
within the same hundredth of a second. An alarm rings up to that much late, or up to a sixty-fourth of the time that it
is set for: those of minutes would else keep tens of thousands of timers, most of them for alarms that were taken back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

TICK_S = 0.01

EXACT_BITS = 7
"""An alarm is set for fewer than 2 to this many ticks: of a hundredth of a second, or of 2, 4, 8, ... times that."""


def _nobody() -> None:
    """What rings where nobody waits any more."""


class Timer:
    """Calls `ring` once, on the event loop, unless it is taken back before."""

    __slots__ = ("_others", "ring")

    def __init__(self, ring: Callable[[], None], others: set[Timer]) -> None:
        self.ring = ring
        self._others = others
        others.add(self)

    def cancel(self) -> None:
        """Takes it back; nothing happens where it has rung. It lets go of whoever was to be called, who holds it."""
        self._others.discard(self)
        self.ring = _nobody


class Timers:
    """The alarms of one event loop, by the tick in which they ring."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ticks: dict[int, set[Timer]] = {}

    def at(self, when: float, ring: Callable[[], None]) -> Timer:
        """`when` is seconds on the event loop's clock; what has passed rings in the loop's next turn."""
        loop = self.loop
        tick = math.ceil(when / TICK_S)
        wide = (tick - int(loop.time() / TICK_S)).bit_length() - EXACT_BITS
        if wide > 0:
            tick = -(-tick >> wide) << wide  # the next multiple
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
            if timers:  # one failed, which is no reason for the others not to ring
                self.loop.call_soon(self._ring_all, timers)


_latest: Timers | None = None


def timers() -> Timers:
    """Those of the running event loop. A process serves on one loop; another one begins with none."""
    global _latest
    loop = asyncio.get_running_loop()
    found = _latest
    if found is None or found.loop is not loop:
        found = _latest = Timers(loop)
    return found
