"""The states of sessions, in a pool of slots: a cache. Whatever is evicted can be rebuilt.

A session's resident state is one user of its slot, and the only one that may be robbed: when no slot is free, the least
recently used resident that nobody else is using goes.

What is kept here can be checked while it is in use (`faults`). A resident state is never written to: so the number of
writes to its slot and its checksum stay what they were, and where they do not the state is not to be believed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from wane.models.manifest import StateTensor
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
        self._order: OrderedDict[str, int] = OrderedDict()  # their slots, in the order of use
        # By slot, what is known of the resident in it: of those that were ever used, so it grows with them.
        self._sessions: list[str | None] = []
        self._revisions = array("Q")
        self._dropped_tokens = array("Q")
        self._positions = array("Q")
        self._touched_s = array("d")
        self._written = array("Q")  # `written` of the slot when it became resident
        self._seen_written = array("q")  # `written` and `checksum`, as they were last looked at
        self._seen_checksum = array("Q")
        for _ in range(RESERVED):
            self._add_known()

    def acquire(self) -> int:
        """A slot with one user. Raises Overloaded when every slot is in use by requests."""
        if not self._free and self._untouched == self.capacity:
            self._evict_one()
        return super().acquire()

    def _add_slot(self) -> None:
        super()._add_slot()
        self._add_known()

    def _add_known(self) -> None:
        self._sessions.append(None)
        self._revisions.append(0)
        self._dropped_tokens.append(0)
        self._positions.append(0)
        self._touched_s.append(0.0)
        self._written.append(0)
        self._seen_written.append(-1)
        self._seen_checksum.append(0)

    def _evict_one(self) -> None:
        for session, slot in self._order.items():
            if self._users[slot] == 1:
                self.drop(session)
                self._on_evict()
                return

    def put(self, session: str, cached: CachedState, now_s: float) -> None:
        """Makes a state the session's resident one, in place of any before it; retains its slot."""
        slot, revision, dropped_tokens, position = cached
        self.retain(slot)
        self.drop(session)
        self._order[session] = slot
        self._sessions[slot] = session
        self._revisions[slot] = revision
        self._dropped_tokens[slot] = dropped_tokens
        self._positions[slot] = position
        self._touched_s[slot] = now_s
        self._written[slot] = self._writes.item(slot)

    def find(self, session: str, now_s: float) -> CachedState | None:
        """The session's resident state, which thereby becomes the most recently used."""
        slot = self._order.get(session)
        if slot is None:
            return None
        self._touched_s[slot] = now_s
        self._order.move_to_end(session)
        return self._cached(slot)

    def peek(self, session: str) -> CachedState | None:
        """The session's resident state; its place in the order stays as it is."""
        slot = self._order.get(session)
        return None if slot is None else self._cached(slot)

    def _cached(self, slot: int) -> CachedState:
        return CachedState(slot, self._revisions[slot], self._dropped_tokens[slot], self._positions[slot])

    def drop(self, session: str) -> None:
        """Forgets a session's state, if there is one."""
        slot = self._order.pop(session, None)
        if slot is not None:
            self._sessions[slot] = None
            self.release(slot)

    def drop_idle(self, since_s: float) -> None:
        """Forgets the states last used before `since_s`."""
        while self._order:
            session, slot = next(iter(self._order.items()))
            if self._touched_s[slot] >= since_s:
                return
            self.drop(session)

    def __len__(self) -> int:
        """How many sessions have their state here."""
        return len(self._order)

    # Integrity

    def faults(self, slots: range | None = None, *, idle: bool = False) -> list[Fault]:
        """What is wrong with the bookkeeping, and with the states in `slots` (default: all).

        `idle`: no request is in progress, so that nothing but residents may use slots.
        """
        texts = self.miscounts()
        owners = len(self._sessions) - self._sessions.count(None)
        if owners != len(self._order):
            texts.append(f"{owners} slots are those of {len(self._order)} sessions")
        if idle and self.used != len(self._order):
            texts.append(f"{self.used} slots are in use for {len(self._order)} sessions, and by no request")
        first = [self._touched_s[slot] for slot in islice(self._order.values(), NEXT_TO_GO)]
        if any(one > other for one, other in pairwise(first)):
            texts.append("the next state to go is not the least recently used")
        found = [self._state_fault(slot) for slot in (range(RESERVED, self._untouched) if slots is None else slots)]
        return [*map(Fault, texts), *filter(None, found)]

    def _state_fault(self, slot: int) -> Fault | None:
        session = self._sessions[slot]
        if session is None:
            return None
        if self._order.get(session) != slot:
            return Fault("a slot is that of a session which has another")
        if not self._users[slot]:
            return Fault("a slot with a state is free")
        written, checksum = self.written(slot), self.checksum(slot)
        was_looked_at = self._seen_written[slot] == written
        before, self._seen_written[slot], self._seen_checksum[slot] = self._seen_checksum[slot], written, checksum
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
        self._order.clear()
        for slot, session in enumerate(self._sessions):
            self._users[slot] -= session is not None
            self._sessions[slot] = None
            if idle:
                self._users[slot] = 0
        self.recount()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Asserts that there are no faults; for tests and for debugging."""
        found = self.faults(idle=idle)
        assert not found, "; ".join(fault.text for fault in found)
