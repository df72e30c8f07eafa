"""The sessions in a stream of events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from wane.models.manifest import Start


class Sessions:
    """The sessions of a stream of events in which `<eos>` stands before each session and after the last.

    begins: int64 (sessions,), the index of the first input of each session: its `<eos>`, or its first event if the
    start is "zero". lengths: int64 (sessions,), the number of inputs of each session. The target of a session's last
    input is the next `<eos>`.
    """

    def __init__(self, stream: NDArray[np.int64], eos_id: int, start: Start) -> None:
        self.stream, self.eos_id, self.start = stream, eos_id, start
        edges = np.flatnonzero(stream == eos_id)
        self.begins = edges[:-1] + (start == "zero")
        self.lengths = edges[1:] - self.begins

    def begin_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns, for each position, the index of its session's first input: int64 of the shape of `positions`."""
        return self.begins[np.searchsorted(self.begins, positions, side="right") - 1]

    def end_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns, for each position, the index of the `<eos>` that ends its session: int64 of the shape of
        `positions`."""
        index = np.searchsorted(self.begins, positions, side="right") - 1
        return self.begins[index] + self.lengths[index]

    def last_inputs(self) -> NDArray[np.int64]:
        """Returns, for each session with a predicted event, the position after which its last event is predicted."""
        positions: NDArray[np.int64] = self.begins + self.lengths - 2
        return positions[self.lengths >= 2]

    def inputs(self) -> NDArray[np.int64]:
        """Returns the positions of all inputs, ascending: those after which a token is predicted."""
        positions = np.arange(len(self.stream) - 1)
        return positions if self.start == "token" else positions[self.stream[:-1] != self.eos_id]
