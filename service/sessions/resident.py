"""Sessions whose steps are committed by arrays, a whole batch in each array operation (`service/engine/steps/`). This
module keeps the sessions' latest tokens in arrays with one row for every slot of the state cache. The tokens are
written to the store later.

A step of one token appends the token, and increments the session's position and revision. For a session with a resident
state, these changes are buffered. The position and the revision are kept in the state cache, and up to RECENT tokens in
a row of an array. The changes are written to the store when the row is full, and before any other operation of the
store on the session (`WriteBuffer`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture, CacheShares
from wane.service.runners.runner import Array
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.store import SessionRecord, Store
from wane.service.state.cache import StateCache

RECENT = 32
"""The largest number of buffered tokens of a session. A session is written to the store once in this number of steps.
"""

WRITTEN_AT_ONCE = 256
"""The number of sessions that `close` writes in one iteration of the event loop."""


class ResidentSessions:
    """The sessions of one model whose steps are computed in columns. Each session has a resident state. If the store is
    not a `MemoryStore`, no session is added.

    All methods must be called on the event loop's thread.
    """

    def __init__(
        self,
        state_cache: StateCache,
        store: Store,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        cache: CacheMixture | None = None,
    ) -> None:
        """`ttl_s`: idle time in seconds after which a session expires. `clock` returns seconds. `cache` is the model's
        cache of tokens, if the model has one. The last tokens of every session are then kept as the content of its
        cache."""
        self._state_cache = state_cache
        self._store = store if isinstance(store, MemoryStore) else None
        self._ttl_s = ttl_s
        self._clock = clock
        # For each slot, 1 if the new tokens of its session are buffered in this object. The type is memoryview, because
        # reading one item of a numpy array takes longer.
        self.buffered = np.zeros(state_cache.capacity, np.uint8).data
        self._recent = np.zeros((state_cache.capacity, RECENT), np.uint32)
        self._counts = np.zeros(state_cache.capacity, np.int64)  # number of tokens in each row of `_recent`
        self._cache = cache
        length = 0 if cache is None else cache.length
        self._rings = np.zeros((state_cache.capacity, length), np.uint8 if cache is None else cache.dtype)
        self.flushes = 0
        """Number of times that a session was flushed to the store."""
        self.hits = 0
        """Number of steps committed in columns since this number was last reset to 0."""
        state_cache.on_drop = self._on_drop

    def add(self, record: SessionRecord) -> None:
        """From now on, holds the tokens of the session's steps in a buffer instead of writing each to the store. Does
        nothing unless the session's state is in the state cache and the store is a `MemoryStore` that still has the
        session: the session may have been evicted by its own step. The cached state and the stored session must both
        have the revision of `record`."""
        slot = self._state_cache.slot_of(record.session)
        if self._store is not None and slot is not None and self._store.buffer(record.session, self):
            self.buffered[slot] = True
            self._counts[slot] = 0
            if self._cache is not None:
                tail = record.tail.ids()
                history = tail[1:] if len(tail) > record.position else tail
                self._rings[slot] = self._cache.ring(history, record.position)

    def slot(self, session: str) -> int | None:
        """Returns the session's row in the arrays, which is the slot of its state. Returns None if the session is not
        buffered here."""
        slot = self._state_cache.slot_of(session)
        return slot if slot is not None and self.buffered[slot] else None

    def alive(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Returns, for each of the B sessions in `slots`, whether it has not expired: bool (B)."""
        alive: NDArray[np.bool_] = self._state_cache.touched_s[slots] >= self._clock() - self._ttl_s
        return alive

    def commit(
        self, slots: NDArray[np.intp], sessions: Sequence[str], tokens: NDArray[np.int64], outputs: Mapping[str, Array]
    ) -> None:
        """Appends one token to each of B different sessions, and replaces the sessions' states with those in `outputs`,
        the outputs of a model run over these tokens."""
        self.hits += len(slots)
        now_s = self._clock()
        self._state_cache.advance(slots, sessions, outputs, now_s)
        counts = self._counts[slots]
        self._recent[slots, counts] = tokens
        counts += 1
        self._counts[slots] = counts
        if self._cache is not None:
            self._rings[slots, self._newest(slots)] = tokens
        if counts.max() == RECENT:
            assert self._store is not None, "a session is buffered, but the store is not in memory: this is a bug"
            for row in np.flatnonzero(counts == RECENT).tolist():
                slot = int(slots[row])
                if self.buffered[slot]:  # False if the store flushed the session to free memory
                    self._counts[slot] = 0
                    self._store.write(sessions[row], self._recent[slot].tolist(), 0.0)

    def kept(self, session: str, slot: int) -> tuple[NDArray[np.int64], int]:
        """Returns the kept tokens of a buffered session, as its record would have them: int64 (n), and the session's
        position."""
        assert self._store is not None, "a session is buffered, but the store is not in memory: this is a bug"
        position, keep = self._state_cache.positions.item(slot), self._store.session_history_tokens
        ids = np.concatenate([self._store.written(session), self._recent[slot, : self._counts[slot]]])
        return ids if position <= keep else ids[-keep:], position

    def shares_of(self, steps: Sequence[tuple[SessionRecord, Sequence[int]]]) -> CacheShares:
        """Like `shares`, for sessions that are not buffered, after the tokens that each of B steps appends to its
        record."""
        assert self._cache is not None, "the model has no cache: this is a bug"
        rings, newest = [], []
        for record, tokens in steps:
            ids, position = record.tail.ids(), record.position + len(tokens)
            history = np.concatenate([ids[1:] if len(ids) > record.position else ids, np.array(tokens, np.int64)])
            rings.append(self._cache.ring(history, position))
            newest.append((position - 1) % self._cache.length)
        return self._cache.shares(np.stack(rings), np.array(newest))

    def shares(self, slots: NDArray[np.intp]) -> CacheShares:
        """Returns the cache's part of the next-token distribution of each of B sessions."""
        assert self._cache is not None, "the model has no cache: this is a bug"
        return self._cache.shares(self._rings[slots], self._newest(slots))

    def _newest(self, slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """Returns, for each of B sessions, the index of its latest token in its row of `_rings`: int64 (B)."""
        newest: NDArray[np.int64] = (self._state_cache.positions[slots] - 1) % self._rings.shape[1]
        return newest

    def flush(self, session: str) -> tuple[Sequence[int], float]:
        """See `WriteBuffer`."""
        slot = self._state_cache.slot_of(session)
        assert slot is not None, "a buffered session has no state: this is a bug"
        self.buffered[slot] = False
        self.flushes += 1
        tokens: list[int] = self._recent[slot, : self._counts[slot]].tolist()
        return tokens, self._clock() - self._state_cache.touched_s.item(slot)

    async def close(self) -> None:
        """Writes all buffered tokens to the store, WRITTEN_AT_ONCE sessions at a time."""
        for count, slot in enumerate(np.flatnonzero(self.buffered).tolist()):
            session = self._state_cache.sessions[slot]
            if self.buffered[slot] and session is not None and self._store is not None:
                self._store.flush(session)
            if count % WRITTEN_AT_ONCE == WRITTEN_AT_ONCE - 1:
                await asyncio.sleep(0)

    def _on_drop(self, session: str, slot: int) -> None:
        """Flushes a session before its state is dropped."""
        if self.buffered[slot] and self._store is not None:
            self._store.flush(session)
