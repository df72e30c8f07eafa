"""The memory of a model's states: one array for each state tensor, with a row ("slot") for each state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wane.service.runners.runner import KEPT, NEXT, Array, Feeds, Shapes, Slots, StateMemory


def output_name(name: str) -> str:
    """Returns the name of the output of a run that is written to the array `name`."""
    return name if name in KEPT else NEXT + name


class HostMemory(StateMemory):
    """States in numpy arrays. A run copies the states to buffers and back."""

    def __init__(self, shapes: Shapes, capacity: int) -> None:
        # The operating system commits zeroed memory only when it is first written. A server with few states therefore
        # uses only a small part of its memory budget.
        self.arrays: dict[str, Array] = {
            name: np.zeros((capacity, *shape), np.float32) for name, shape in shapes.items()
        }
        self._names = [name for name in shapes if name not in KEPT]
        self._outputs = {output_name(name): name for name in shapes}

    def room(self, rows: int) -> Mapping[str, Array]:
        return {name: np.empty((rows, *self.arrays[name].shape[1:]), np.float32) for name in self._names}

    def gather(self, slots: Slots, room: Mapping[str, Array] | None = None) -> Feeds:
        """See `StateMemory`. Copying into `room` is faster, because allocating memory takes longer than copying."""
        rows = np.asarray(slots, np.intp)
        if room is None:
            return {name: self.arrays[name].take(rows, 0) for name in self._names}
        states = {name: room[name][: len(rows)] for name in self._names}
        for name, values in states.items():
            # `take` with `out` makes an additional copy in all modes except "clip" and "wrap".
            self.arrays[name].take(rows, 0, values, "clip")
        return states

    def gather_hidden(self, slots: Slots) -> Feeds:
        rows = np.asarray(slots, np.intp)
        return {name: self.arrays[name].take(rows, 0) for name in KEPT if name in self.arrays}

    def read(self, slots: Slots) -> dict[str, Array]:
        rows = np.asarray(slots, np.intp)
        return {name: values.take(rows, 0) for name, values in self.arrays.items()}

    def write(self, slots: NDArray[np.intp], outputs: Mapping[str, Array], rows: Sequence[int] | None = None) -> None:
        for output, name in self._outputs.items():
            self.arrays[name][slots] = outputs[output] if rows is None else outputs[output][rows]

    def copy(self, slot: int, to: int) -> None:
        for values in self.arrays.values():
            values[to] = values[slot]

    def close(self) -> None:
        self.arrays.clear()
