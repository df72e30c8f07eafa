"""Slots for states, and the cache of sessions' states in them. A slot is one row of each array of a `StateMemory`.

Slots are reference-counted: users retain and release a slot. A slot without users is free. A session's next state is
written to a new slot, which becomes the session's slot at the commit. `advance` instead overwrites the earlier states
after a run has succeeded. A failed run therefore changes nothing.

The cache counts as one user of the slot of each resident state. If no slot is free, a state is evicted whose slot has
no other user: the least recently used state of a prefix (`prefixes.py`) or, if there is none, the least recently used
resident state. Every evicted state can be rebuilt.

The reference counts are accessed only on the event loop's thread. The methods that read and write values may run on the
runner's thread, because they only access slots that are retained for the batch.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wane.models.architecture import StateTensor
from wane.service.errors import Overloaded
from wane.service.runners.runner import HIDDEN, NORMS, Array, MakeMemory, StateMemory, output_name
from wane.service.state.prefixes import ENTRY_BYTES, PrefixStates

ZERO: Final = 0  # the slot that holds the zero state
# The slot of the state in which every sequence starts: the state after <eos>, or the zero state for a zero start.
START: Final = 1
RESERVED: Final = 2
FLOAT32_BYTES: Final = 4
FEWEST_SLOTS: Final = 8


class Lease:
    """A use of a slot, which ends with the block of its `with` statement."""

    __slots__ = ("_pool", "_slot")

    def __init__(self, pool: StatePool, slot: int) -> None:
        self._pool, self._slot = pool, slot

    def __enter__(self) -> int:
        return self._slot

    def __exit__(self, *_: object) -> None:
        self._pool.release(self._slot)


class CachedState(NamedTuple):
    """A session's state in the pool, at `revision` and `position`. The state has not read the session's first
    `dropped_tokens` tokens."""

    slot: int
    revision: int
    dropped_tokens: int
    position: int


class StatePool:
    """Slots for states, within a budget in bytes, and the resident states of sessions."""

    def __init__(
        self,
        state: Sequence[StateTensor],
        hidden: int,
        budget_bytes: int,
        memory: MakeMemory = StateMemory,
        on_evict: Callable[[], object] = lambda: None,
        *,
        norms: int = 0,
        beside_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        on_prefix: Callable[[int], object] = lambda _tokens: None,
    ) -> None:
        """`hidden` is the width of the output layer's input, which is stored with every state. So are the `norms`
        columns of the output `norms`, if the graphs have it. `beside_bytes` is what else the engine keeps in memory for
        each state, and counts against the budget. `on_evict` is called for every evicted state of a session. `clock`,
        `on_prefix`: see `PrefixStates`. Raises ValueError if the budget is too small for FEWEST_SLOTS states."""
        self._shapes = shapes = {tensor.name: tensor.shape for tensor in state}
        if norms:
            shapes[NORMS] = (norms,)
        shapes[HIDDEN] = (hidden,)
        self.slot_bytes = FLOAT32_BYTES * sum(int(np.prod(shape)) for shape in shapes.values())
        each_bytes = self.slot_bytes + beside_bytes
        self.capacity = budget_bytes // each_bytes
        if self.capacity < FEWEST_SLOTS:
            raise ValueError(
                f"state_budget_bytes is {budget_bytes}, but {FEWEST_SLOTS} states of {each_bytes} bytes "
                f"need {FEWEST_SLOTS * each_bytes}"
            )
        self.memory = memory(shapes, self.capacity)
        self.users = array("i", bytes(4 * RESERVED))  # number of users of each slot that was ever used
        self.free = array("i")
        self._untouched = RESERVED  # the first slot that was never used
        self._on_evict = on_evict
        most = self.capacity * self.slot_bytes // (self.slot_bytes + ENTRY_BYTES)
        self.prefixes = PrefixStates(self.users, self.retain, self.release, most, clock, on_prefix)
        self.order: OrderedDict[str, int] = OrderedDict()  # from session name to slot, least recently used first
        self.slot_of: Callable[[str], int | None] = self.order.get
        """Returns the slot of a session's resident state, or None. Does not count as a use of the state."""
        # Data of the resident state in each slot. The arrays' rows for unused slots take no memory, because the
        # operating system commits zeroed memory only when it is first written.
        self._revisions = np.zeros(self.capacity, np.uint64)
        self.dropped_tokens = np.zeros(self.capacity, np.int64)
        self.positions = np.zeros(self.capacity, np.int64)
        self.touched_s = np.zeros(self.capacity, np.float64)
        self.on_drop: Callable[[str, int], object] = lambda _session, _slot: None
        """Called with a session and its slot before the session's state is dropped."""

    # Counting

    def acquire(self) -> int:
        """Returns a slot whose only user is the caller. Raises Overloaded if requests use every slot."""
        if self.is_full:
            self._make_room()
        if self.free:
            slot = self.free.pop()
        elif self._untouched < self.capacity:
            slot = self._untouched
            self._untouched += 1
            self.users.append(0)
        else:
            raise Overloaded(
                f"all {self.capacity} states are in use by requests: retry later, or increase state_budget_bytes"
            )
        self.users[slot] = 1
        return slot

    def _make_room(self) -> None:
        """Evicts the least recently used state that no request uses: a prefix's or, if there is none, a session's."""
        if self.prefixes.evict():
            return
        for session, slot in self.order.items():
            if self.users[slot] == 1:
                self.drop(session)
                self._on_evict()
                return

    def spare(self) -> AbstractContextManager[int | None]:
        """Returns a lease of a slot for the state of a prefix. Its slot is None if it would cost a session its state,
        or if requests already use half of all slots."""
        in_requests = self.used - len(self.order) - len(self.prefixes)
        if 2 * in_requests < self.capacity and (not self.is_full or self.prefixes.evict()):
            return self.lease()
        return nullcontext()

    def retain(self, slot: int) -> None:
        """Adds a user to a slot. The reserved slots are never freed, and their users are not counted."""
        if slot >= RESERVED:
            assert self.users[slot], "a free slot cannot be retained: this is a bug"
            self.users[slot] += 1

    def release(self, slot: int) -> None:
        self.release_all((slot,))

    def release_all(self, slots: Iterable[int]) -> None:
        """Removes a user from each of the slots. Frees a slot if it has no other user."""
        users, free = self.users, self.free
        for slot in slots:
            if slot >= RESERVED:
                left = users[slot] = users[slot] - 1
                assert left >= 0, "a slot was released once too often: this is a bug"
                if not left:
                    free.append(slot)

    def lease(self) -> Lease:
        """Returns a lease of a slot whose only user is the caller (`acquire`)."""
        return Lease(self, self.acquire())

    def hold(self, slot: int) -> Lease:
        """Returns a lease that prevents eviction of the state in `slot`."""
        self.retain(slot)
        return Lease(self, slot)

    @property
    def is_full(self) -> bool:
        return not self.free and self._untouched == self.capacity

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self._untouched - RESERVED - len(self.free)

    @property
    def used_bytes(self) -> int:
        """Memory of the slots in use, in bytes."""
        return self.slot_bytes * self.used

    # Values

    def scatter(self, slots: Sequence[int | None], outputs: Mapping[str, Array]) -> None:
        """Writes the rows of a run's outputs `next.<name>` and `hidden` to B slots. A row is skipped if its slot is
        None."""
        kept = [row for row, slot in enumerate(slots) if slot is not None]
        if kept:
            to = np.array([slot for slot in slots if slot is not None], np.intp)
            self.write(to, outputs, kept if len(kept) < len(slots) else None)

    def write(self, slots: NDArray[np.intp], outputs: Mapping[str, Array], rows: Sequence[int] | None = None) -> None:
        """See `StateMemory.write`."""
        assert slots.min() != ZERO, "the slot of the zero state is written to: this is a bug"
        self.memory.write(slots, outputs, rows)

    def copy(self, slot: int, to: int) -> None:
        """Copies the values in `slot` to the slot `to`."""
        assert to not in (ZERO, START), "a reserved slot is written to: this is a bug"
        self.memory.copy(slot, to)

    def pack(self, slot: int) -> bytes:
        return b"".join([values.tobytes() for values in self.memory.read([slot]).values()])

    def unpack(self, slot: int, packed: bytes) -> None:
        """Writes the result of `pack` to a slot."""
        assert len(packed) == self.slot_bytes, "the state has the size of another model's states: this is a bug"
        assert slot not in (ZERO, START), "a reserved slot is written to: this is a bug"
        offset, values = 0, dict[str, Array]()
        for name, shape in self._shapes.items():
            size = int(np.prod(shape))
            values[output_name(name)] = np.frombuffer(packed, np.float32, size, offset).reshape(1, *shape)
            offset += FLOAT32_BYTES * size
        self.write(np.array([slot], np.intp), values)

    # Sessions

    def put(self, session: str, cached: CachedState, now_s: float) -> None:
        """Makes a state the session's resident state, and retains its slot. Drops the session's earlier resident
        state."""
        slot, revision, dropped_tokens, position = cached
        self.retain(slot)
        self.drop(session)
        self.order[session] = slot
        self._revisions[slot] = revision
        self.dropped_tokens[slot] = dropped_tokens
        self.positions[slot] = position
        self.touched_s[slot] = now_s

    def advance(
        self, slots: NDArray[np.intp], sessions: Sequence[str], outputs: Mapping[str, Array], now_s: float
    ) -> NDArray[np.int64]:
        """Replaces the states of B sessions by the outputs of a run over one token for each session. Increments the
        sessions' positions and revisions, and returns the positions, int64 (B). Counts as a use of the states.
        `outputs`: see `write`."""
        self.write(slots, outputs)
        positions = self.positions[slots] + 1
        self.positions[slots] = positions
        self._revisions[slots] += np.uint64(1)
        self.touched_s[slots] = now_s
        for session in sessions:
            self.order.move_to_end(session)
        return positions

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
        """Drops the session's state, if it is resident."""
        slot = self.order.get(session)
        if slot is not None:
            self.on_drop(session, slot)
            del self.order[session]
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
        debugging. Each slot that was ever used must either be in use or occur exactly once in the list of free slots.

        `idle` says whether no request is in flight. If so, every slot in use must hold a resident state.
        """
        users = np.frombuffer(self.users.tobytes(), np.int32)[: self._untouched]
        free = np.frombuffer(self.free.tobytes(), np.int32)
        assert not len(free) or RESERVED <= free.min() <= free.max() < self._untouched, "a free slot does not exist"
        is_free = np.zeros(self._untouched, bool)
        is_free[free] = True
        resident, used = [*self.order.values()], self.used - len(self.prefixes)
        wrong = {
            "a slot was freed twice": np.count_nonzero(is_free) < len(free),
            "a slot was released once too often": (users < 0).any(),
            "a slot is both in use and free": (users[is_free] > 0).any(),
            "a slot is neither in use nor free": (users[RESERVED:] == 0)[~is_free[RESERVED:]].any(),
            "the number of used slots is wrong": np.count_nonzero(users) != self.used,
            "the zero state was written to": any(values.any() for values in self.memory.read([ZERO]).values()),
            "the next state to evict is not the least recently used": any(
                used_s > next_s for used_s, next_s in pairwise(self.touched_s[resident])
            ),
            "a slot has the states of two sessions": len({*resident}) < len(resident),
            "a slot with a state is free": not users[resident].all(),
            f"{used} slots are in use for {len(resident)} sessions, but no request is in flight": idle
            and used != len(resident),
            "a slot has two users, but no request is in flight": idle and (users > 1).any(),
        }
        faults = [text for text, is_wrong in wrong.items() if is_wrong] + self.prefixes.faults()
        assert not faults, "; ".join(faults)
