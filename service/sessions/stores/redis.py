"""Sessions in Redis, where replicas share them: the truth, of which what a process remembers is a cache.

A session is one key, `wane:<namespace>:{<session>}`, laid out as in `codec.py`; where states are kept, its latest one
is another, with `:state` behind it. The braces put both on one node of a cluster. Both end when the session has been
idle for its time to live.

Where an owner's sessions are limited, a sorted set, `wane:<namespace>:{<owner>/}:sessions`, counts them.
It may be on another node than a session, and is changed before and after it, never with it. No session is there and
does not count, whatever else runs: its maker counts it before, and again afterwards; and one is taken out of
the set only if it was found to be over, and has the score that it had before it was looked for. What makes a session
changes its score after that, and a score that has come is never there twice.

Every change is one script, which compares the revision, changes, and sets the time to live, all or nothing. A
caller without an answer may run it again: a script that finds the revision that it would set changes nothing.
Hence revisions are never used twice: the upper half of one is random, drawn anew for a session that is created or
rewound, and by the first change after Redis was started anew, which may have lost what it had acknowledged.
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
"""What the script of a claim says where the session is counted; else it gives those whose time has come."""
DOUBT_BITS = 40
"""Of a random score, which is no time but one long past, in milliseconds since 1970."""
DONE = (1, 2)
"""What the script of an append says where it appended: at the next revision, or at the other."""
NOBODY = b""
"""The mark of a session that there is not."""


class Unanswered(Unavailable):
    """Redis said nothing of a change: if nobody else changes the session in `before`, it is at one of `marks`."""

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
    """A `Store` that replicas share, which remembers what it saw."""

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
        """`namespace` is part of every key: other namespaces have other sessions. `budget_bytes` is for what is
        remembered. `timeout_s`: how long Redis may take. Raises ValueError for what is no address."""
        self.trips = RedisPipeline(url, timeout_s, metrics)
        self._prefix = f"wane:{namespace}:"
        self.session_history_tokens = session_history_tokens
        self._ttl_ms = max(1, round(1000 * ttl_s))
        self._remembered = RecordCache(budget_bytes, ttl_s, clock)

    async def create(self, record: SessionRecord, most: int | None = None) -> bool:
        if most is not None:
            await self.claim(record.session, most)
        return await self.make(record._replace(revision=branch()), counts=most is not None)

    async def make(self, fresh: SessionRecord, *, counts: bool) -> bool:
        """Keeps a new session, of a revision that nobody else has, which was claimed if it `counts`; False if one of
        that id exists."""
        made = False
        try:
            made = await self.replace(fresh, [NOBODY], since=0) is not None  # no state of an earlier one is its own
        finally:
            if counts:  # where none was made, its place is free, or that of the one that is there already
                self.trips.tell(*(self.counting(fresh.session) if made else self._doubting(fresh.session)))
        return made

    async def claim(self, session: str, most: int) -> None:
        """Counts a new session among its owner's, of which there may be `most`. Raises QuotaExceeded.

        Sessions end by themselves in Redis, which tells nobody: so they are counted in a sorted set, by when each ends
        if it is not used. Those whose time has come, or whose time is in doubt, are looked for when the set is full,
        and only then: they are taken out of it, or given the time that they have now.
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
            left_ms = await asyncio.gather(*(self.trips.do("PTTL", self._keys(one.decode())[0]) for one in found))
            looked = list(zip(found, scores, left_ms, strict=True))

    def counting(self, session: str) -> tuple[str, ...]:
        """The command that counts a session among its owner's, however many those are: its time is in doubt or, if it
        counts already, is some half a millisecond later."""
        part = 0.5 + secrets.randbits(DOUBT_BITS) / (4 << DOUBT_BITS)
        return "ZINCRBY", self._owned(owner_of(session)), repr(part), session

    async def get(self, session: str) -> SessionRecord | None:
        data, left_ms, state = await self.trips.run(READ, self._keys(session))
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
        """Nobody waits for it: what it is worth is gone if it fails."""
        for key in self._keys(session):
            self.trips.tell("PEXPIRE", key, self._ttl_ms)

    async def append(
        self, record: SessionRecord, tokens: Sequence[int], step: LastStep, snapshot: Snapshot | None = None
    ) -> SessionRecord | None:
        """Of a comparison that was lost the session as it is now is remembered.

        A comparison that is lost by what was sent twice may have been won the first time, if somebody else went on from
        there: nobody knows, and it must not be taken for one that has changed nothing.
        """
        session, revision = record.session, record.revision
        after = extended(record, appended(revision), tokens, step, self.session_history_tokens)
        other = branch()
        width = after.tail.width
        head = codec.head(after)
        try:
            done = await self.trips.run(
                APPEND,
                self._keys(session),
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
        """Puts `record`, whose revision nobody else has, in the place of a session that is at one of `marks`; None, and
        nothing done, if it is at none. `NOBODY` is the mark of no session. `since`: the position up to which the two
        are the same, if that is not the record's own; a state of a later one is forgotten."""
        data = codec.write(record)
        done = await self.trips.run(
            REPLACE,
            self._keys(record.session),
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
        deleted = await self.trips.do("DEL", *self._keys(session))
        if owner_of(session):
            self.trips.tell(*self._doubting(session, "XX"))  # another may be being made
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
        """The key of the sessions that an owner has: no session is called so."""
        return f"{self._prefix}{{{owner}{SLASH}}}:sessions"

    def _doubting(self, session: str, *only: str) -> tuple[str, ...]:
        """The command that has a session looked for when its owner's set is full; with "XX" only if it counts."""
        return "ZADD", self._owned(owner_of(session)), *only, str(secrets.randbits(DOUBT_BITS)), session

    def _keys(self, session: str) -> tuple[str, str]:
        key = f"{self._prefix}{{{session}}}"
        return key, f"{key}:state"

    def _read(self, session: str, data: bytes | None, idle_s: float = 0.0) -> SessionRecord | None:
        if data is None:
            return None
        try:
            return codec.read(session, data, self.session_history_tokens, idle_s)._replace(durable=True)
        except codec.Unreadable as error:
            raise Unavailable(f"{error}: is there a replica of a later version?") from error

    def _lost(self, session: str, found: Any) -> None:
        """A comparison was lost: what was found is remembered."""
        self._remembered.saw(moved=True)
        record = self._read(session, found)
        if record is None:
            self._remembered.forget(session)
        else:
            self._remembered.put(record)
