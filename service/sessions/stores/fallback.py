"""A local fallback for an unreachable shared store: sessions continue in this process, but are not durable.

A session continues from the last record that this process has seen. When the store is reachable again, the session is
written to the store, if the store still has that record. Otherwise another process changed or deleted the session. The
store's session is then kept, the tokens that were not durable are lost, and the session's next step raises
PositionConflict. While the store is unreachable, a session that this process has not seen cannot continue, and no
session can be deleted.
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

AT_ONCE = 256  # number of sessions that are written concurrently when the store is reachable again


@dataclass(slots=True, eq=False)
class UnsyncedSession:
    """A session that is newer in this process than in the store. The mark (`codec.mark`) of the store's session is one
    of `marks`, unless another process changed that session. `used_s` is the time of the last use. `since` is the
    position up to which the two sessions are equal. A rewind can lower this position. `counts` says whether the session
    was created in this process and counts against its owner's quota."""

    record: SessionRecord
    marks: list[bytes]
    used_s: float
    since: int
    counts: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class FallbackStore:
    """A `Store` that continues sessions in this process while the shared store is unreachable."""

    def __init__(
        self, shared: RedisStore, ttl_s: float, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ttl_s`: idle time in seconds after which a session expires, in this process too. `clock` returns seconds."""
        self._shared = shared
        self._ttl_s = ttl_s
        self._clock = clock
        self._unsynced: dict[str, UnsyncedSession] = {}
        # For each session whose tokens were discarded: the session's position in the store, and the time of the
        # discard.
        self._discarded_unsynced: dict[str, tuple[int, float]] = {}
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

    async def create(self, record: SessionRecord, most: int | None = None) -> SessionRecord | None:
        """See `Store`. While the store is unreachable, only sessions that are not durable count against an owner's
        quota. When the store is reachable again, the sessions created in the meantime count against the quota in the
        store, even if they exceed it."""
        session = record.session
        if session in self._unsynced:
            return None
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
                return None
            # The store may have created the session although no answer was received.
            unsynced = self._mark_unsynced(fresh, [NOBODY, codec.mark(fresh.revision)])
            unsynced.counts = most is not None
            unsynced.since = 0  # the store may hold a state of an earlier session with this id
            created = unsynced.record
        if created is not None:
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
            raise self._lost(session)
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
        """See `Store`. Also raises PositionConflict if tokens that were not durable are lost."""
        session, revision = record.session, record.revision
        unsynced = self._unsynced.get(session)
        if unsynced is None:
            try:
                return await self._shared.append(record, tokens, step, snapshot)
            except Unanswered as lost:
                if session in self._unsynced:  # another request has marked the session as not durable
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
            raise self._lost(session)
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
            if session in self._unsynced:  # another request has marked the session as not durable
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
        """See `Store`. Raises Unavailable while the store is unreachable."""
        unsynced = self._unsynced.get(session)
        if unsynced is None:
            deleted = await self._shared.delete(session)
        else:
            async with unsynced.lock:  # another task may be writing the session to the store
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
        """See `Store`. Writes the sessions that are not durable to the store, if the store is reachable."""
        if self._settling is not None:
            await self._settling
        if self._shared.trips.reachable:
            await self._settle_all()
        if self._unsynced:
            logger.error("%d sessions have lost tokens that were not durable", len(self._unsynced))
        await self._shared.close()

    def _lost(self, session: str) -> PositionConflict:
        """Returns the error for the next step of a session that lost tokens. Forgets the loss, so that only one step
        fails."""
        position, _ = self._discarded_unsynced.pop(session)
        return PositionConflict(
            "tokens that were acknowledged as not durable are lost: "
            f"the session is at position {position} in the store",
            position,
        )

    def _mark_unsynced(self, record: SessionRecord, marks: Sequence[bytes]) -> UnsyncedSession:
        """Keeps the session in this process and marks it as not durable."""
        record = record._replace(durable=False, snapshot=None)
        unsynced = UnsyncedSession(record, [*marks], self._clock(), record.position)
        self._unsynced[record.session] = unsynced
        return unsynced

    async def _settle(self, unsynced: UnsyncedSession) -> SessionRecord | None:
        """Tries to write a session to the store. The caller must hold `unsynced.lock`.

        Returns the session that the store now has. Returns the session in this process if the store is unreachable or
        full. Returns None if another process changed the session in the store: the store's session is then kept.
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
            unsynced.marks.append(codec.mark(record.revision))  # the store may have written this revision
            return record
        except Overloaded:  # the store is full: the session continues in this process
            return record
        self._unsynced.pop(session, None)
        if unsynced.counts:
            # The session is counted before and after the write, as in `RedisStore.make`.
            self._shared.trips.tell(*self._shared.counting(session))
        if kept is None:
            self._discarded.inc()
            now = self._shared.get_cached(session)
            self._discarded_unsynced[session] = 0 if now is None else now.position, self._clock()
            logger.warning("a session has lost its latest tokens, which were not durable")
        return kept

    def _settle_soon(self) -> None:
        self._settling = asyncio.get_running_loop().create_task(self._settle_all())

    async def _settle_all(self) -> None:
        """Writes all sessions that are not durable to the store. If the store has no memory for a session, the session
        is written at its next use."""

        async def settle(unsynced: UnsyncedSession) -> None:
            async with unsynced.lock:
                if self._unsynced.get(unsynced.record.session) is unsynced:
                    await self._settle(unsynced)

        every = [*self._unsynced.values()]
        for start in range(0, len(every), AT_ONCE):
            await asyncio.gather(*map(settle, every[start : start + AT_ONCE]))
