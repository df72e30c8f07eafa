"""One request at a time for each session: two steps of a session are never in one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from wane.service.errors import Overloaded
from wane.service.types import id_of

MOST_WAITERS = 64  # requests that may wait for one session: they are not in the batcher's bounded queue yet


class SessionLocks:
    """Who has the turn, and who waits for it, by session; nothing is kept of sessions that nobody is at."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]] | None] = {}

    def turn(self, session: str) -> SessionLock:
        """The session, until the end of the `async with` block. Raises Overloaded where too many wait for it."""
        return SessionLock(self, self._waiting, session)

    def take(self, session: str) -> bool:
        """Takes the session's lock if it is free; the caller must then leave it."""
        if session in self._waiting:
            return False
        self._waiting[session] = None
        return True

    def leave(self, session: str) -> None:
        """Leaves a turn that was taken: it is the next one's, if anybody waits."""
        queue = self._waiting[session]
        while queue:
            first = queue.popleft()
            if not first.done():
                first.set_result(None)
                return
        del self._waiting[session]


class SessionLock:
    """A session's turn, as an asynchronous context manager: first come, first served."""

    __slots__ = ("_locks", "_session", "_waiting")

    def __init__(
        self, locks: SessionLocks, waiting: dict[str, deque[asyncio.Future[None]] | None], session: str
    ) -> None:
        self._locks = locks
        self._waiting = waiting
        self._session = session

    async def __aenter__(self) -> None:
        session = self._session
        if self._locks.take(session):
            return
        queue = self._waiting[session]
        if queue is None:
            queue = self._waiting[session] = deque()
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
            else:  # it was given the turn, and leaves in the same moment
                self._locks.leave(session)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._locks.leave(self._session)
