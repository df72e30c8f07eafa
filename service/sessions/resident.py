"""Sessions whose steps are columns: a row for every state in the cache, and the store written to later.

A step of one token changes a session by that token, one position and one revision. For a session whose state is
resident these are kept here: the position and the revision beside the state, and the tokens in a short row. The store
is written to when the row is full, and before it does anything else with the session (`WriteBuffer`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wane.service.runners.runner import Array
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.store import SessionRecord, Store
from wane.service.state.cache import StateCache

RECENT = 32
"""Tokens that a session has here at most: the store is written to once in as many steps."""

WRITTEN_AT_ONCE = 256
"""Sessions that are written in one turn of the event loop, when all are."""


class ResidentSessions:
    """The sessions of one model that are stepped in columns: those of a store in memory, each with a resident state.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self, state_cache: StateCache, store: Store, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ttl_s`: idle time after which a session ends. `clock` in seconds."""
        self._state_cache = state_cache
        self._store = store if isinstance(store, MemoryStore) else None
        self._ttl_s = ttl_s
        self._clock = clock
        # By slot, whether its session is one of these. A view: to read one item of an array takes longer.
        self.buffered = np.zeros(state_cache.capacity, np.uint8).data
        self._recent = np.zeros((state_cache.capacity, RECENT), np.uint32)
        self._counts = np.zeros(state_cache.capacity, np.int64)  # of tokens in `_recent`
        self.flushes = 0
        """How many sessions have left."""
        self.hits = 0
        """How many steps were committed, since somebody last asked and set it to 0."""
        state_cache.on_drop = self._on_drop

    def add(self, record: SessionRecord) -> None:
        """From now on the session is stepped here. It is in the store as in `record`, and so is its state in the cache:
        else this does nothing."""
        slot = self._state_cache.slot_of(record.session)
        if self._store is not None and slot is not None:
            self._store.buffer(record.session, self)
            self.buffered[slot] = True
            self._counts[slot] = 0

    def slot(self, session: str) -> int | None:
        """The session's row, which is its state's slot; None if it is not stepped here."""
        slot = self._state_cache.slot_of(session)
        return slot if slot is not None and self.buffered[slot] else None

    def alive(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Whether each of B sessions has not been idle for too long: bool (B)."""
        alive: NDArray[np.bool_] = self._state_cache.touched_s[slots] >= self._clock() - self._ttl_s
        return alive

    def commit(
        self, slots: NDArray[np.intp], sessions: Sequence[str], tokens: NDArray[np.int64], outputs: Mapping[str, Array]
    ) -> None:
        """Appends one token to each of B different sessions, and replaces their states by the next ones."""
        self.hits += len(slots)
        now_s = self._clock()
        self._state_cache.advance(slots, sessions, outputs, now_s)
        counts = self._counts[slots]
        self._recent[slots, counts] = tokens
        counts += 1
        self._counts[slots] = counts
        if counts.max() == RECENT:
            assert self._store is not None, "nothing is stepped here without such a store: this is a bug"
            for row in np.flatnonzero(counts == RECENT).tolist():
                slot = int(slots[row])
                if self.buffered[slot]:  # else the store, short of memory, has flushed it for one of those before
                    self._counts[slot] = 0
                    self._store.write(sessions[row], self._recent[slot].tolist(), 0.0)

    def flush(self, session: str) -> tuple[Sequence[int], float]:
        """See `WriteBuffer`."""
        slot = self._state_cache.slot_of(session)
        assert slot is not None, "a buffered session has a state: this is a bug"
        self.buffered[slot] = False
        self.flushes += 1
        tokens: list[int] = self._recent[slot, : self._counts[slot]].tolist()
        return tokens, self._clock() - self._state_cache.touched_s.item(slot)

    async def close(self) -> None:
        """Writes all tokens to the store, some sessions at a time."""
        for count, slot in enumerate(np.flatnonzero(self.buffered).tolist()):
            session = self._state_cache.sessions[slot]
            if self.buffered[slot] and session is not None and self._store is not None:
                self._store.flush(session)
            if count % WRITTEN_AT_ONCE == WRITTEN_AT_ONCE - 1:
                await asyncio.sleep(0)

    def _on_drop(self, session: str, slot: int) -> None:
        """The state of a session is forgotten."""
        if self.buffered[slot] and self._store is not None:
            self._store.flush(session)
