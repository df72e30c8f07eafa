"""Keeps sessions in a Redis server or cluster that several replicas of Wane share. Redis is authoritative. Each process
caches the sessions that it uses.

A session is one key, `wane:<namespace>:{<session>}`, in the format of `codec.py`. Its latest snapshot, if states are
kept, is another key with the suffix `:state`. The braces put both keys on the same node of a cluster. Both keys expire
when the session has been idle for the time to live.

If an owner has a quota, a sorted set, `wane:<namespace>:{<owner>/}:sessions`, counts the owner's sessions. The set may
be on another node than a session, so the set and a session are never changed together. The process that creates a
session adds the session to the set both before and after it creates the session, so that every session is counted. A
session is removed from the set in two commands: the first checks that the session has expired, and the second removes
it if its score in the set is still the same. A request that creates the session again changes the score, and no score
is used twice.

Every change is one script that atomically compares the revision, makes the change, and sets the time to live. A caller
that got no answer may run the script again: it changes nothing if the session already has the new revision. This
requires that revisions are never used twice. The upper half of a revision is random. The random half is drawn again
when a session is created or rewound. It is also drawn again by the first change after a restart of Redis, because a
restart may lose acknowledged changes. A save of Redis to disk has the same effect as a restart.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from wane.service.errors import QuotaExceeded
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores import codec
from wane.service.sessions.stores.codec import read_snapshot, write_snapshot
from wane.service.sessions.stores.packed import PackedSessions
from wane.service.sessions.stores.redis_pipeline import KIND, Argument, RedisPipeline, Row, script
from wane.service.sessions.stores.store import (
    Appended,
    Commit,
    DamagedSession,
    Flush,
    SessionRecord,
    StoreHealth,
    branch,
)
from wane.service.settings import Settings
from wane.service.types.request import SLASH, owner_of

APPEND, REPLACE, READ, CLAIM = map(script, ("append", "replace", "read", "claim"))
DOUBT_BITS = 40
"""Number of bits of a random score that marks a session's expiry time as uncertain. In the sorted set of an owner's
sessions, a session's score is its expiry time in milliseconds since 1970. A random score of so few bits is a time in
the past. So a `_claim` that finds the set full takes the session for expired, and looks it up."""
# Steps do not use the cache if more than this share of the calls of `_saw` have moved=True. A step that finds an
# outdated session calls `_saw` once with moved=True, and once or twice with moved=False after it has read the session
# again. Any other step calls it once with moved=False. If half of all steps find an outdated session, the share is
# therefore a quarter to a third.
MOVED_OFTEN = 0.25
EMA_ALPHA = 1 / 16  # weight of the latest call of `_saw` in the moving average
DONE = (1, 2)
"""The append script's replies for a session to which it appended the tokens: at the next revision (1), or at a new
random revision (2), which is used if Redis was restarted or saved to disk since the session's last change."""


