"""Divides a split into parallel streams (lanes), and assigns each process its lanes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wane.training.data import batches
from wane.training.group import Group


@dataclass(frozen=True, slots=True)
class Lanes:
    """One process's lanes (parallel streams) of a split.

    rows: the tokens of the lanes, int64 (length, lanes), time-major. mine: the slice of these lanes in the lanes of all
    processes. width: the number of lanes of all processes. chunk: the number of tokens per chunk. chunks: the number of
    chunks per lane.
    """

    rows: NDArray[np.int64]
    mine: slice
    width: int
    chunk: int
    chunks: int

    @classmethod
    def of(cls, group: Group, stream: NDArray[np.int64], width: int, chunk: int, split: str) -> Lanes:
        """Returns this process's lanes. Raises DataError if the stream is too short for one chunk in every lane."""
        rows, chunks = batches(stream, width, chunk, split)
        mine = group.share(width)
        return cls(rows[:, mine], mine, width, chunk, chunks)

    @property
    def count(self) -> int:
        """The number of this process's lanes. It is 0 if there are fewer lanes than processes."""
        return int(self.rows.shape[1])

    @property
    def share(self) -> float:
        """This process's share of all lanes, which is also its share of all tokens."""
        return self.count / self.width

    def positions(self, index: int) -> NDArray[np.int64]:
        """Returns the position in the split of each token of chunk `index`: int64 (chunk, lanes)."""
        rows = np.arange(index * self.chunk, (index + 1) * self.chunk)
        return rows[:, None] + self._length * np.arange(self.width)[self.mine]

    def every_position(self) -> NDArray[np.int64]:
        """Returns the position in the split of each token of all chunks and of all processes' lanes: int64,
        shape (chunks * chunk, width)."""
        return np.arange(self.chunks * self.chunk)[:, None] + self._length * np.arange(self.width)

    @property
    def _length(self) -> int:
        """The number of tokens of a lane."""
        return len(self.rows) - 1

    def tokens(self, index: int, device: torch.device) -> Tensor:
        """Returns the tokens of chunk `index` and the next token of each lane: int64 (chunk + 1, lanes)."""
        part = self.rows[index * self.chunk : (index + 1) * self.chunk + 1]
        return torch.from_numpy(np.array(part, order="C")).to(device)
