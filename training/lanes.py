"""Divides a split into the batches of training and validation, and assigns each process its lanes (parallel streams).

A text is one stream: `TextLanes` cuts it into as many lanes as the batch has. Each lane keeps its state from one chunk
(the tokens of one step) to the next. Events are many sequences: `SessionLanes` gives each lane a whole session, from
the zero state, as a server reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wane.training.errors import DataError
from wane.training.group import Group
from wane.training.sessions import Sessions

if TYPE_CHECKING:
    from wane.training.data import Corpus

POOL = 64
"""The number of batches in a pool. The sessions of a pool are sorted by length, because a batch of similar lengths
needs little padding. Each epoch divides the sessions into pools at random."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One process's lanes of one step of T tokens.

    inputs, targets: int64 (T, lanes). A target is the token after its input. positions: int64 (T, lanes), the index of
    each input in the split's stream. real: bool (T, lanes), false for padding, or None if nothing is padding. fresh:
    whether the lanes start from the zero state instead of the state after the batch before. tokens: the number of real
    inputs of all processes. share: this process's share of the real inputs of all processes.
    """

    inputs: Tensor
    targets: Tensor
    positions: NDArray[np.int64]
    real: Tensor | None
    fresh: bool
    tokens: int
    share: float

    def chosen(self, values: Tensor) -> Tensor:
        """Returns the values, of shape (T, lanes, ...), at the inputs that are not padding. If there is padding, the
        result has one dimension in place of T and lanes."""
        return values if self.real is None else values[self.real]

    def chosen_positions(self) -> NDArray[np.int64]:
        """Returns the positions of the real inputs. If there is padding, the result has one dimension."""
        return self.positions if self.real is None else self.positions[self.real.numpy(force=True)]


class Lanes(Protocol):
    """One process's lanes of a split.

    `mine`: the slice that selects this process's lanes from the lanes of all processes. `count`: the number of this
    process's lanes, which can be 0 if there are fewer lanes than processes. `steps`: the number of batches in the first
    epoch. Every epoch reads the same sequences.
    """

    mine: slice
    steps: int

    @property
    def count(self) -> int: ...

    def batch(self, step: int, device: torch.device) -> Batch:
        """Returns the batch of a step, counted from 0."""


def lanes_of(
    group: Group, corpus: Corpus, split: str, width: int, chunk: int, shuffle_seed: int | None = None
) -> Lanes:
    """Returns this process's lanes of a split. `width`: the number of lanes of all processes. `chunk`: the largest
    number of tokens of a lane in a step. `shuffle_seed`: the seed of the order of sessions, None for a fixed order.
    Raises DataError if a text is too short for one chunk in every lane."""
    stream = corpus.streams[split]
    if corpus.vocabulary.kind != "events":
        return TextLanes(group, stream, width, chunk, split)
    return SessionLanes(group, Sessions(stream, corpus.vocabulary.eos_id, corpus.start), width, chunk, shuffle_seed)


def batches(stream: NDArray[np.int64], batch: int, chunk: int, split: str) -> tuple[NDArray[np.int64], int]:
    """Splits a stream into `batch` parallel streams. Returns an array with one column per parallel stream and one row
    per time step, and the number of chunks per epoch.

    The inputs of chunk i are the rows from `i * chunk` up to, but not including, `(i + 1) * chunk`. The targets of
    chunk i are the rows one step later. Tokens that do not fill a chunk are dropped. Raises DataError if the stream is
    too short for one chunk.
    """
    length = (len(stream) - 1) // batch
    chunks = length // chunk
    if chunks < 1:
        raise DataError(
            f"the {split} split has {len(stream)} tokens, too few for one step: "
            f"batch {batch} x chunk {chunk} needs {batch * chunk + 1}"
        )
    rows = np.lib.stride_tricks.as_strided(
        stream, (length + 1, batch), (stream.strides[0], length * stream.strides[0]), writeable=False
    )
    return rows, chunks


class TextLanes:
    """One process's lanes of a text. See `Lanes` and `Batch`."""

    def __init__(self, group: Group, stream: NDArray[np.int64], width: int, chunk: int, split: str) -> None:
        rows, self.steps = batches(stream, width, chunk, split)
        self.mine, self._width, self._chunk = group.share(width), width, chunk
        self._rows = rows[:, self.mine]

    @property
    def count(self) -> int:
        return int(self._rows.shape[1])

    def batch(self, step: int, device: torch.device) -> Batch:
        index = step % self.steps
        part = self._rows[index * self._chunk : (index + 1) * self._chunk + 1]
        tokens = torch.from_numpy(np.array(part, order="C")).to(device)
        rows = np.arange(index * self._chunk, (index + 1) * self._chunk)
        positions = rows[:, None] + (len(self._rows) - 1) * np.arange(self._width)[self.mine]
        share = self.count / self._width
        return Batch(tokens[:-1], tokens[1:], positions, None, index == 0, self._chunk * self._width, share)


