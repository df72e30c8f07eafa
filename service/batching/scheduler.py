"""The queue of one runner, and the policy that chooses the next batch.

There are two queues. The first holds steps and heads (runs of the output layer alone). A whole batch of them takes
about a millisecond. The second holds sequences: windows, and states to rebuild. A single sequence takes about a
millisecond, and when another replica dies a thousand sequences arrive together. Neither queue may delay the other
queue:

- A batch of sequences is limited to an expected run time of SLICE_S. The limit is 1.5 times as long if no step has
  arrived since the last batch of sequences. Larger batches gain little throughput: their intermediate values exceed the
  CPU caches, and while one batch holds most of the requests, the event loop is idle.
- While both queues have work, each gets half of the runner's time. The time that one queue used alone does not count
  against it.

A step then waits at most for one batch of sequences and for the steps before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from wane.models.manifest import Role
from wane.service.batching import batch
from wane.service.batching.batch import Work
from wane.service.batching.cost_model import CostModel

SLICE_S = 0.005
"""The longest expected run time, in seconds, of a batch of several sequences."""

ALONE_S = 1.5 * SLICE_S
"""Replaces SLICE_S as the longest expected run time if no step has arrived since the last batch of sequences."""

SLICED: frozenset[Role] = frozenset({"window", "advance"})
"""Roles whose batches are limited by run time, except batches of chunks. Scans are not limited, because a long scan is
cut into short runs before it is queued."""

ONE_TOKEN: frozenset[Role] = frozenset({"step", "head"})
"""Roles of the first queue. Their items all take the same time."""

COLUMNS = Work("step")
"""Stands in the first queue for all steps in columns, which form a separate batch."""


class Queued(Protocol):
    @property
    def work(self) -> Work: ...


I = TypeVar("I", bound=Queued)  # noqa: E741  (an item)


class FairScheduler(Generic[I]):
    """The policy that the module's docstring describes. A batch consists of the oldest item of a queue and later items
    of the same role."""

    def __init__(self, max_batch_size: int, cost_model: CostModel | None = None) -> None:
        """`cost_model`: estimates the run time of sequences. If it is None, batches have no time limit."""
        self._max_batch = max_batch_size
        self._cost_model = cost_model
        self._steps: deque[I] = deque()
        self._sequences: deque[I] = deque()
        self._stepped = False  # whether a step has arrived since the latest batch of sequences
        self._contended = False
        self._ahead_s = 0.0  # the first queue's run time minus the second queue's, while both had work

    def __len__(self) -> int:
        return len(self._steps) + len(self._sequences)

    def before(self, role: Role) -> int:
        """Returns the number of items in this role's queue."""
        return len(self._steps if role in ONE_TOKEN else self._sequences)

    def put(self, item: I) -> None:
        if item.work.role in ONE_TOKEN:
            self._stepped = True
            self._steps.append(item)
        else:
            self._sequences.append(item)

    def take(self, runs: Callable[[I], bool]) -> list[I]:
        """Removes and returns the next batch, whose items have the same role. Returns an empty list if nothing is
        queued. Also removes items for which `runs` returns False."""
        self._contended = bool(self._steps) and bool(self._sequences)
        if self._steps and (not self._sequences or self._ahead_s <= 0):
            return self._take(self._steps, runs) or self._take(self._sequences, runs)
        return self._take(self._sequences, runs) or self._take(self._steps, runs)

    def ran(self, role: Role, seconds: float) -> None:
        """Records the run time of the last batch taken."""
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

    def _take(self, line: deque[I], runs: Callable[[I], bool]) -> list[I]:
        if line and line[0].work is COLUMNS:
            return [line.popleft()]
        taken, left = list[I](), list[I]()
        longest = total = 0
        most = 1
        while line and len(taken) < most:
            item = line.popleft()
            if item.work is COLUMNS:
                (left if taken else taken).append(item)
                continue
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
        self._stepped = self._stepped and not (taken and line is self._sequences)
        return taken

    def _most(self, longest: Work) -> int:
        """Returns the largest size of a batch whose longest item is `longest`."""
        if self._cost_model is None or longest.chunk or longest.role not in SLICED:
            return self._max_batch
        each_s = self._cost_model.run(longest.role, longest.length)
        slice_s = SLICE_S if self._stepped else ALONE_S
        return self._max_batch if self._max_batch * each_s <= slice_s else max(1, int(slice_s / each_s))
