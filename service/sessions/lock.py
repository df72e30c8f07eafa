"""Locks each session, so that two steps of the same session are never in one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from wane.service.errors import Overloaded
from wane.service.types import id_of

MOST_WAITERS = 64  # largest number of requests that wait for one session; the batcher's queue limit does not count them


class SessionLocks:
    """One lock for each session. Waiting requests get the lock in order of arrival. A free lock uses no memory."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[asyncio.Future[None]] | None] = {}

    def take(self, session: str) -> bool:
        """Takes the session's lock if the lock is free, and returns whether it was free. If True is returned, the
        caller must later call `leave`."""
        if session in self.waiting:
            return False
        self.waiting[session] = None
        return True

    async def wait(self, session: str) -> None:
        """Waits for the session's lock and takes it. The caller must later call `leave`.

        Raises Overloaded if MOST_WAITERS requests already wait for the lock.
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
            else:  # the request was cancelled after it got the lock
                self.leave(session)
            raise

    def leave(self, session: str) -> None:
        """Releases the session's lock. The next waiting request gets the lock, if there is one."""
        queue = self.waiting[session]
        while queue:
            first = queue.popleft()
            if not first.done():
                first.set_result(None)
                return
        del self.waiting[session]

    @asynccontextmanager
    async def held(self, session: str) -> AsyncIterator[None]:
        """Holds the session's lock during the `async with` block. Raises Overloaded."""
        await self.wait(session)
        try:
            yield
        finally:
            self.leave(session)
