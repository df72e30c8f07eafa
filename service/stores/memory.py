"""Sessions in this process's memory: gone with it."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from service.errors import Overloaded
from service.stores.store import LastStep, Record

EXPIRED_AT_ONCE = 1000  # sessions that one call forgets at most, so that none takes long


@dataclass(slots=True)
class _Entry:
    record: Record
    touched_s: float


class MemoryStore:
    """A `Store` of at most `max_sessions` sessions, each idle for at most `ttl_s`."""

    def __init__(
        self, tail_tokens: int, ttl_s: float, max_sessions: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tail_tokens = tail_tokens
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the longest idle first
        self._counts: Counter[str] = Counter()

    async def create(self, record: Record) -> bool:
        """See `Store`."""
        if self._live(record.session) is not None:
            return False
        if len(self._entries) >= self._max_sessions:
            raise Overloaded(f"there are {self._max_sessions} sessions already, the most this server keeps")
        self._entries[record.session] = _Entry(record, self._clock())
        self._counts[record.model] += 1
        return True

    async def get(self, session: str) -> Record | None:
        """See `Store`."""
        entry = self._live(session)
        return None if entry is None else replace(entry.record, idle_s=self._clock() - entry.touched_s)

    async def touch(self, session: str) -> None:
        """See `Store`."""
        if self._live(session) is not None:
            self._touch(session)

    async def append(self, session: str, revision: int, tokens: Sequence[int], step: LastStep) -> Record | None:
        """See `Store`."""
        record = self._at(session, revision)
        if record is None:
            return None
        position = record.position + len(tokens)
        tail = record.tail.append(tokens, position, self.tail_tokens)
        return self._change(replace(record, position=position, tail=tail, last=step))

    async def rewind(self, session: str, revision: int, position: int) -> Record | None:
        """See `Store`."""
        record = self._at(session, revision)
        if record is None:
            return None
        tail = record.tail.without_last(record.position - position)
        return self._change(replace(record, position=position, tail=tail, last=None))

    async def delete(self, session: str) -> bool:
        """See `Store`."""
        entry = self._live(session)
        if entry is not None:
            self._forget(entry)
        return entry is not None

    async def count(self, model: str) -> int:
        """See `Store`."""
        self._expire()
        return self._counts[model]

    def _at(self, session: str, revision: int) -> Record | None:
        """The record, if it is at `revision`."""
        entry = self._live(session)
        return entry.record if entry is not None and entry.record.revision == revision else None

    def _change(self, record: Record) -> Record:
        record = replace(record, revision=record.revision + 1)
        self._entries[record.session].record = record
        self._touch(record.session)
        return record

    def _touch(self, session: str) -> None:
        self._entries[session].touched_s = self._clock()
        self._entries.move_to_end(session)

    def _live(self, session: str) -> _Entry | None:
        """The session's entry, unless it has been idle for longer than the time to live."""
        self._expire()
        entry = self._entries.get(session)
        if entry is None or not self._is_over(entry):
            return entry
        self._forget(entry)
        return None

    def _expire(self) -> None:
        """Forgets sessions that are over: from the front of the order, never by a scan, and some at a time."""
        for _ in range(EXPIRED_AT_ONCE):
            entry = next(iter(self._entries.values()), None)
            if entry is None or not self._is_over(entry):
                return
            self._forget(entry)

    def _is_over(self, entry: _Entry) -> bool:
        return entry.touched_s < self._clock() - self._ttl_s

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.record.session]
        self._counts[entry.record.model] -= 1
