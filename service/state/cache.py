"""The states of sessions, in a pool of slots: a cache. Whatever is evicted can be rebuilt.

A session's resident state is one user of its slot, and the only one that may be robbed: when no slot is free, the least
recently used resident that nobody else is using goes.

What is kept here can be checked while it is in use (`faults`). A resident state is never written to: so the number of
writes to its slot and its checksum stay what they were, and where they do not the state is not to be believed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import StateTensor
from wane.service.runners.runner import Array
from wane.service.state.pool import RESERVED, StatePool

NEXT_TO_GO = 64  # residents at the front of the order whose order is checked at a time


class CachedState(NamedTuple):
    """A session's state in the pool: it belongs to `revision`, is that at `position`, and knows nothing of the first
    `dropped_tokens` tokens."""

    slot: int
    revision: int
    dropped_tokens: int
    position: int


class Fault(NamedTuple):
    """Something that must never be; `session` is whose state it spoils, if it is the state of one only."""

    text: str
    session: str | None = None


class StateCache(StatePool):
    """A state pool with the states of sessions in it, least recently used first."""

    def __init__(
        self,
        state: Sequence[StateTensor],
        hidden: int,
        budget_bytes: int,
        on_evict: Callable[[], object] = lambda: None,
    ) -> None:
        """As of `StatePool`; `on_evict` is told of every resident state that had to go."""
        super().__init__(state, hidden, budget_bytes)
        self._on_evict = on_evict
        self.order: OrderedDict[str, int] = OrderedDict()  # their slots, in the order of use
        self.has_state: Callable[[str], bool] = self.order.__contains__
        """Whether a session's state is here."""
        # By slot, what is known of the resident in it. Zeroed memory is the system's until it is first written.
        self.sessions: list[str | None] = [None] * RESERVED  # of the slots that were ever used: it grows with them
        self._revisions = np.zeros(self.capacity, np.uint64)
        self.dropped_tokens = np.zeros(self.capacity, np.int64)
        self.positions = np.zeros(self.capacity, np.int64)
        self.touched_s = np.zeros(self.capacity, np.float64)
        self._written = np.zeros(self.capacity, np.uint32)  # `written` of the slot when it became resident
        # `written` and `checksum`, as last looked at; 0 is never, because a slot with a state was written to.
        self._seen_written = np.zeros(self.capacity, np.uint32)
        self._seen_checksum = np.zeros(self.capacity, np.uint32)
        self.on_drop: Callable[[str, int], object] = lambda _session, _slot: None
        """Told of a session and its slot before its state is forgotten."""

    def acquire(self) -> int:
        """A slot with one user. Raises Overloaded when every slot is in use by requests."""
        if not self.free and self._untouched == self.capacity:
            self._evict_one()
        return super().acquire()

    def _add_slot(self) -> None:
        super()._add_slot()
        self.sessions.append(None)

    def _evict_one(self) -> None:
        for session, slot in self.order.items():
            if self.users[slot] == 1:
                self.drop(session)
                self._on_evict()
                return

    def put(self, session: str, cached: CachedState, now_s: float) -> None:
        """Makes a state the session's resident one, in place of any before it; retains its slot."""
        slot, revision, dropped_tokens, position = cached
        self.retain(slot)
        self.drop(session)
        self.order[session] = slot
        self.sessions[slot] = session
        self._revisions[slot] = revision
        self.dropped_tokens[slot] = dropped_tokens
        self.positions[slot] = position
        self.touched_s[slot] = now_s
        self._written[slot] = self._writes[slot]

    def slot_of(self, session: str) -> int | None:
        """The slot of the session's resident state; its place in the order stays as it is."""
        return self.order.get(session)

    def advance(
        self, slots: NDArray[np.intp], sessions: Sequence[str], outputs: Mapping[str, Array], now_s: float
    ) -> None:
        """Replaces the states of B sessions by those of a run, each one token and one revision further, used now.

        `outputs`: float32 (B, ...), as of `write`.
        """
        self.write(slots, outputs)
        self.positions[slots] += 1
        self._revisions[slots] += np.uint64(1)
        self.touched_s[slots] = now_s
        self._written[slots] = self._writes[slots]
        for session in sessions:
            self.order.move_to_end(session)

    def find(self, session: str, now_s: float) -> CachedState | None:
        """The session's resident state, which thereby becomes the most recently used."""
        slot = self.order.get(session)
        if slot is None:
            return None
        self.touched_s[slot] = now_s
        self.order.move_to_end(session)
        return self._cached(slot)

    def peek(self, session: str) -> CachedState | None:
        """The session's resident state; its place in the order stays as it is."""
        slot = self.order.get(session)
        return None if slot is None else self._cached(slot)

    def _cached(self, slot: int) -> CachedState:
        return CachedState(slot, self._revisions.item(slot), self.dropped_tokens.item(slot), self.positions.item(slot))

    def drop(self, session: str) -> None:
        """Forgets a session's state, if there is one."""
        slot = self.order.get(session)
        if slot is not None:
            self.on_drop(session, slot)
            del self.order[session]
            self.sessions[slot] = None
            self.release(slot)

    def drop_idle(self, since_s: float) -> None:
        """Forgets the states last used before `since_s`."""
        while self.order:
            session, slot = next(iter(self.order.items()))
            if self.touched_s[slot] >= since_s:
                return
            self.drop(session)

    def __len__(self) -> int:
        """How many sessions have their state here."""
        return len(self.order)

    # Integrity

    def faults(self, slots: range | None = None, *, idle: bool = False) -> list[Fault]:
        """What is wrong with the bookkeeping, and with the states in `slots` (default: all).

        `idle`: no request is in progress, so that nothing but residents may use slots.
        """
        texts = self.miscounts()
        owners = len(self.sessions) - self.sessions.count(None)
        if owners != len(self.order):
            texts.append(f"{owners} slots are those of {len(self.order)} sessions")
        if idle and self.used != len(self.order):
            texts.append(f"{self.used} slots are in use for {len(self.order)} sessions, and by no request")
        if idle and (np.frombuffer(self.users.tobytes(), np.int32) > 1).any():
            texts.append("a slot has two users, and no request is in progress")
        first = [self.touched_s[slot] for slot in islice(self.order.values(), NEXT_TO_GO)]
        if any(one > other for one, other in pairwise(first)):
            texts.append("the next state to go is not the least recently used")
        found = [self._state_fault(slot) for slot in (range(RESERVED, self._untouched) if slots is None else slots)]
        return [*map(Fault, texts), *filter(None, found)]

    def _state_fault(self, slot: int) -> Fault | None:
        session = self.sessions[slot]
        if session is None:
            return None
        if self.order.get(session) != slot:
            return Fault("a slot is that of a session which has another")
        if not self.users[slot]:
            return Fault("a slot with a state is free")
        written, checksum = self.written(slot), self.checksum(slot)
        was_looked_at, before = self._seen_written[slot] == written, self._seen_checksum[slot]
        self._seen_written[slot], self._seen_checksum[slot] = written, checksum
        if written != self._written[slot]:
            return Fault("a resident state was written to", session)
        if was_looked_at and checksum != before:
            return Fault("a resident state has changed by itself", session)
        return None

    def mend(self, faults: Sequence[Fault], *, idle: bool = False) -> None:
        """Forgets the states that are not to be believed: those at fault, or all where the bookkeeping is."""
        for fault in faults:
            if fault.session is not None:
                self.drop(fault.session)
        if all(fault.session is not None for fault in faults):
            return
        for session, slot in self.order.items():
            self.on_drop(session, slot)
        self.order.clear()
        for slot, owner in enumerate(self.sessions):
            self.users[slot] -= owner is not None
            self.sessions[slot] = None
            if idle:
                self.users[slot] = 0
        self.recount()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Asserts that there are no faults; for tests and for debugging."""
        found = self.faults(idle=idle)
        assert not found, "; ".join(fault.text for fault in found)
