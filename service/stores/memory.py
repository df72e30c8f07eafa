"""Sessions in this process's memory: gone with it."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from service.errors import Overloaded
from service.stores.store import LastStep, Record


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
        self._expire()
        if record.session in self._entries:
            return False
        if len(self._entries) >= self._max_sessions:
            raise Overloaded(f"there are {self._max_sessions} sessions already, the most this server keeps")
        self._entries[record.session] = _Entry(record, self._clock())
        self._counts[record.model] += 1
        return True

    async def get(self, session: str) -> Record | None:
        """See `Store`."""
        self._expire()
        entry = self._entries.get(session)
        return None if entry is None else replace(entry.record, idle_s=self._clock() - entry.touched_s)

    async def touch(self, session: str) -> None:
        """See `Store`."""
        self._expire()
        if session in self._entries:
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
        self._expire()
        entry = self._entries.pop(session, None)
        if entry is None:
            return False
        self._counts[entry.record.model] -= 1
        return True

    async def count(self, model: str) -> int:
        """See `Store`."""
        self._expire()
        return self._counts[model]

    def _at(self, session: str, revision: int) -> Record | None:
        """The record, if it is at `revision`."""
        self._expire()
        entry = self._entries.get(session)
        return entry.record if entry is not None and entry.record.revision == revision else None

    def _change(self, record: Record) -> Record:
        record = replace(record, revision=record.revision + 1)
        self._entries[record.session].record = record
        self._touch(record.session)
        return record

    def _touch(self, session: str) -> None:
        self._entries[session].touched_s = self._clock()
        self._entries.move_to_end(session)

    def _expire(self) -> None:
        """Forgets what has been idle for longer than the time to live: the front of the order, never a scan."""
        oldest = self._clock() - self._ttl_s
        while self._entries:
            session, entry = next(iter(self._entries.items()))
            if entry.touched_s >= oldest:
                return
            del self._entries[session]
            self._counts[entry.record.model] -= 1
