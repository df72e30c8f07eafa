"""Who is here: requests that are being answered, told apart by whether they came before a moment or after it.

A request may hold on to an engine that another one takes the place of meanwhile. It need not say so: what was replaced
is ended once everybody is gone who was here when it was.
"""

from __future__ import annotations

import asyncio


class Wave:
    """Requests that came between two moments."""

    __slots__ = ("_count", "_gone")

    def __init__(self) -> None:
        self._count = 0
        self._gone: asyncio.Event | None = None

    def leave(self) -> None:
        """One of its requests is over."""
        self._count -= 1
        if not self._count and self._gone is not None:
            self._gone.set()

    def join(self) -> Wave:
        """One request more; it leaves the wave that this returns."""
        self._count += 1
        return self

    async def gone(self) -> None:
        """Waits until all of them are over. No more may join it."""
        if self._count:
            self._gone = self._gone or asyncio.Event()
            await self._gone.wait()


class Presence:
    """All requests; all methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._latest = Wave()
        self._earlier: list[Wave] = []

    def enter(self) -> Wave:
        """A request has come; it is to leave the wave that this returns."""
        return self._latest.join()

    async def depart(self) -> None:
        """Waits until everybody is gone who is here now, whoever comes meanwhile."""
        here = [*self._earlier, self._latest]
        self._earlier.append(self._latest)
        self._latest = Wave()
        for wave in here:
            await wave.gone()
            if wave in self._earlier:
                self._earlier.remove(wave)
