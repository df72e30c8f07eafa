"""Sessions in Redis, where replicas share them. Redis holds the truth; a process remembers sessions as a cache of it.

A session is one key, `wane:<namespace>:{<session>}`, laid out as in `codec.py`. Its latest state, if states are kept,
is another, with `:state` behind it. The braces put both on one node of a cluster. Both expire when the session was idle
for its time to live.

A sorted set, `wane:<namespace>:{<owner>/}:sessions`, counts the sessions of an owner that are limited. It may be on
another node than a session, so the two are never changed together. Every session counts: its creator counts it before
it is made, and again afterwards. A session is taken out of the set only if it was found to be over and still has the
score from before it was looked for; whoever creates it again changes the score, and no score is used twice.

Every change is one script, which compares the revision, changes, and sets the time to live, all or nothing. A caller
that got no answer may run it again: a script that finds the revision that it would set changes nothing. Hence revisions
are never used twice. The upper half of one is random; it is drawn anew when a session is created or rewound, and by the
first change after a restart of Redis, which may have lost acknowledged changes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from wane.service.errors import QuotaExceeded, Unavailable
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores import codec
from wane.service.sessions.stores.codec import read_snapshot, write_snapshot
from wane.service.sessions.stores.record_cache import RecordCache
from wane.service.sessions.stores.redis_pipeline import KIND, Argument, RedisPipeline, Script
from wane.service.sessions.stores.store import LastStep, SessionRecord, Snapshot, StoreHealth, appended, branch
from wane.service.types import SLASH, owner_of

APPEND, REPLACE, READ = Script("append"), Script("replace"), Script("read")
CLAIM = Script("claim")
COUNTED = 1
"""The claim script's reply if it counted the session; else it lists sessions that may be over, with their scores."""
DOUBT_BITS = 40
"""Bits of a random score, which as milliseconds since 1970 is long past."""
DONE = (1, 2)
"""The append script's replies if it appended: at the next revision, or at the other one."""
NOBODY = b""
"""The mark of a session that does not exist."""


class Unanswered(Unavailable):
    """Redis did not answer a change. Unless somebody else changes the session, `before`, it is at one of `marks`."""

    def __init__(self, message: str, before: SessionRecord, marks: Sequence[bytes]) -> None:
        super().__init__(message)
        self.before = before
        self.marks = marks


def extended(
    record: SessionRecord, revision: int, tokens: Sequence[int], step: LastStep, session_history_tokens: int
) -> SessionRecord:
    """The session after a step that appended `tokens`."""
    position = record.position + len(tokens)
    tail = record.tail.append(tokens, position, session_history_tokens)
    return record._replace(position=position, tail=tail, revision=revision, last=step, idle_s=0.0, snapshot=None)


def rewound(record: SessionRecord, position: int) -> SessionRecord:
    """The session cut back to `position`, at a new revision."""
    tail = record.tail.without_last(record.position - position)
    return record._replace(position=position, tail=tail, revision=branch(), last=None, idle_s=0.0, snapshot=None)


