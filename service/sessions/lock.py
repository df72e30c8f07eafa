"""Locks each session, so that two steps of the same session are never in one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from wane.service.errors import Overloaded
from wane.service.types.request import id_of

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

    def reserve(self, session: str) -> asyncio.Future[None] | None:
        """Takes a place among the requests that want the session's lock. Returns a future that is done as soon as the
        place has the lock, or None if MOST_WAITERS requests wait already. The caller must later call `hold` or
        `give_up`."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.take(session):
            place.set_result(None)
            return place
        queue = self.waiting[session]
        if queue is None:
            queue = self.waiting[session] = deque()
        if len(queue) >= MOST_WAITERS:
            return None
        queue.append(place)
        return place

    async def hold(self, session: str, place: asyncio.Future[None]) -> None:
        """Waits until a place has the lock. The caller must later call `leave`."""
        try:
            await place
        except asyncio.CancelledError:
            self.give_up(session, place)
            raise

    def give_up(self, session: str, place: asyncio.Future[None]) -> None:
        """Gives a place up. If it has the lock, the next place gets it."""
        if place.done() and not place.cancelled():
            self.leave(session)
        else:
            place.cancel()  # `leave` passes over it
            with suppress(KeyError, TypeError, ValueError):
                self.waiting[session].remove(place)  # type: ignore[union-attr]

    async def wait(self, session: str) -> None:
        """Waits for the session's lock and takes it. The caller must later call `leave`.

        Raises Overloaded if MOST_WAITERS requests already wait for the lock.
        """
        place = self.reserve(session)
        if place is None:
            raise Overloaded(f"{MOST_WAITERS} requests are already waiting for session {id_of(session)!r}")
        await self.hold(session, place)

    def leave(self, session: str) -> None:
        """Releases the session's lock. The next waiting request gets the lock, if there is one."""
        queue = self.waiting[session]
        while queue:
            first = queue.popleft()
            if not first.done():
                first.set_result(None)
                return
        del self.waiting[session]

    def leave_all(self, sessions: Sequence[str]) -> None:
        """Releases the locks of several sessions: see `leave`."""
        waiting = self.waiting
        for session in sessions:
            if waiting[session] is None:
                del waiting[session]
            else:
                self.leave(session)

    @asynccontextmanager
    async def held(self, session: str) -> AsyncIterator[None]:
        """Holds the session's lock during the `async with` block. Raises Overloaded."""
        await self.wait(session)
        try:
            yield
        finally:
            self.leave(session)
