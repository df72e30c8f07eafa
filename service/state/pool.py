"""Allocates memory for states: one contiguous array for each state tensor, with a row ("slot") for each state.

Slots are reference-counted: users retain and release a slot. A slot without users is free. A new state is written to a
new slot, and replaces the earlier state when it is committed. A failed run therefore changes nothing.

Slots are counted on the event loop's thread. `gather` and `scatter` may run on the runner's thread, because these two
only access slots that are retained for the batch.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import StateTensor
from wane.service.errors import Overloaded
from wane.service.runners.runner import NEXT, Array

ZERO: Final = 0  # the slot that holds the zero state
# The slot of the state in which every sequence starts: the state after <eos>, or the zero state for a zero start.
START: Final = 1
RESERVED: Final = 2
HIDDEN: Final = "hidden"
FLOAT32_BYTES: Final = 4
FEWEST_SLOTS: Final = 8


class StatePool:
    """Slots for states, within a budget in bytes."""

    def __init__(self, state: Sequence[StateTensor], hidden: int, budget_bytes: int) -> None:
        """`hidden` is the width of the output layer's input, which is stored with every state.

        Raises ValueError if the budget is too small for FEWEST_SLOTS states.
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
        # The operating system commits zeroed memory only when it is first written. An idle server therefore does not
        # use its budget.
        self.arrays: dict[str, Array] = {
            name: np.zeros((self.capacity, *shape), np.float32) for name, shape in shapes.items()
        }
        self._writes = np.zeros(self.capacity, np.uint32)  # number of writes to each slot
        self.users = array("i", bytes(4 * RESERVED))  # number of users of each slot that was ever used
        self.free = array("i")
        self._untouched = RESERVED  # the first slot that was never used

    # Counting

    def acquire(self) -> int:
        """Returns a slot with one user. Raises Overloaded if every slot is in use."""
        if self.free:
            slot = self.free.pop()
        elif self._untouched < self.capacity:
            slot = self._untouched
            self._untouched += 1
            self._add_slot()
        else:
            raise Overloaded(
                f"all {self.capacity} states are in use by requests: retry later, or increase state_budget_bytes"
            )
        self.users[slot] = 1
        return slot

    def _add_slot(self) -> None:
        """Extends the lists of slots for a slot that is used for the first time."""
        self.users.append(0)

    def retain(self, slot: int) -> None:
        """Adds a user to a slot. The reserved slots are never freed, and their users are not counted."""
        if slot >= RESERVED:
            assert self.users[slot], "a free slot cannot be retained: this is a bug"
            self.users[slot] += 1

    def release(self, slot: int) -> None:
        """Removes a user from a slot. Frees the slot if it has no other user."""
        if slot >= RESERVED:
            users = self.users[slot] = self.users[slot] - 1
            assert users >= 0, "a slot was released once too often: this is a bug"
            if not users:
                self.free.append(slot)

    def release_all(self, slots: Iterable[int]) -> None:
        """Releases each of the slots: see `release`."""
        users, free = self.users, self.free
        for slot in slots:
            if slot >= RESERVED:
                left = users[slot] = users[slot] - 1
                assert left >= 0, "a slot was released once too often: this is a bug"
                if not left:
                    free.append(slot)

    @contextmanager
    def lease(self) -> Iterator[int]:
        """Yields a slot for a new state, and releases it at the end of the block.

        Raises Overloaded if requests use every slot.
        """
        slot = self.acquire()
        try:
            yield slot
        finally:
            self.release(slot)

    @contextmanager
    def hold(self, slot: int) -> Iterator[None]:
        """Prevents eviction of the state in `slot` until the end of the block."""
        self.retain(slot)
        try:
            yield
        finally:
            self.release(slot)

    @property
    def untouched(self) -> int:
        """The first slot that was never used."""
        return self._untouched

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self._untouched - RESERVED - len(self.free)

    @property
    def used_bytes(self) -> int:
        """Memory of the slots in use, in bytes."""
        return self.slot_bytes * self.used

    # Values

    def room(self, rows: int) -> dict[str, Array]:
        """Returns buffers for the states of `rows` slots, for `gather`."""
        return {name: np.empty((rows, *self.arrays[name].shape[1:]), np.float32) for name in self._names}

    def gather(
        self, slots: Sequence[int] | NDArray[np.intp], room: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Returns copies of the states in B slots: for each tensor's name, float32 (B, *shape).

        If `room` is given, the copies are written to these buffers, and are valid until the next use of the buffers.
        This is faster, because allocating memory takes longer than copying the states.
        """
        rows = np.asarray(slots, np.intp)
        if room is None:
            return {name: self.arrays[name].take(rows, 0) for name in self._names}
        states = {name: room[name][: len(rows)] for name in self._names}
        for name, values in states.items():
            # `take` with `out` makes an additional copy in all modes except "clip" and "wrap".
            self.arrays[name].take(rows, 0, values, "clip")
        return states

    def gather_hidden(self, slots: Sequence[int]) -> NDArray[np.float32]:
        """Returns a copy of the output layer's input in B slots: float32 (B, H)."""
        hidden: NDArray[np.float32] = self.arrays[HIDDEN][np.asarray(slots, np.intp)]
        return hidden

    def scatter(self, slots: Sequence[int | None], outputs: Mapping[str, Array]) -> None:
        """Writes the rows of a run's outputs `next.<name>` and `hidden` to B slots. A row is skipped if its slot is
        None."""
        kept = [row for row, slot in enumerate(slots) if slot is not None]
        if not kept:
            return
        if len(kept) < len(slots):
            outputs = {name: outputs[name][kept] for name in (HIDDEN, *(NEXT + name for name in self._names))}
        self.write(np.array([slot for slot in slots if slot is not None], np.intp), outputs)

    def write(self, slots: NDArray[np.intp], outputs: Mapping[str, Array]) -> None:
        """Like `scatter`, without skipped rows."""
        assert slots.min() != ZERO, "the slot of the zero state is written to: this is a bug"
        for name in self._names:
            self.arrays[name][slots] = outputs[NEXT + name]
        self.arrays[HIDDEN][slots] = outputs[HIDDEN]
        self._writes[slots] += 1

    def pack(self, slot: int) -> bytes:
        """Returns a slot's values as bytes."""
        return b"".join([values[slot].tobytes() for values in self.arrays.values()])

    def unpack(self, slot: int, packed: bytes) -> None:
        """Writes the result of `pack` to a slot. Raises ValueError if the result does not have the size of this model's
        states."""
        if len(packed) != self.slot_bytes:
            raise ValueError(f"the state has {len(packed)} bytes, but this model's states have {self.slot_bytes}")
        assert slot not in (ZERO, START), "a reserved slot is written to: this is a bug"
        offset = 0
        for values in self.arrays.values():
            row = values[slot]
            row.reshape(-1)[:] = np.frombuffer(packed, np.float32, row.size, offset)
            offset += row.nbytes
        self._writes[slot] += 1

    def written(self, slot: int) -> int:
        """Returns the number of writes to a slot, modulo 2^32."""
        return int(self._writes[slot])

    def checksum(self, slot: int) -> int:
        """Returns the CRC-32 of a slot's values."""
        value = 0
        for values in self.arrays.values():
            value = zlib.crc32(values[slot], value)
        return value

    def close(self) -> None:
        """Frees the memory. The pool must not be used afterwards."""
        self.arrays.clear()

    # Integrity

    def miscounts(self) -> list[str]:
        """Returns the faults of the reference counts. Each slot that was ever used must either be in use or occur
        exactly once in the list of free slots."""
        users = np.frombuffer(self.users.tobytes(), np.int32)[: self._untouched]
        free = np.frombuffer(self.free.tobytes(), np.int32)
        if len(free) and not RESERVED <= free.min() <= free.max() < self._untouched:
            return ["a free slot does not exist"]
        is_free = np.zeros(self._untouched, bool)
        is_free[free] = True
        wrong = {
            "a slot was freed twice": np.count_nonzero(is_free) < len(free),
            "a slot was released once too often": (users < 0).any(),
            "a slot is both in use and free": (users[is_free] > 0).any(),
            "a slot is neither in use nor free": (users[RESERVED:] == 0)[~is_free[RESERVED:]].any(),
            "the number of used slots is wrong": np.count_nonzero(users) != self.used,
            "the zero state was written to": any(values[ZERO].any() for values in self.arrays.values()),
        }
        return [text for text, is_wrong in wrong.items() if is_wrong]

    def recount(self) -> None:
        """Rebuilds the list of free slots from the reference counts, and resets the zero state."""
        for slot in range(RESERVED, self._untouched):
            self.users[slot] = max(self.users[slot], 0)
        self.free = array("i", [slot for slot in range(RESERVED, self._untouched) if not self.users[slot]])
        for values in self.arrays.values():
            values[ZERO] = 0
