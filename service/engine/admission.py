"""Which requests an engine has let in, and whether it lets in more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from wane.service.errors import Unavailable


class Admission:
    """Counts one engine's requests; all methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self.asked = 0
        """Requests, ever."""
        self.active = 0
        """Those that are not over."""
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Counts a request, until it leaves. Raises Unavailable when no more are taken."""
        if self._closed:
            raise Unavailable("the server is stopping")
        self.asked += 1
        self.active += 1
        self._idle.clear()

    def leave(self) -> None:
        """One request has ended."""
        self.active -= 1
        if not self.active:
            self._idle.set()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts a request while it lasts. Raises Unavailable when no more are taken."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def close(self) -> None:
        """No more are taken."""
        self._closed = True

    async def idle(self) -> None:
        """Waits until all are over."""
        await self._idle.wait()
