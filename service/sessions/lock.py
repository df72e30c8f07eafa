"""One request at a time for each session: two steps of a session are never in one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from wane.service.errors import Overloaded
from wane.service.types import id_of

MOST_WAITERS = 64  # requests that may wait for one session: they are not in the batcher's bounded queue yet


class SessionLocks:
    """A lock for each session: first come, first served. Nothing is kept of sessions whose lock is free."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[asyncio.Future[None]] | None] = {}

    def take(self, session: str) -> bool:
        """Takes the session's lock if it is free; the caller must then leave it."""
        if session in self.waiting:
            return False
        self.waiting[session] = None
        return True

    async def wait(self, session: str) -> None:
        """Takes the session's lock once all who waited before have left it; the caller must then leave it.

        Raises Overloaded where too many wait for it.
        """
        if self.take(session):
            return
        queue = self.waiting[session]
        if queue is None:
            queue = self.waiting[session] = deque()
        if len(queue) >= MOST_WAITERS:
            raise Overloaded(f"{MOST_WAITERS} requests are already waiting for session {id_of(session)!r}")
        mine = asyncio.get_running_loop().create_future()
        queue.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.cancelled():
                with suppress(ValueError):
                    queue.remove(mine)
            else:  # it was given the lock, and leaves in the same moment
                self.leave(session)
            raise

    def leave(self, session: str) -> None:
        """Gives the session's lock to the next who waits for it, if anybody does."""
        queue = self.waiting[session]
        while queue:
            first = queue.popleft()
            if not first.done():
                first.set_result(None)
                return
        del self.waiting[session]

    @asynccontextmanager
    async def held(self, session: str) -> AsyncIterator[None]:
        """The session's lock, until the end of the `async with` block. Raises Overloaded."""
        await self.wait(session)
        try:
            yield
        finally:
            self.leave(session)
