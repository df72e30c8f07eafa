"""The memory of a model's states: one array for each state tensor, with a row ("slot") for each state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wane.service.runners.runner import KEPT, NEXT, Array, Feeds, Shapes, Slots, StateMemory


def output_name(name: str) -> str:
    """Returns the name of the output of a run that is written to the array `name`."""
    return name if name in KEPT else NEXT + name


def _differences(values: Array, other: Array) -> Array:
    """Returns the difference of each unit: see `StateMemory.differences`."""
    with np.errstate(invalid="ignore", over="ignore"):
        differences: Array = np.abs(values - other)
    if not np.isfinite(differences).all():
        same = (values == other) | (np.isnan(values) & np.isnan(other))
        differences = np.where(same, np.float32(0), np.where(np.isnan(differences), np.float32(np.inf), differences))
    return differences


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

    def copy(self, slots: Slots, source: StateMemory, rows: Slots) -> None:
        assert isinstance(source, HostMemory)
        to, row = np.asarray(slots, np.intp), np.asarray(rows, np.intp)
        for name, values in self.arrays.items():
            values[to] = source.arrays[name][row]

    def scratch(self, capacity: int) -> HostMemory:
        return HostMemory({name: values.shape[1:] for name, values in self.arrays.items()}, capacity)

    def differences(self, slots: Slots, others: Slots) -> NDArray[np.float32]:
        largest = [
            differences.reshape(len(slots), -1).max(axis=1) for _, differences in self._differences(slots, others)
        ]
        pairs: NDArray[np.float32] = np.max(largest, axis=0)
        return pairs

    def unit_differences(self, slots: Slots, others: Slots) -> dict[str, Array]:
        return {name: differences.max(axis=0) for name, differences in self._differences(slots, others)}

    def _differences(self, slots: Slots, others: Slots) -> Iterator[tuple[str, Array]]:
        """Yields the name of each state tensor, and the difference of each unit in each of n pairs: float32 (n,
        *shape)."""
        rows, other = np.asarray(slots, np.intp), np.asarray(others, np.intp)
        for name in self._names:
            yield name, _differences(self.arrays[name][rows], self.arrays[name][other])

    def close(self) -> None:
        self.arrays.clear()
