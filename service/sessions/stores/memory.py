"""Keeps sessions in this process's memory. They are lost when the process ends, unless they are saved to a file.

The tokens of a session whose state is in memory may be in a buffer: see `Store.buffer`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from wane.service.errors import Overloaded, QuotaExceeded
from wane.service.sessions.stores import dump_file
from wane.service.sessions.stores.packed import PackedSessions, entry_bytes
from wane.service.sessions.stores.store import (
    Appended,
    Commit,
    Flush,
    LastStep,
    SessionRecord,
    StoreHealth,
    UnsavedSessions,
    branch,
    of_tokens,
)
from wane.service.types.request import owner_of

logger = logging.getLogger("wane.store")

ASIDE = ".read"  # suffix that is added to the name of a file whose sessions were read


class OwnedSessions:
    """Counts the sessions of each owner."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def claim(self, owner: str, most: int | None = None) -> bool:
        """Counts one session more. Returns False, without a change, if the owner has `most` sessions already."""
        if most is not None and self._counts[owner] >= most:
            return False
        self._counts[owner] += 1
        return True

    def release(self, owner: str) -> None:
        """Counts one session less."""
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]


class MemoryStore:
    """A `Store` of sessions in memory, within a budget in bytes. A session expires after `ttl_s` seconds without use.

    A new session is rejected unless it fits with a full token history. Existing sessions may still exceed the budget
    when their token histories grow. The longest idle sessions are then evicted.
    """

    def __init__(
        self,
        session_history_tokens: int,
        ttl_s: float,
        budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        on_memory_eviction: Callable[[str], object] = lambda _: None,
        file: Path | None = None,
        owned: OwnedSessions | None = None,
    ) -> None:
        """`on_memory_eviction` is called with the model of every session that is evicted for lack of memory. Sessions
        are read from `file` when the store is opened, and saved to it when the store is closed. `owned` counts the
        sessions of each owner, by default those of this store."""
        self.session_history_tokens = session_history_tokens
        self.most_buffered_bytes = budget_bytes
        self.vocabulary_sizes: dict[str, int] = {}
        self.standing = StoreHealth("memory")
        self.sessions = PackedSessions(ttl_s, budget_bytes, clock, self._unbuffer, self._forgotten, on_memory_eviction)
        self._file = file
        self._is_open = self._is_closed = False
        self._owned = OwnedSessions() if owned is None else owned
        # For each session whose tokens are in a buffer, the buffer's `Flush` and the bytes that the buffer uses.
        self._buffered: dict[str, tuple[Flush, int]] = {}

    async def create(self, record: SessionRecord, most: int | None = None) -> SessionRecord | None:
        session, sessions = record.session, self.sessions
        if self.get_cached(session) is not None:
            return None
        sessions.forget(session)  # an expired session with this id may still be stored
        owner = owner_of(session)
        whole = entry_bytes(session, (1 + self.session_history_tokens) * record.tail.width)  # with <eos>
        sessions.expire()
        if not self._owned.claim(owner, most):
            assert most is not None, "sessions without a limit are refused: this is a bug"
            raise QuotaExceeded(owner, most)
        if sessions.used_bytes + whole > sessions.budget_bytes:
            self._owned.release(owner)
            raise Overloaded(
                f"{len(sessions)} sessions use {sessions.used_bytes} bytes, and a new session uses up to {whole}: "
                f"together more than session_budget_bytes, which is {sessions.budget_bytes}"
            )
        fresh = record._replace(revision=branch())
        sessions.put(fresh)
        return fresh

    async def get(self, session: str) -> SessionRecord | None:
        return self.get_cached(session)

    def get_cached(self, session: str, *, to_step: bool = False) -> SessionRecord | None:  # noqa: ARG002  (the record is always current)
        if session in self._buffered and self._unbuffer(session):
            self.sessions.squeeze()
        return self.sessions.get(session)

    def kind(self, session: str) -> tuple[str, str] | None:
        """See `Store`. A buffered session stays buffered; its next step checks whether it has expired."""
        return self.sessions.kind(session, expired=session in self._buffered)

    async def touch(self, session: str) -> None:
        if self.get_cached(session) is not None:
            self.sessions.touch(session)

    async def append_many(self, commits: Sequence[Commit]) -> list[Appended]:
        """See `Store`. States are not kept."""
        results = list[Appended]()
        for commit in commits:
            record, position = commit.record, commit.position
            held = self.get_cached(record.session)
            if held is None or held.revision != record.revision:
                results.append(None)
                continue
            session, model, version, mode = record[:4]
            tail = record.tail.append(commit.tokens, position, self.session_history_tokens)
            revision, vocabulary = record.revision + 1, record.vocabulary
            after = SessionRecord(session, model, version, mode, position, tail, revision, commit.step, 0.0, vocabulary)
            self.sessions.put(after)
            results.append(after)
        self.sessions.squeeze()
        return results

    def buffer(self, session: str, flush: Flush, most_bytes: int) -> bool:
        """See `Store`. If the sessions are then over the budget, the next change evicts some."""
        if self.sessions.kind(session, expired=True) is None:
            return False
        self._buffered[session] = flush, most_bytes
        self.sessions.drop_tail(session)
        self.sessions.used_bytes += most_bytes
        return True

    def _unbuffer(self, session: str) -> bool:
        """Takes the session's tokens from its buffer, even if the sessions are then over the budget. Removes the
        session if it has expired. Returns whether the session was buffered."""
        buffered = self._buffered.pop(session, None)
        if buffered is None:
            return False
        flush, most_bytes = buffered
        self.sessions.used_bytes -= most_bytes
        tail, position, idle_s = flush(session)
        before = self.sessions.peek(session)
        steps = position - before.position
        if steps:
            last = LastStep(position - 1, of_tokens(tail.ids()[-1:].tolist()), None)
            before = before._replace(position=position, revision=before.revision + steps, last=last)
        self.sessions.put(before._replace(tail=tail, idle_s=idle_s))
        if self.sessions.kind(session) is None:  # as its shard's most recent entry, it would be found late
            self.sessions.forget(session)
        return True

    async def rewind(self, session: str, revision: int, position: int) -> SessionRecord | None:
        record = self.get_cached(session)
        if record is None or record.revision != revision:
            return None
        rewound = record.rewound(position)
        self.sessions.put(rewound)
        return rewound

    async def delete(self, session: str) -> bool:
        is_stored = self.get_cached(session) is not None
        self.sessions.forget(session)
        return is_stored

    async def count(self, model: str) -> int:
        return self.sessions.count(model)

    async def open(self) -> None:
        """See `Store`. Renames the file after reading it, because the first step makes the file's sessions out of date.
        If the store is closed during the read, the file stays for the next process."""
        if self._file is None or not await asyncio.to_thread(self._file.exists):
            self._is_open = True
            return
        records = await asyncio.to_thread(dump_file.load, self._file, self.session_history_tokens)
        if self._is_closed:
            return
        for record in records:
            self._owned.claim(owner_of(record.session))
            self.sessions.put(record)
        self.sessions.squeeze()
        # No `await` since the sessions were added, so that they are always either in the file or in this store.
        self._file.replace(self._file.with_name(self._file.name + ASIDE))
        self._is_open = True
        logger.info("%d sessions were read from %s", len(self.sessions), self._file)

    async def close(self) -> None:
        """See `Store`. Does not overwrite a file that could not be read. Raises UnsavedSessions if writing fails."""
        self._is_closed = True
        for session in [*self._buffered]:
            self.get_cached(session)
        if self._file is None or not self._is_open:
            return
        alive = [*self.sessions.all()]
        try:
            await asyncio.to_thread(dump_file.save, self._file, alive)
        except OSError as error:
            raise UnsavedSessions(
                f"the {len(alive)} sessions in memory are lost: they could not be written to {self._file}: "
                f"{error.strerror}"
            ) from error
        logger.info("%d sessions were written to %s", len(alive), self._file)

    def _forgotten(self, session: str) -> None:
        self._owned.release(owner_of(session))
