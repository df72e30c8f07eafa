"""A fallback for the time that the shared store is away: sessions go on in this process, as not durable.

A session goes on from its last known record. When the store is back, it is given the session, if it still has the
record that the session went on from. Otherwise somebody else changed or deleted it: the store wins, the tokens that
were not durable are lost, and the session's next step raises PositionConflict. A session that this process has not seen
cannot go on, and none can be deleted, until the store is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from wane.service.errors import Overloaded, PositionConflict, QuotaExceeded, Unavailable
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores import codec
from wane.service.sessions.stores.redis import NOBODY, RedisStore, Unanswered, extended, rewound
from wane.service.sessions.stores.store import LastStep, SessionRecord, Snapshot, StoreHealth, appended, branch
from wane.service.types import owner_of

logger = logging.getLogger("wane.store")

AT_ONCE = 256  # sessions that are given to the store in parallel when it is back


@dataclass(slots=True, eq=False)
class UnsyncedSession:
    """A session that the store does not have as it is here; unless somebody changed it, the store has it at one of
    `marks`. `since`: the earliest position that it was at since then; up to there the store has the same. `counts`: it
    was created here, and counts against its owner's limit."""

    record: SessionRecord
    marks: list[bytes]
    used_s: float
    since: int
    counts: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class FallbackStore:
    """A `Store` over another that may be away."""

    def __init__(
        self, shared: RedisStore, ttl_s: float, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ttl_s`: idle time after which a session ends, here too. `clock` in seconds."""
        self._shared = shared
        self._ttl_s = ttl_s
        self._clock = clock
        self._unsynced: dict[str, UnsyncedSession] = {}
        self._discarded_unsynced: dict[str, tuple[int, float]] = {}  # where the store has them, and when that was seen
        self._settling: asyncio.Task[None] | None = None
        self._discarded = metrics.sessions_conflict_discarded
        metrics.sessions_not_durable.set_function(lambda: len(self._unsynced))
        shared.trips.on_back = self._settle_soon

    @property
    def session_history_tokens(self) -> int:
        return self._shared.session_history_tokens

    @session_history_tokens.setter
    def session_history_tokens(self, tokens: int) -> None:
        self._shared.session_history_tokens = tokens

    @property
    def standing(self) -> StoreHealth:
        trips = self._shared.trips
        return replace(self._shared.standing, ready=trips.was_reached, not_durable=len(self._unsynced))

    async def create(self, record: SessionRecord, most: int | None = None) -> bool:
        """While the store is away, only sessions that are not durable count against an owner's limit. When it is back,
        those that were created meanwhile count there, even if they are too many."""
        session = record.session
        if session in self._unsynced:
            return False
        if most is not None:
            try:
                await self._shared.claim(session, most)
            except Unavailable:
                owner = owner_of(session)
                if sum(owner_of(unsynced) == owner for unsynced in self._unsynced) >= most:
                    raise QuotaExceeded(owner, most) from None
        fresh = record._replace(revision=branch())
        try:
            created = await self._shared.make(fresh, counts=most is not None)
        except Unavailable:
            if not self._shared.trips.was_reached or self._shared.get_cached(session) is not None:
                raise
            if session in self._unsynced:
                return False
            # The store may have created the session although it did not answer.
            unsynced = self._mark_unsynced(fresh, [NOBODY, codec.mark(fresh.revision)])
            unsynced.counts = most is not None
            unsynced.since = 0  # no state of an earlier one is its own
            created = True
        if created:
            self._discarded_unsynced.pop(session, None)
        return created

    async def get(self, session: str) -> SessionRecord | None:
        unsynced = self._unsynced.get(session)
        if unsynced is not None:
            async with unsynced.lock:
                if self._unsynced.get(session) is unsynced:
                    return await self._settle(unsynced) or self._shared.get_cached(session)
        try:
            return await self._shared.get(session)
        except Unavailable:
            record = self._shared.get_cached(session)
            if record is None:
                raise
            return record

    def get_cached(self, session: str, *, to_step: bool = False) -> SessionRecord | None:
        if to_step and session in self._discarded_unsynced:
            raise self._told(session)
        if session in self._unsynced:
            return self._unsynced[session].record
        return self._shared.get_cached(session, to_step=to_step and self._shared.trips.reachable)

    def kind(self, session: str) -> tuple[str, str] | None:
        if session in self._unsynced:
            record = self._unsynced[session].record
            return record.model, record.vocabulary
        return self._shared.kind(session)

    async def touch(self, session: str) -> None:
        if session in self._unsynced:
            self._unsynced[session].used_s = self._clock()
        await self._shared.touch(session)

    async def append(
        self, record: SessionRecord, tokens: Sequence[int], step: LastStep, snapshot: Snapshot | None = None
    ) -> SessionRecord | None:
        """Raises PositionConflict if tokens that were not durable turn out to be lost."""
        session, revision = record.session, record.revision
        unsynced = self._unsynced.get(session)
        if unsynced is None:
            try:
                return await self._shared.append(record, tokens, step, snapshot)
            except Unanswered as lost:
                if session in self._unsynced:  # another one was here first
                    return None
                marks, before = lost.marks, lost.before
            after = extended(before, branch(), tokens, step, self.session_history_tokens)
            return self._mark_unsynced(after, marks).record
        async with unsynced.lock:
            before = unsynced.record
            if self._unsynced.get(session) is not unsynced or before.revision != revision:
                return None
            unsynced.record = extended(before, appended(revision), tokens, step, self.session_history_tokens)
            unsynced.used_s = self._clock()
            settled = await self._settle(unsynced)
        if settled is None:
            raise self._told(session)
        return settled

    async def rewind(self, session: str, revision: int, position: int) -> SessionRecord | None:
        unsynced = self._unsynced.get(session)
        if unsynced is None:
            try:
                return await self._shared.rewind(session, revision, position)
            except Unanswered as lost:
                before, marks = lost.before, lost.marks
            except Unavailable:
                known = self._shared.get_cached(session)
                if known is None or known.revision != revision:
                    raise
                before, marks = known, (codec.mark(revision),)
            if session in self._unsynced:  # another one was here first
                return None
            unsynced = self._mark_unsynced(before, marks)
        async with unsynced.lock:
            before = unsynced.record
            if self._unsynced.get(session) is not unsynced or before.revision != revision:
                return None
            unsynced.record = rewound(before, position)
            unsynced.since = min(unsynced.since, position)
            return await self._settle(unsynced)

    async def delete(self, session: str) -> bool:
        """Raises Unavailable while the store is away."""
        unsynced = self._unsynced.get(session)
        if unsynced is None:
            deleted = await self._shared.delete(session)
        else:
            async with unsynced.lock:  # it may be being given to the store
                deleted = await self._shared.delete(session) or self._unsynced.get(session) is unsynced
                self._unsynced.pop(session, None)
        self._discarded_unsynced.pop(session, None)
        return deleted

    async def count(self, model: str) -> int:
        since_s = self._clock() - self._ttl_s
        for session, unsynced in list(self._unsynced.items()):
            if unsynced.used_s < since_s:
                del self._unsynced[session]
        for session, (_, seen_s) in list(self._discarded_unsynced.items()):
            if seen_s < since_s:
                del self._discarded_unsynced[session]
        return await self._shared.count(model)

    async def open(self) -> None:
        await self._shared.open()

    async def close(self) -> None:
        """Gives the store what is not durable, if it is reachable."""
        if self._settling is not None:
            await self._settling
        if self._shared.trips.reachable:
            await self._settle_all()
        if self._unsynced:
            logger.error("%d sessions end with tokens that were not durable", len(self._unsynced))
        await self._shared.close()

    def _told(self, session: str) -> PositionConflict:
        """The error for the next step of a session whose tokens were lost. It is raised once."""
        position, _ = self._discarded_unsynced.pop(session)
        return PositionConflict(
            f"tokens that were answered as not durable are lost: the session is at position {position} in the store",
            position,
        )

    def _mark_unsynced(self, record: SessionRecord, marks: Sequence[bytes]) -> UnsyncedSession:
        """Keeps the session here, as not durable."""
        record = record._replace(durable=False, snapshot=None)
        unsynced = UnsyncedSession(record, [*marks], self._clock(), record.position)
        self._unsynced[record.session] = unsynced
        return unsynced

    async def _settle(self, unsynced: UnsyncedSession) -> SessionRecord | None:
        """Gives the store a session, whose lock is held.

        Returns it as the store has it now, or as it is still here; None if the store has another, which wins.
        """
        record = unsynced.record
        session = record.session
        if not self._shared.trips.reachable:
            return record
        try:
            if unsynced.counts:
                await self._shared.trips.do(*self._shared.counting(session))
            kept = await self._shared.replace(record, unsynced.marks, unsynced.since)
        except Unavailable:
            unsynced.marks.append(codec.mark(record.revision))  # the store may have taken it
            return record
        except Overloaded:  # the store is full: the session goes on here
            return record
        self._unsynced.pop(session, None)
        if unsynced.counts:
            self._shared.trips.tell(*self._shared.counting(session))  # again, as for a session that is made
        if kept is None:
            self._discarded.inc()
            now = self._shared.get_cached(session)
            self._discarded_unsynced[session] = 0 if now is None else now.position, self._clock()
            logger.warning("a session has lost its last tokens, which were not durable")
        return kept

    def _settle_soon(self) -> None:
        self._settling = asyncio.get_running_loop().create_task(self._settle_all())

    async def _settle_all(self) -> None:
        """Gives the store all that is not durable. What it has no room for is tried again when it is used."""

        async def settle(unsynced: UnsyncedSession) -> None:
            async with unsynced.lock:
                if self._unsynced.get(unsynced.record.session) is unsynced:
                    await self._settle(unsynced)

        every = [*self._unsynced.values()]
        for start in range(0, len(every), AT_ONCE):
            await asyncio.gather(*map(settle, every[start : start + AT_ONCE]))
