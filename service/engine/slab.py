"""Where states live: one contiguous array for each state tensor, a row ("slot") for each state.

A slot is counted: whoever uses it retains it and releases it, and it is free at zero. A session's resident state
is one such user, and the only one that may be robbed: when no slot is free, the least recently used resident
that nobody else is using goes. A state is written to a slot of its own and takes the place of its predecessor
only once it is committed, so a run that fails has changed nothing.

Counting belongs to the event loop's thread. `gather` and `scatter` may run on the runner's: they only touch slots
that are retained for the batch in hand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.manifest import StateTensor
from service.errors import Overloaded
from service.runners.runner import NEXT, Array

ZERO: Final = 0  # the slot that holds the zero state
START: Final = 1  # the slot that holds the state after <eos>, with which every sequence starts
RESERVED: Final = 2
HIDDEN: Final = "hidden"
FLOAT32_BYTES: Final = 4
FEWEST_SLOTS: Final = 8


@dataclass(frozen=True, slots=True)
class Resident:
    """A session's state in the slab: it belongs to `revision`, knows nothing of the first `cut` tokens, and was
    last used at `touched_s`."""

    slot: int
    revision: int
    cut: int
    touched_s: float


class Slab:
    """Slots for states, within a budget in bytes; the states of sessions among them, least recently used first."""

    def __init__(
        self,
        state: Sequence[StateTensor],
        hidden: int,
        budget_bytes: int,
        on_evict: Callable[[], object] = lambda: None,
    ) -> None:
        """`hidden` is the width of the output layer's input, kept beside every state; `on_evict` is told of
        every resident state that had to go.

        Raises ValueError where the budget does not hold a handful of states.
        """
        shapes = {tensor.name: tensor.shape for tensor in state} | {HIDDEN: (hidden,)}
        self.slot_bytes = FLOAT32_BYTES * sum(int(np.prod(shape)) for shape in shapes.values())
        self.capacity = budget_bytes // self.slot_bytes
        if self.capacity < FEWEST_SLOTS:
            raise ValueError(
                f"state_budget_bytes is {budget_bytes}, but {FEWEST_SLOTS} states of {self.slot_bytes} bytes "
                f"need {FEWEST_SLOTS * self.slot_bytes}"
            )
        self._names = [tensor.name for tensor in state]
        # Zeroed memory is the system's until it is first written: an idle server does not pay for its budget.
        self._arrays: dict[str, Array] = {
            name: np.zeros((self.capacity, *shape), np.float32) for name, shape in shapes.items()
        }
        self._users: dict[int, int] = {}
        self._free: list[int] = []
        self._untouched = RESERVED  # slots from here on have never been used
        self._residents: OrderedDict[str, Resident] = OrderedDict()
        self._on_evict = on_evict

    # Slots

    @contextmanager
    def lease(self) -> Iterator[int]:
        """A slot to write a state to, until the end of the block (or longer, for whoever retains it).

        Raises Overloaded when every slot is in use by requests.
        """
        slot = self.acquire()
        try:
            yield slot
        finally:
            self.release(slot)

    def acquire(self) -> int:
        """A slot with one user. Raises Overloaded when every slot is in use by requests."""
        if not self._free and self._untouched == self.capacity:
            self._evict_one()
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._untouched
            self._untouched += 1
        self._users[slot] = 1
        return slot

    @contextmanager
    def hold(self, slot: int) -> Iterator[None]:
        """Keeps the state in `slot` from being evicted until the end of the block."""
        self.retain(slot)
        try:
            yield
        finally:
            self.release(slot)

    def retain(self, slot: int) -> None:
        """One user more. The reserved slots are never freed and need none."""
        if slot >= RESERVED:
            self._users[slot] += 1

    def release(self, slot: int) -> None:
        """One user less; the last one frees the slot."""
        if slot >= RESERVED:
            self._users[slot] -= 1
            if not self._users[slot]:
                del self._users[slot]
                self._free.append(slot)

    @property
    def used_bytes(self) -> int:
        """Memory of the slots in use."""
        return self.slot_bytes * len(self._users)

    # States of sessions

    def put(self, session: str, resident: Resident) -> None:
        """Makes a state the session's resident one, in place of any before it; retains its slot."""
        self.retain(resident.slot)
        self.drop(session)
        self._residents[session] = resident

    def find(self, session: str, now_s: float) -> Resident | None:
        """The session's resident state, which thereby becomes the most recently used."""
        resident = self._residents.get(session)
        if resident is not None:
            resident = self._residents[session] = replace(resident, touched_s=now_s)
            self._residents.move_to_end(session)
        return resident

    def peek(self, session: str) -> Resident | None:
        """The session's resident state; its place in the order stays as it is."""
        return self._residents.get(session)

    def drop(self, session: str) -> None:
        """Forgets a session's state, if there is one."""
        resident = self._residents.pop(session, None)
        if resident is not None:
            self.release(resident.slot)

    def drop_idle(self, since_s: float) -> None:
        """Forgets the states last used before `since_s`: those of sessions that have ended by themselves."""
        while self._residents:
            session, resident = next(iter(self._residents.items()))
            if resident.touched_s >= since_s:
                return
            self.drop(session)

    def __len__(self) -> int:
        """How many sessions have their state here."""
        return len(self._residents)

    def _evict_one(self) -> None:
        for session, resident in self._residents.items():
            if self._users[resident.slot] == 1:
                self.drop(session)
                self._on_evict()
                return
        raise Overloaded(f"all {self.capacity} states are in use: raise state_budget_bytes")

    # Values

    def gather(self, slots: Sequence[int]) -> dict[str, Array]:
        """The states of B slots by name, each float32 (B, *shape): copies."""
        rows = np.asarray(slots, np.intp)
        return {name: self._arrays[name][rows] for name in self._names}

    def gather_hidden(self, slots: Sequence[int]) -> NDArray[np.float32]:
        """The output layer's input at B slots: float32 (B, H), a copy."""
        hidden: NDArray[np.float32] = self._arrays[HIDDEN][np.asarray(slots, np.intp)]
        return hidden

    def scatter(self, slots: Sequence[int | None], outputs: Mapping[str, Array]) -> None:
        """Writes a run's `next.<name>` and `hidden`, row by row, to B slots; None keeps nothing of its row."""
        kept = [row for row, slot in enumerate(slots) if slot is not None]
        targets = [slot for slot in slots if slot is not None]
        assert ZERO not in targets, "the zero state is not to be written: this is a bug"
        if not kept:
            return
        all_rows = len(kept) == len(slots)
        for name in self._names:
            values = outputs[NEXT + name]
            self._arrays[name][targets] = values if all_rows else values[kept]
        hidden = outputs[HIDDEN]
        self._arrays[HIDDEN][targets] = hidden if all_rows else hidden[kept]

    def check_integrity(self) -> None:
        """Asserts what must always hold of the bookkeeping; for tests, and for whoever hunts a bug."""
        used, free = set(self._users), set(self._free)
        assert len(free) == len(self._free), "a slot was freed twice"
        assert not used & free, "a slot is both in use and free"
        assert used | free == set(range(RESERVED, self._untouched)), "a slot is lost"
        assert all(count > 0 for count in self._users.values()), "a slot has no user and is not free"
        slots = [resident.slot for resident in self._residents.values() if resident.slot >= RESERVED]
        assert len(slots) == len(set(slots)), "two sessions share a slot"
        assert set(slots) <= used, "a session's slot is free"
        assert not any(array[ZERO].any() for array in self._arrays.values()), "the zero state was written to"