class RedisStore:
    """A `Store` that replicas share, with a cache of the sessions that were used here."""

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        session_history_tokens: int,
        ttl_s: float,
        budget_bytes: int,
        timeout_s: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespace` is part of every key. `budget_bytes`: of the cache. `timeout_s`: of a round trip. Raises
        ValueError for an invalid address."""
        self.trips = RedisPipeline(url, timeout_s, metrics)
        self.prefix = f"wane:{namespace}:"
        self.session_history_tokens = session_history_tokens
        self._ttl_ms = max(1, round(1000 * ttl_s))
        self._remembered = RecordCache(budget_bytes, ttl_s, clock)

    async def create(self, record: SessionRecord, most: int | None = None) -> bool:
        if most is not None:
            await self.claim(record.session, most)
        return await self.make(record._replace(revision=branch()), counts=most is not None)

    async def make(self, fresh: SessionRecord, *, counts: bool) -> bool:
        """Keeps a new session at a new revision; False if its id exists. `counts`: it was claimed before."""
        made = False
        try:
            made = await self.replace(fresh, [NOBODY], since=0) is not None  # no state of an earlier one is its own
        finally:
            if counts:  # if none was made, the claim is given back unless the session exists
                self.trips.tell(*(self.counting(fresh.session) if made else self._doubting(fresh.session)))
        return made

    async def claim(self, session: str, most: int) -> None:
        """Counts a new session among its owner's, of which there may be `most`. Raises QuotaExceeded.

        Redis tells nobody when a session expires, so the set has the time at which each ends if it is not used. Only
        when the set is full are the sessions looked for whose time has come or is in doubt. Those that are over are
        taken out of the set; the others get their present time.
        """
        owner = owner_of(session)
        looked: list[tuple[Argument, ...]] = []
        while True:
            over = await self.trips.run(
                CLAIM, [self._owned(owner)], session, most, self._ttl_ms, *chain.from_iterable(looked)
            )
            if over == COUNTED:
                return
            if not over:
                raise QuotaExceeded(owner, most)
            found, scores = over[::2], over[1::2]
            left_ms = await asyncio.gather(*(self.trips.do("PTTL", self.keys(one.decode())[0]) for one in found))
            looked = list(zip(found, scores, left_ms, strict=True))

    def counting(self, session: str) -> tuple[str, ...]:
        """The command that counts a session among its owner's, over the limit too. Its time is in doubt; the time of a
        session that counts already moves by half a millisecond."""
        part = 0.5 + secrets.randbits(DOUBT_BITS) / (4 << DOUBT_BITS)
        return "ZINCRBY", self._owned(owner_of(session)), repr(part), session

    async def get(self, session: str) -> SessionRecord | None:
        data, left_ms, state = await self.trips.run(READ, self.keys(session))
        remembered = self._remembered.get(session)
        record = self._read(session, data, max(0.0, (self._ttl_ms - left_ms) / 1000))
        if remembered is not None:
            self._remembered.saw(moved=record is None or record.revision != remembered.revision)
        if record is None:
            self._remembered.forget(session)
            return None
        record = record._replace(snapshot=None if state is None else read_snapshot(state))
        self._remembered.put(record)
        return record

    def get_cached(self, session: str, *, to_step: bool = False) -> SessionRecord | None:
        if to_step and (self._remembered.mostly_moved or not self.trips.reachable):
            return None
        return self._remembered.get(session)

    def kind(self, session: str) -> tuple[str, str] | None:
        return self._remembered.kind(session)

    async def touch(self, session: str) -> None:
        for key in self.keys(session):
            self.trips.tell("PEXPIRE", key, self._ttl_ms)

    async def append(
        self, record: SessionRecord, tokens: Sequence[int], step: LastStep, snapshot: Snapshot | None = None
    ) -> SessionRecord | None:
        """Remembers the session as it is now if the comparison was lost.

        A script that was sent twice may have won the first time although it lost the second, if somebody else appended
        in between. Nobody can tell, so it raises Unanswered.
        """
        session, revision = record.session, record.revision
        after = extended(record, appended(revision), tokens, step, self.session_history_tokens)
        other = branch()
        width = after.tail.width
        head = codec.head(after)
        try:
            done = await self.trips.run(
                APPEND,
                self.keys(session),
                codec.mark(revision),
                codec.mark(after.revision),
                codec.mark(other),
                head,
                b"".join([token.to_bytes(width, "little") for token in tokens]),
                0 if after.position <= self.session_history_tokens else self.session_history_tokens * width,
                self._ttl_ms,
                b"" if snapshot is None else write_snapshot(snapshot),
                tells=lambda done: done in DONE,
            )
        except Unavailable as error:
            marks = (codec.mark(revision), codec.mark(after.revision, head), codec.mark(other, head))
            raise Unanswered(error.message, record, marks) from error
        if done not in DONE:
            self._lost(session, done)
            return None
        self._remembered.saw(moved=False)
        after = after._replace(durable=True, revision=other if done == 2 else after.revision)
        self._remembered.put(after)
        return after

    async def rewind(self, session: str, revision: int, position: int) -> SessionRecord | None:
        before = await self.get(session)
        if before is None or before.revision != revision:
            return None
        after = rewound(before, position)
        try:
            return await self.replace(after, [codec.mark(revision)])
        except Unavailable as error:
            raise Unanswered(error.message, before, (codec.mark(revision), codec.mark(after.revision))) from error

    async def replace(
        self, record: SessionRecord, marks: Sequence[bytes], since: int | None = None
    ) -> SessionRecord | None:
        """Replaces a session that is at one of `marks` by `record`, at a new revision; None, without effect, if it is
        at none. `since`: the position up to which both are the same, by default the record's; a later state is
        forgotten."""
        data = codec.write(record)
        done = await self.trips.run(
            REPLACE,
            self.keys(record.session),
            data[: codec.REVISION.size],
            codec.after_run(data),
            self._ttl_ms,
            record.position if since is None else since,
            *marks,
        )
        if done != 1:
            self._lost(record.session, done)
            return None
        kept = record._replace(durable=True)
        self._remembered.put(kept)
        return kept

    async def delete(self, session: str) -> bool:
        self._remembered.forget(session)
        deleted = await self.trips.do("DEL", *self.keys(session))
        if owner_of(session):
            self.trips.tell(*self._doubting(session, "XX"))  # somebody may be creating it again
        return bool(deleted)

    async def count(self, model: str) -> int:

        return self._remembered.count(model)

    @property
    def standing(self) -> StoreHealth:
        return StoreHealth(KIND, reachable=self.trips.reachable, ready=self.trips.reachable)

    async def open(self) -> None:
        await self.trips.open()

    async def close(self) -> None:
        await self.trips.close()

    def _owned(self, owner: str) -> str:
        """The key of the set that counts an owner's sessions; no session's key is the same."""
        return f"{self.prefix}{{{owner}{SLASH}}}:sessions"

    def _doubting(self, session: str, *only: str) -> tuple[str, ...]:
        """The command that puts a session's time in doubt; with "XX" only if it counts."""
        return "ZADD", self._owned(owner_of(session)), *only, str(secrets.randbits(DOUBT_BITS)), session

    def keys(self, session: str) -> tuple[str, str]:
        key = f"{self.prefix}{{{session}}}"
        return key, f"{key}:state"

    def _read(self, session: str, data: bytes | None, idle_s: float = 0.0) -> SessionRecord | None:
        if data is None:
            return None
        try:
            return codec.read(session, data, self.session_history_tokens, idle_s)._replace(durable=True)
        except codec.Unreadable as error:
            raise Unavailable(f"{error}: is there a replica of a later version?") from error

    def _lost(self, session: str, found: Any) -> None:
        """Remembers the session that a lost comparison found."""
        self._remembered.saw(moved=True)
        record = self._read(session, found)
        if record is None:
            self._remembered.forget(session)
        else:
            self._remembered.put(record)
