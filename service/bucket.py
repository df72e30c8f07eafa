"""How much may be asked at a time: a token bucket, which fills at a rate and holds a burst."""

from __future__ import annotations

from collections.abc import Callable

ROUNDING = 1e-9
"""What is missing by less than this is not missing: to take and give back is not exact."""


class Bucket:
    """Holds `burst` at most, and fills by `rate` a second. What is taken all at once, and is more than it can hold, is
    given when it is full, and leaves a debt: so a large call is not refused for ever, and costs no less."""

    __slots__ = ("_burst", "_clock", "_held", "_rate", "_since_s")

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        """`clock` in seconds. It is full at first."""
        self._clock = clock
        self._rate = rate
        self._burst = self._held = burst
        self._since_s = clock()

    def take(self, amount: float, before: float = 0.0) -> float:
        """0 where so much was taken; else nothing was, and it is how many seconds from now it may be.

        What was taken `before` is part of the same call: the two are given as one, or it is given back."""
        now_s = self._clock()
        held = min(self._burst, self._held + (now_s - self._since_s) * self._rate)
        self._since_s = now_s
        missing = min(before + amount, self._burst) - (held + before)
        if missing > ROUNDING:
            self._held = min(self._burst, held + before)
            return missing / self._rate
        self._held = held - amount
        return 0.0

    def adopt(self, before: Bucket) -> None:
        """Goes on from what another one holds, of the same owner under other limits."""
        self._held = min(self._burst, before._held)
        self._since_s = before._since_s
