"""A stretch of a sequence whose chunks were run side by side: its cells, and the states between them.

A cell is what one run takes of a chunk. A joint is where a cell started from another state than the cell before it
ended in. Every chunk begins with one, the first excepted. Where a cell is run again from the end of the one before it,
its joint moves on to its own end, and shrinks on the way if the model forgets. Without joints the sequence was run as
if in order, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from models.manifest import Role
from service.engine.batch import Row, Work
from service.engine.chunks import Layout
from service.runners.runner import Array

States = Mapping[str, Array]
"""By the state tensor's name, one state a row: float32 (n, *shape)."""


class Segment:
    """tokens, targets: int64 (n), n at most the layout's; targets for scan only. Cells are counted along the sequence:
    cell g is part g % cells of chunk g // cells."""

    def __init__(
        self, role: Role, layout: Layout, tokens: NDArray[np.int64], targets: NDArray[np.int64] | None, like: States
    ) -> None:
        """`like`: any states, for names and shapes."""
        self.layout = layout
        self.role = role
        self.tokens = tokens
        self.targets = targets
        self.cells = -(-len(tokens) // layout.steps)
        self.logprobs = np.empty(len(tokens) if role == "scan" else 0)
        self._starts = {name: np.zeros((self.cells, *value.shape[1:]), np.float32) for name, value in like.items()}
        self._ends = {name: np.zeros_like(value) for name, value in self._starts.items()}

    def column(self, part: int) -> range:
        """The cells that are part `part` of a chunk, chunk by chunk; the last chunks may be too short to have one."""
        return range(part, self.cells, self.layout.cells)

    def work(self, cell: int, read: int, write: int, *, binding: bool) -> Work:
        """The run of a cell, from the state in a slot."""
        at = self._extent(cell)
        targets = None if self.targets is None else self.targets[at]
        return Work(self.role, self.tokens[at], targets, read=read, write=write, binding=binding, chunk=True)

    def length(self, cell: int) -> int:
        """Tokens of a cell."""
        at = self._extent(cell)
        return len(self.tokens[at])

    def started(self, cells: range, states: States) -> None:
        """Keeps what cells start from."""
        for name, value in self._starts.items():
            value[cells.start : cells.stop : cells.step] = states[name]

    def ended(self, cells: range, states: States, rows: list[Row]) -> None:
        """Keeps what cells ended in, and the log-probabilities on the way."""
        for name, value in self._ends.items():
            value[cells.start : cells.stop : cells.step] = states[name]
        for cell, row in zip(cells, rows, strict=True):
            if row.logprobs is not None:
                at = self._extent(cell)
                self.logprobs[at] = row.logprobs[: at.stop - at.start]

    def end(self, cell: int) -> States:
        """What a cell ended in, as one row."""
        return {name: value[cell : cell + 1] for name, value in self._ends.items()}

    def residual(self, cell: int) -> float:
        """The greatest difference of a unit at the joint before a cell that is not the first; 0 where there is none."""
        return max(float(_apart(value[cell], self._ends[name][cell - 1]).max()) for name, value in self._starts.items())

    def residuals(self) -> NDArray[np.float64]:
        """`residual` of every cell; the first has none: (cells)."""
        found = np.zeros(self.cells)
        for name, value in self._starts.items():
            apart = _apart(value[1:], self._ends[name][:-1])
            found[1:] = np.maximum(found[1:], apart.reshape(self.cells - 1, -1).max(axis=1))
        return found

    def joints(self) -> dict[str, Array]:
        """By name, the greatest difference of each unit at any joint: (*shape)."""
        return {
            name: _apart(value[1:], self._ends[name][:-1]).max(axis=0, initial=0.0)
            for name, value in self._starts.items()
        }

    def _extent(self, cell: int) -> slice:
        return slice(cell * self.layout.steps, min((cell + 1) * self.layout.steps, len(self.tokens)))


def _apart(one: Array, other: Array) -> Array:
    """|one - other|, unit by unit: 0 where they are the same, and infinite where that cannot be said in numbers."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart: Array = np.abs(one - other)
    if not np.isfinite(apart).all():
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        apart = np.where(same, np.float32(0), np.where(np.isnan(apart), np.float32(np.inf), apart))
    return apart
