"""A split as parallel streams, and which of them are a process's own."""

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
    """Some of the `width` parallel streams that a split is laid out as: those of `mine`, in `chunks` chunks.

    rows: int64 (length, lanes), time-major; chunk: tokens a chunk.
    """

    rows: NDArray[np.int64]
    mine: slice
    width: int
    chunk: int
    chunks: int

    @classmethod
    def of(cls, group: Group, stream: NDArray[np.int64], width: int, chunk: int, split: str) -> Lanes:
        """This process's. Raises DataError where the stream is too short for a chunk of every lane."""
        rows, chunks = batches(stream, width, chunk, split)
        mine = group.share(width)
        return cls(rows[:, mine], mine, width, chunk, chunks)

    @property
    def count(self) -> int:
        """Lanes of this process: none, where there are fewer than processes."""
        return int(self.rows.shape[1])

    @property
    def share(self) -> float:
        """Of all lanes, and so of all tokens."""
        return self.count / self.width

    def tokens(self, index: int, device: torch.device) -> Tensor:
        """Chunk `index` and the token after it: int64 (chunk + 1, lanes)."""
        part = self.rows[index * self.chunk : (index + 1) * self.chunk + 1]
        return torch.from_numpy(np.array(part, order="C")).to(device)
