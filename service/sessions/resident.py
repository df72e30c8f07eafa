"""Sessions whose steps are committed by arrays, a whole batch in each array operation (`service/engine/steps/`).

A step of one token appends the token, and increments the session's position and revision. If the store allows it
(`Store.buffer`), a session with a resident state has these in arrays with one row for each slot of the state cache: the
position and the revision in the state cache, and the latest tokens in a ring buffer here. They are the session's only
history until the store takes them back, before its state is dropped or another operation reads the session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture, CacheShares
from wane.service.runners.runner import Array
from wane.service.sessions.stores.store import Commit, SessionRecord, Store, TokenHistory
from wane.service.state.pool import StatePool

WRITTEN_AT_ONCE = 256
"""The number of sessions that `close` writes in one iteration of the event loop."""


class ResidentSessions:
    """The sessions of one model whose steps are committed by arrays. Each session has a resident state.

    All methods must be called on the event loop's thread.
    """

    def __init__(
        self,
        state_cache: StatePool,
        store: Store,
        ttl_s: float,
        empty: TokenHistory,
        clock: Callable[[], float] = time.monotonic,
        cache: CacheMixture | None = None,
    ) -> None:
        """`ttl_s`: idle time in seconds after which a session expires. `empty`: the history of a sequence without
        tokens. `clock` returns seconds. `cache` is the model's cache of tokens, if the model has one."""
        self._state_cache = state_cache
        self._store = store
        self._ttl_s = ttl_s
        self._empty = empty
        self._clock = clock
        # For each slot, 1 if the tokens of its session are buffered in this object. The type is memoryview, because
        # reading one item of a numpy array takes longer.
        self.buffered = np.zeros(state_cache.capacity, np.uint8).data
        self.cache = cache
        self._keep = store.session_history_tokens
        # Token i of a session (from 0, without <eos>) is at index i % keep of its row. The rows' memory is committed
        # when it is first written. There are as many rows as the store has memory for, because millions of small states
        # may fit into the cache. A session in a later slot is not buffered.
        dtype = np.dtype(f"u{empty.width}") if cache is None else cache.dtype
        rows = store.most_buffered_bytes // (self._keep * dtype.itemsize)
        self._rings = np.zeros((min(state_cache.capacity, rows), self._keep), dtype)
        self.has_room = bool(rows)
        """Whether any session can be added."""
        # For each slot, the number of the first tokens of its session that were not known when it was added.
        self._unknown = np.zeros(state_cache.capacity, np.int64)
        self.flushes = 0
        """Number of times that a session was flushed to the store."""
        self.hits = 0
        """Number of steps committed in columns since this number was last reset to 0."""
        state_cache.on_drop = self._on_drop
        self._flush = self.flush  # the store keeps this for each session, so all sessions share one object

    def add(self, record: SessionRecord) -> None:
        """From now on, holds the tokens of the session. Does nothing unless the session's state is in the state cache,
        in a slot with a row, and the store leaves the tokens to this object. The cached state and the stored session
        must both have the revision of `record`."""
        session, position = record.session, record.position
        slot, row_bytes = self._state_cache.slot_of(session), self._rings.strides[0]
        if slot is None or slot >= len(self._rings) or not self._store.buffer(session, self._flush, row_bytes):
            return
        self.buffered[slot] = True
        ids = record.tail.ids()
        known = (ids[1:] if len(ids) > position else ids)[-self._keep :]
        ring = self._rings[slot]
        if self.cache is not None:
            ring.fill(self.cache.empty)
        ring[np.arange(position - len(known), position) % self._keep] = known
        self._unknown[slot] = position - len(known)

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
    ) -> NDArray[np.int64]:
        """Appends one token to each of B different sessions, and replaces the sessions' states with those in `outputs`,
        the outputs of a model run over these tokens. Returns the sessions' positions, int64 (B)."""
        self.hits += len(slots)
        positions = self._state_cache.advance(slots, sessions, outputs, self._clock())
        self._rings[slots, (positions - 1) % self._keep] = tokens
        return positions

    def seen(self, slot: int) -> NDArray[np.integer[Any]]:
        """Returns the kept tokens of a buffered session in any order, without `<eos>`: (n). A later commit of the
        session does not change them."""
        position, unknown, keep = self._state_cache.positions.item(slot), self._unknown.item(slot), self._keep
        ring: NDArray[np.integer[Any]] = self._rings[slot]
        if position - unknown >= keep:  # a full ring
            return ring.copy()
        ids: NDArray[np.integer[Any]] = ring[unknown:position]
        if position > keep:
            ids = ring[np.arange(unknown, position) % keep]
        return ids

    def tail(self, slot: int) -> tuple[TokenHistory, int]:
        """Returns the history of a buffered session, and the session's position."""
        position, keep, width = self._state_cache.positions.item(slot), self._keep, self._empty.width
        first = max(self._unknown.item(slot), position - keep)
        ids = self._rings[slot, np.arange(first, position) % keep]
        data = ids.astype(f"<u{width}", copy=False).tobytes()
        return TokenHistory(data if first else self._empty.data + data, width), position

    def shares_of(self, commits: Sequence[Commit]) -> CacheShares:
        """Like `shares`, for sessions that are not buffered, after B steps that are to be committed."""
        assert self.cache is not None, "the model has no cache: this is a bug"
        rings, newest = [], []
        for commit in commits:
            ids, position = commit.record.tail.ids(), commit.position
            kept = ids[1:] if len(ids) > commit.record.position else ids
            history = np.concatenate([kept, np.array(commit.tokens, np.int64)])
            rings.append(self.cache.ring(history, position))
            newest.append((position - 1) % self.cache.length)
        return self.cache.shares(np.stack(rings), np.array(newest))

    def shares(self, slots: NDArray[np.intp]) -> CacheShares:
        """Returns the cache's part of the next-token distribution of each of B sessions."""
        assert self.cache is not None, "the model has no cache: this is a bug"
        positions, length = self._state_cache.positions[slots], self.cache.length
        if length == self._keep:
            return self.cache.shares(self._rings[slots], (positions - 1) % length)
        latest = (positions[:, None] + np.arange(-length, 0)) % self._keep
        return self.cache.shares(self._rings[slots[:, None], latest], np.full(len(slots), length - 1))

    def flush(self, session: str) -> tuple[TokenHistory, int, float]:
        """See `Flush` in `stores/store.py`."""
        slot = self._state_cache.slot_of(session)
        assert slot is not None, "a buffered session has no state: this is a bug"
        self.buffered[slot] = False
        self.flushes += 1
        return *self.tail(slot), self._clock() - self._state_cache.touched_s.item(slot)

    async def close(self) -> None:
        """Writes all buffered sessions to the store, WRITTEN_AT_ONCE sessions at a time."""
        for count, session in enumerate([*self._state_cache.order]):
            if self.slot(session) is not None:
                self._store.get_cached(session)
            if count % WRITTEN_AT_ONCE == WRITTEN_AT_ONCE - 1:
                await asyncio.sleep(0)

    def _on_drop(self, session: str, slot: int) -> None:
        """Writes a session to the store before its state is dropped."""
        if self.buffered[slot]:
            self._store.get_cached(session)