class RedisStore:
    """A `Store` that replicas share, with a cache of the sessions that this process uses."""

    def __init__(
        self,
        settings: Settings,
        session_history_tokens: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError if the address is invalid, and StoreError if the password file cannot be read."""
        ttl_s = settings.session_ttl_s
        self.trips = RedisPipeline(settings, metrics)
        self.prefix = f"wane:{settings.store_namespace}:"
        self.session_history_tokens = session_history_tokens
        self.most_buffered_bytes = 0  # other processes must see each step
        self.vocabulary_sizes: dict[str, int] = {}
        self._ttl_ms = max(1, round(1000 * ttl_s))
        self._remembered = PackedSessions(ttl_s, settings.session_budget_bytes, clock, durable=True)
        self._moved = 0.0

    async def create(self, record: SessionRecord, most: int | None = None) -> SessionRecord | None:
        session = record.session
        if most is not None:
            await self._claim(session, most)
        try:
            return await self._replace(record._replace(revision=branch()), None)
        finally:
            # A later `_claim` that finds the set full removes the entry unless the session exists.
            if most is not None:
                self.trips.tell(*self._doubting(session))

    async def _claim(self, session: str, most: int) -> None:
        """Counts a new session against its owner's quota of `most` sessions. Raises QuotaExceeded.

        Redis does not notify when a session expires. The set therefore holds, for each session, the time when the
        session expires if it is not used. If the set has `most` sessions, those whose time has passed or is uncertain
        are looked up. Expired sessions are removed from the set. The time of the other sessions is updated.
        """
        owner = owner_of(session)
        looked: list[tuple[Argument, ...]] = []
        while True:
            over = await self.trips.run(
                CLAIM, [self._owned(owner)], session, most, self._ttl_ms, *chain.from_iterable(looked)
            )
            if over == 1:  # counted; otherwise the reply lists sessions that may have expired, with their scores
                return
            if not over:
                raise QuotaExceeded(owner, most)
            ended, scores = over[::2], over[1::2]
            left_ms = await asyncio.gather(*(self.trips.do("PTTL", self.keys(name.decode())[0]) for name in ended))
            looked = list(zip(ended, scores, left_ms, strict=True))

    async def get(self, session: str) -> SessionRecord | None:
        data, left_ms, state = await self.trips.run(READ, self.keys(session))
        remembered = self._remembered.get(session)
        record = self._read(session, data, max(0.0, (self._ttl_ms - left_ms) / 1000))
        if remembered is not None:
            self._saw(moved=record is None or record.revision != remembered.revision)
        if record is None:
            self._remembered.forget(session)
            return None
        self._remember(record)
        return record if state is None else record._replace(snapshot=read_snapshot(state))

    def get_cached(self, session: str, *, to_step: bool = False) -> SessionRecord | None:
        if to_step and (self._moved > MOVED_OFTEN or not self.trips.reachable):
            return None
        return self._remembered.get(session)

    def _saw(self, *, moved: bool) -> None:
        """Records one comparison of a cached session with the stored session. `moved` says whether the cached session
        was outdated."""
        self._moved += EMA_ALPHA * (moved - self._moved)

    def _remember(self, record: SessionRecord) -> None:
        """Caches a session in place of its earlier record, if there is one."""
        self._remembered.put(record)
        if self._remembered.used_bytes > self._remembered.budget_bytes:
            self._remembered.squeeze()

    def kind(self, session: str) -> tuple[str, str] | None:
        return self._remembered.kind(session)

    async def touch(self, session: str) -> None:
        self._remembered.touch(session)
        for key in self.keys(session):
            self.trips.tell("PEXPIRE", key, self._ttl_ms)

    async def append_many(self, commits: Sequence[Commit]) -> list[Appended]:
        """See `Store`. If a session is not at the revision of its `record`, caches the current session.

        A script that was sent twice may have appended the tokens the first time, and may have failed the second time,
        because another process appended in between. The result is Unavailable if the second run failed, because the
        result of the first run is unknown.
        """
        afters, others, rows = list[SessionRecord](), list[int](), list[Row]()
        keep = self.session_history_tokens
        for commit in commits:
            record, tokens, position = commit.record, commit.tokens, commit.position
            width, revision, vocabulary = record.tail.width, record.revision + 1, record.vocabulary
            tail = record.tail.append(tokens, position, keep)
            session, model, version, mode = record[:4]
            after = SessionRecord(
                session, model, version, mode, position, tail, revision, commit.step, 0.0, vocabulary, True
            )
            other = branch()
            arguments = (
                codec.REVISION.pack(record.revision),
                codec.REVISION.pack(revision),
                codec.REVISION.pack(other),
                codec.head(after),
                b"".join([token.to_bytes(width, "little") for token in tokens]),
                0 if position <= keep else keep * width,
                b"" if commit.snapshot is None else write_snapshot(commit.snapshot),
            )
            rows.append((self.keys(session), arguments))
            afters.append(after)
            others.append(other)
        replies = await self.trips.run_many(APPEND, rows, self._ttl_ms, done=DONE)
        return [*map(self._appended, afters, others, replies)]

    def _appended(self, after: SessionRecord, other: int, reply: Any) -> Appended:
        """Returns the result of one append. `other`: the next revision if Redis was restarted or saved to disk."""
        if isinstance(reply, Exception):
            return reply
        if reply not in DONE:
            try:
                self._lost(after.session, reply)
            except DamagedSession as error:
                return error
            return None
        self._saw(moved=False)
        if reply == 2:
            after = after._replace(revision=other)
        self._remember(after)
        return after

    def buffer(self, session: str, flush: Flush, most_bytes: int) -> bool:  # noqa: ARG002
        return False

    async def rewind(self, session: str, revision: int, position: int) -> SessionRecord | None:
        before = await self.get(session)
        if before is None or before.revision != revision:
            return None
        return await self._replace(before.rewound(position), revision)

    async def _replace(self, record: SessionRecord, before: int | None) -> SessionRecord | None:
        """Replaces a session at the revision `before` with `record`, which must have a new revision. If `before` is
        None, the session must not exist. Returns None, without side effects, if the session is at another revision. A
        stored state that has read other tokens than `record` is deleted, and the snapshot of `record` is stored."""
        done = await self.trips.run(
            REPLACE,
            self.keys(record.session),
            codec.REVISION.pack(record.revision),
            codec.head(record) + record.tail.data,
            self._ttl_ms,
            0 if before is None else record.position,
            b"" if before is None else codec.REVISION.pack(before),
            b"" if record.snapshot is None else write_snapshot(record.snapshot),
        )
        if done != 1:
            self._lost(record.session, done)
            return None
        kept = record._replace(durable=True)
        self._remember(kept)
        return kept

    async def delete(self, session: str) -> bool:
        self._remembered.forget(session)
        deleted = await self.trips.do("DEL", *self.keys(session))
        if owner_of(session):
            self.trips.tell(*self._doubting(session, "XX"))  # another request may be creating the session again
        return bool(deleted)

    async def count(self, model: str) -> int:
        return self._remembered.count(model)

    @property
    def standing(self) -> StoreHealth:
        return StoreHealth(KIND, self.trips.reachable)

    async def open(self) -> None:
        await self.trips.open()

    async def close(self) -> None:
        await self.trips.close()

    def _owned(self, owner: str) -> str:
        """Returns the key of the set that counts an owner's sessions. It differs from every session's key."""
        return f"{self.prefix}{{{owner}{SLASH}}}:sessions"

    def _doubting(self, session: str, *only: str) -> tuple[str, ...]:
        """Returns the command that counts a session against its owner's quota, even if that exceeds the quota, with an
        uncertain expiry time. With "XX", the command has no effect if the session is not in the set."""
        return "ZADD", self._owned(owner_of(session)), *only, str(secrets.randbits(DOUBT_BITS)), session

    def keys(self, session: str) -> tuple[str, str]:
        # Redis takes the text before the first } as the hash tag, which both keys must share
        key = f"{self.prefix}{{{session.replace('%', '%25').replace('}', '%7D')}}}"
        return key, f"{key}:state"

    def _read(self, session: str, data: bytes | None, idle_s: float = 0.0) -> SessionRecord | None:
        """Decodes a session that Redis sent. Removes a session that cannot be read from the cache, and raises
        DamagedSession."""
        if data is None:
            return None
        try:
            record = codec.read(session, data, self.session_history_tokens, idle_s, self.vocabulary_sizes)
            return record._replace(durable=True)
        except codec.Unreadable as error:
            self._remembered.forget(session)
            raise DamagedSession(f"{error}: is a replica of another version running?") from error

    def _lost(self, session: str, data: bytes | None) -> None:
        """Caches the session that a script found at another revision than the expected one."""
        self._saw(moved=True)
        record = self._read(session, data)
        if record is None:
            self._remembered.forget(session)
        else:
            self._remember(record)
