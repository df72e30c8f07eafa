"""Caches the sessions of a shared store as this process last saw them."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from wane.service.sessions.stores.memory import Packing, entry_bytes, tail_bytes, touched_s
from wane.service.sessions.stores.store import SessionRecord, Snapshot

SNAPSHOTS = 256  # largest number of cached snapshots; a snapshot is dropped when its session changes
# Steps do not use the cache if more than this share of the calls of `saw` have moved=True. A step that finds an
# outdated session calls `saw` once with moved=True, and once or twice with moved=False after it has read the session
# again. Any other step calls it once with moved=False. If half of all steps find an outdated session, the share is
# therefore a quarter to a third.
MOVED_OFTEN = 0.25
EMA_ALPHA = 1 / 16  # weight of the latest call of `saw` in the moving average


class RecordCache:
    """A cache of packed session records, within a budget in bytes. The records that were cached longest ago are evicted
    first."""

    def __init__(self, budget_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`ttl_s`: idle time in seconds after which a session expires. `clock` returns seconds."""
        self._budget_bytes = budget_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._packing = Packing()
        self._entries: dict[str, bytes] = {}
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._bytes = 0
        self._moved = 0.0

    @property
    def mostly_moved(self) -> bool:
        """Whether cached sessions are often outdated, because other processes also append tokens to them."""
        return self._moved > MOVED_OFTEN

    def saw(self, *, moved: bool) -> None:
        """Records one comparison of a cached session with the stored session. `moved` says whether the cached session
        was outdated."""
        self._moved += EMA_ALPHA * (moved - self._moved)

    def put(self, record: SessionRecord) -> None:
        """Caches a session in place of its earlier record, if there is one."""
        session = record.session
        self.forget(session)
        packed = self._packing.pack(record, self._clock())
        self._entries[session] = packed
        self._bytes += entry_bytes(session, tail_bytes(packed))
        self._counts[record.model] += 1
        if record.snapshot is not None:
            self._snapshots[session] = record.snapshot
            if len(self._snapshots) > SNAPSHOTS:
                self._snapshots.popitem(last=False)
        while self._bytes > self._budget_bytes:
            self.forget(next(iter(self._entries)))

    def get(self, session: str) -> SessionRecord | None:
        """Returns the session unless it has expired."""
        packed, now_s = self._entries.get(session), self._clock()
        if packed is None or now_s > touched_s(packed) + self._ttl_s:
            return None
        return self._packing.unpack(session, packed, now_s, durable=True, snapshot=self._snapshots.get(session))

    def kind(self, session: str) -> tuple[str, str] | None:
        """Returns the session's model and vocabulary, unless it has expired."""
        packed = self._entries.get(session)
        if packed is None or self._clock() > touched_s(packed) + self._ttl_s:
            return None
        return self._packing.kind(packed)

    def forget(self, session: str) -> None:
        """Removes a session from the cache, if it is cached."""
        packed = self._entries.pop(session, None)
        if packed is not None:
            self._bytes -= entry_bytes(session, tail_bytes(packed))
            self._counts[self._packing.model(packed)] -= 1
        self._snapshots.pop(session, None)

    def count(self, model: str) -> int:
        """Returns the number of a model's cached sessions that have not expired."""
        since_s = self._clock() - self._ttl_s
        while (session := next(iter(self._entries), None)) is not None and touched_s(self._entries[session]) < since_s:
            self.forget(session)
        return self._counts[model]
