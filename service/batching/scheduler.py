"""The queue of one runner, and the policy that chooses the next batch.

There are two lines. One has steps and heads: a whole batch of them takes about a millisecond. The other has sequences,
each of which takes as long: windows, and states to rebuild, a thousand at once when another replica dies. Neither line
may delay the other:

- A batch of sequences is cut if it is expected to take longer than a slice. The slice is half as long again if no step
  has arrived since the last batch of sequences. Larger batches gain little: their intermediate values outgrow the
  caches, and while one batch has most of the requests, the server has nothing to read or to answer.
- While both lines have work, each gets half of the runner's time; a line that was empty starts without debt.

A step then waits for one slice at most, and for the steps before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from wane.models.manifest import Role
from wane.service.batching import batch
from wane.service.batching.batch import Work
from wane.service.batching.cost_model import CostModel

SLICE_S = 0.005
"""The most seconds that a batch of several sequences should take."""

ALONE_S = 1.5 * SLICE_S
"""Like SLICE_S, if no step has arrived since the last batch of sequences."""

SLICED: frozenset[Role] = frozenset({"window", "advance"})
"""Roles whose batches are cut, except those of chunks. Scoring cuts scans itself."""

ONE_TOKEN: frozenset[Role] = frozenset({"step", "head"})
"""Roles of the first line, whose items all take the same time."""

COLUMNS = Work("step")
"""Represents all steps in columns in the first line: a batch of its own."""


class Queued(Protocol):
    """An item of the queue."""

    @property
    def work(self) -> Work: ...


I = TypeVar("I", bound=Queued)  # noqa: E741  (an item)


class Scheduler(Protocol[I]):
    """The queue of a batcher."""

    def __len__(self) -> int:
        """Returns the number of queued items."""

    def before(self, role: Role) -> int:
        """Returns the number of items in this role's line."""

    def put(self, item: I) -> None:
        """Adds an item."""

    def take(self, runs: Callable[[I], bool]) -> list[I]:
        """Takes the next batch, of one role; empty if nothing is queued. Removes the items that `runs` rejects."""

    @property
    def full(self) -> bool:
        """Whether the next batch cannot grow by waiting."""

    def put_back(self, items: Sequence[I]) -> None:
        """Puts a batch of sequences that did not run back at the front of its line."""

    def ran(self, role: Role, seconds: float) -> None:
        """Records the run time of the batch that was taken last."""

    def clear(self) -> list[I]:
        """Removes and returns all items."""


class FairScheduler(Scheduler[I]):
    """The policy of the module's docstring. A batch has the oldest item of a line, and later items of its role."""

    def __init__(self, max_batch_size: int, cost_model: CostModel | None = None) -> None:
        """`cost_model` estimates sequences; without it no batch is cut."""
        self._max_batch = max_batch_size
        self._cost_model = cost_model
        self._steps: deque[I] = deque()
        self._sequences: deque[I] = deque()
        self._latest_most = max_batch_size  # size limit of the latest batch of sequences
        self._stepped = False  # whether a step has arrived since the latest batch of sequences
        self._contended = False
        self._ahead_s = 0.0  # seconds that steps have run longer than sequences while both lines had work

    def __len__(self) -> int:
        return len(self._steps) + len(self._sequences)

    def before(self, role: Role) -> int:
        return len(self._steps if role in ONE_TOKEN else self._sequences)

    def put(self, item: I) -> None:
        if item.work.role in ONE_TOKEN:
            self._stepped = True
            self._steps.append(item)
        else:
            self._sequences.append(item)

    def take(self, runs: Callable[[I], bool]) -> list[I]:
        self._contended = bool(self._steps) and bool(self._sequences)
        if self._steps and (not self._sequences or self._ahead_s <= 0):
            return self._take_steps(runs) or self._take_sequences(runs)
        return self._take_sequences(runs) or self._take_steps(runs)

    @property
    def full(self) -> bool:
        return len(self._sequences) >= self._latest_most and not self._steps

    def put_back(self, items: Sequence[I]) -> None:
        self._sequences.extendleft(reversed(items))

    def ran(self, role: Role, seconds: float) -> None:
        if not self._contended:
            self._ahead_s = 0.0
        elif role in ONE_TOKEN:
            self._ahead_s += seconds
        else:
            self._ahead_s -= seconds

    def clear(self) -> list[I]:
        items = [*self._steps, *self._sequences]
        self._steps.clear()
        self._sequences.clear()
        return items

    def _take_steps(self, runs: Callable[[I], bool]) -> list[I]:
        line, taken, left = self._steps, list[I](), list[I]()
        while line and len(taken) < self._max_batch:
            item = line.popleft()
            if not runs(item):
                continue
            if taken and (item.work.role != taken[0].work.role or item.work is COLUMNS):
                left.append(item)
                continue
            taken.append(item)
            if item.work is COLUMNS:
                break
        line.extendleft(reversed(left))
        return taken

    def _take_sequences(self, runs: Callable[[I], bool]) -> list[I]:
        line, taken, left = self._sequences, list[I](), list[I]()
        longest = total = 0
        most = 1
        while line and len(taken) < most:
            item = line.popleft()
            if not runs(item):
                continue
            work, items, length = item.work, len(taken) + 1, item.work.length
            first = taken[0].work if taken else work
            same = (work.role, work.chunk) == (first.role, first.chunk)
            if not same or (taken and not batch.fits(work.role, max(longest, length), total + length, items)):
                left.append(item)
                continue
            if length > longest:
                fewer = self._most(work)
                if fewer < items:
                    left.append(item)
                    continue
                longest, most = length, fewer
            taken.append(item)
            total += length
        line.extendleft(reversed(left))
        self._latest_most = most
        self._stepped = self._stepped and not taken
        return taken

    def _most(self, longest: Work) -> int:
        """Returns the most items of a batch whose longest item is `longest`."""
        if self._cost_model is None or longest.chunk or longest.role not in SLICED:
            return self._max_batch
        each_s = self._cost_model.run(longest.role, longest.length)
        slice_s = SLICE_S if self._stepped else ALONE_S
        return self._max_batch if self._max_batch * each_s <= slice_s else max(1, int(slice_s / each_s))
