"""Caches the states of sessions in a pool of slots. Every evicted state can be rebuilt.

The cache counts as one user of the slot of each resident state. If no slot is free, the cache evicts a state whose slot
has no other user: the least recently used state of a prefix (`prefixes.py`) or, if there is none, the least recently
used resident state.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wane.models.architecture import StateTensor
from wane.service.runners.memory import HostMemory
from wane.service.runners.runner import Array, MakeMemory
from wane.service.state.pool import RESERVED, StatePool
from wane.service.state.prefixes import PrefixStates


class CachedState(NamedTuple):
    """A session's state in the pool, at `revision` and `position`. The state has not read the session's first
    `dropped_tokens` tokens."""

    slot: int
    revision: int
    dropped_tokens: int
    position: int


class StateCache(StatePool):
    """A state pool that caches sessions' states and evicts the least recently used state."""

    def __init__(
        self,
        state: Sequence[StateTensor],
        hidden: int,
        budget_bytes: int,
        on_evict: Callable[[], object] = lambda: None,
        memory: MakeMemory = HostMemory,
        *,
        norms: int = 0,
        clock: Callable[[], float] = time.monotonic,
        on_prefix: Callable[[int], object] = lambda _tokens: None,
    ) -> None:
        """See `StatePool`. `on_evict` is called for every evicted state of a session. `clock`, `on_prefix`: see
        `PrefixStates`."""
        super().__init__(state, hidden, budget_bytes, memory, norms=norms)
        self._on_evict = on_evict
        self.prefixes = PrefixStates(self, clock, on_prefix)
        self.order: OrderedDict[str, int] = OrderedDict()  # from session name to slot, least recently used first
        self.has_state: Callable[[str], bool] = self.order.__contains__
        """Returns whether a session's state is resident."""
        # Data of the resident state in each slot. The arrays' rows for unused slots take no memory, because the
        # operating system commits zeroed memory only when it is first written.
        self.sessions: list[str | None] = [None] * RESERVED  # the session in each slot that was ever used
        self._revisions = np.zeros(self.capacity, np.uint64)
        self.dropped_tokens = np.zeros(self.capacity, np.int64)
        self.positions = np.zeros(self.capacity, np.int64)
        self.touched_s = np.zeros(self.capacity, np.float64)
        self.on_drop: Callable[[str, int], object] = lambda _session, _slot: None
        """Called with a session and its slot before the session's state is dropped."""

    def _add_slot(self) -> None:
        super()._add_slot()
        self.sessions.append(None)

    def _make_room(self) -> None:
        """Evicts the least recently used state that no request uses: a prefix's or, if there is none, a session's."""
        if self.prefixes.evict():
            return
        for session, slot in self.order.items():
            if self.users[slot] == 1:
                self.drop(session)
                self._on_evict()
                return

    @contextmanager
    def spare(self) -> Iterator[int | None]:
        """Yields a slot for the state of a prefix, and releases it at the end of the block. Yields None if the slot
        would cost a session its state, or if requests already use half of all slots."""
        slot: int | None = None
        in_requests = self.used - len(self.order) - len(self.prefixes)
        if 2 * in_requests < self.capacity and (not self.is_full or self.prefixes.evict()):
            slot = self.acquire()
        try:
            yield slot
        finally:
            if slot is not None:
                self.release(slot)

    def put(self, session: str, cached: CachedState, now_s: float) -> None:
        """Makes a state the session's resident state, and retains its slot. Drops the session's earlier resident
        state."""
        slot, revision, dropped_tokens, position = cached
        self.retain(slot)
        self.drop(session)
        self.order[session] = slot
        self.sessions[slot] = session
        self._revisions[slot] = revision
        self.dropped_tokens[slot] = dropped_tokens
        self.positions[slot] = position
        self.touched_s[slot] = now_s

    def slot_of(self, session: str) -> int | None:
        """Returns the slot of the session's resident state, or None. Does not count as a use of the state."""
        return self.order.get(session)

    def advance(
        self, slots: NDArray[np.intp], sessions: Sequence[str], outputs: Mapping[str, Array], now_s: float
    ) -> None:
        """Replaces the states of B sessions by the outputs of a run over one token for each session. Increments the
        sessions' positions and revisions. Counts as a use of the states.

        `outputs`: float32 (B, ...), see `write`.
        """
        self.write(slots, outputs)
        self.positions[slots] += 1
        self._revisions[slots] += np.uint64(1)
        self.touched_s[slots] = now_s
        for session in sessions:
            self.order.move_to_end(session)

    def find(self, session: str, now_s: float) -> CachedState | None:
        """Returns the session's resident state, or None, and makes it the most recently used."""
        cached = self.peek(session)
        if cached is not None:
            self.touched_s[cached.slot] = now_s
            self.order.move_to_end(session)
        return cached

    def peek(self, session: str) -> CachedState | None:
        """Returns the session's resident state, or None. Does not count as a use of the state."""
        slot = self.order.get(session)
        if slot is None:
            return None
        return CachedState(slot, self._revisions.item(slot), self.dropped_tokens.item(slot), self.positions.item(slot))

    def drop(self, session: str) -> None:
        """Drops a session's state, if it is resident."""
        slot = self.order.get(session)
        if slot is not None:
            self.on_drop(session, slot)
            del self.order[session]
            self.sessions[slot] = None
            self.release(slot)

    def drop_idle(self, since_s: float) -> None:
        """Drops the states that were last used before `since_s`."""
        self.prefixes.drop_idle(since_s)
        while self.order:
            session, slot = next(iter(self.order.items()))
            if self.touched_s[slot] >= since_s:
                return
            self.drop(session)

    def __len__(self) -> int:
        """Returns the number of sessions' resident states."""
        return len(self.order)

    # Integrity

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raises AssertionError if the cache's indexes or the reference counts are inconsistent. For tests and
        debugging.

        `idle` says whether no request is in flight. If so, every slot in use must hold a resident state.
        """
        faults = self.miscounts() + self.prefixes.faults()
        owned = {slot: session for slot, session in enumerate(self.sessions) if session is not None}
        if len(owned) != len(self.order):
            faults.append(f"{len(owned)} slots have a session, but {len(self.order)} sessions have a slot")
        used = self.used - len(self.prefixes)
        if idle and used != len(self.order):
            faults.append(f"{used} slots are in use for {len(self.order)} sessions, but no request is in flight")
        if idle and (np.frombuffer(self.users.tobytes(), np.int32) > 1).any():
            faults.append("a slot has two users, but no request is in flight")
        if any(one > other for one, other in pairwise(self.touched_s[[*self.order.values()]])):
            faults.append("the next state to evict is not the least recently used")
        if any(self.order.get(session) != slot for slot, session in owned.items()):
            faults.append("a slot belongs to a session whose state is in another slot")
        if any(not self.users[slot] for slot in owned):
            faults.append("a slot with a state is free")
        assert not faults, "; ".join(faults)