class SessionLanes:
    """One process's lanes of the sessions of a split. See `Lanes` and `Batch`.

    `width` sessions of similar lengths form a group, whose sessions are in the same batches. A batch has at most
    `chunk` tokens of each session. Sessions longer than a chunk continue in the next batch. Every epoch has every
    session once. With a `shuffle_seed`, each epoch has another order.
    """

    def __init__(self, group: Group, sessions: Sessions, width: int, chunk: int, shuffle_seed: int | None) -> None:
        self._sessions, self._width, self._chunk, self._seed = sessions, width, chunk, shuffle_seed
        self.mine = group.share(width)
        self._epoch = self._first = 0
        self._plan(0)
        self.steps = int(self._ends[-1])

    @property
    def count(self) -> int:
        return len(range(self._width)[self.mine])

    def batch(self, step: int, device: torch.device) -> Batch:
        self._seek(step)
        within = step - self._first
        index = int(np.searchsorted(self._ends, within, side="right"))
        piece = within - (int(self._ends[index - 1]) if index else 0)
        chosen = self._groups[index]
        lengths = np.zeros(self._width, np.int64)
        lengths[: len(chosen)] = self._sessions.lengths[chosen] - piece * self._chunk
        begins = np.zeros(self._width, np.int64)
        begins[: len(chosen)] = self._sessions.begins[chosen] + piece * self._chunk
        lengths = lengths.clip(0, self._chunk)
        rows = np.arange(lengths.max())[:, None]
        real = rows < lengths
        positions = np.where(real, begins + rows, 0)[:, self.mine]
        stream = self._sessions.stream
        mine = real[:, self.mine]
        return Batch(
            torch.from_numpy(stream[positions]).to(device),
            torch.from_numpy(stream[positions + 1]).to(device),
            positions,
            torch.from_numpy(mine).to(device),
            piece == 0,
            int(real.sum()),
            float(mine.sum() / real.sum()),
        )

    def _seek(self, step: int) -> None:
        """Makes the plan of the epoch that contains `step`."""
        if step < self._first:
            self._first = self._epoch = 0
            self._plan(0)
        while step - self._first >= self._ends[-1]:
            self._first += int(self._ends[-1])
            self._epoch += 1
            self._plan(self._epoch)

    def _plan(self, epoch: int) -> None:
        """Divides the sessions into groups of `width` sessions. The last group may be smaller. `_ends`: for each group,
        the number of the epoch's batches up to the end of this group."""
        lengths, width = self._sessions.lengths, self._width
        if self._seed is None:
            order = np.argsort(lengths, kind="stable")
        else:
            random = np.random.default_rng([self._seed, epoch])
            order = random.permutation(len(lengths))
            pools = np.arange(len(order)) // (width * POOL)
            order = order[np.lexsort((lengths[order], pools))]
        groups = [order[first : first + width] for first in range(0, len(order), width)]
        if self._seed is not None:
            groups = [groups[index] for index in random.permutation(len(groups))]
        self._groups = groups
        self._ends = np.cumsum([-(-int(lengths[group].max()) // self._chunk) for group in groups])
