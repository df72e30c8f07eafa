"""The cost of runs: seconds of compute an item, by role and length, measured at warm-up and updated by live runs.

The model keeps a point for every power of two of the length: the mean length and the mean seconds, both with
exponentially falling weights. Between points the cost is linear; beyond the last it is proportional to the length. In a
batch every item costs its share of the run: under load, another item of its kind adds that much.

`RunTimeModel` estimates the run time of a batch of one token each, by its size: quick ones need no separate thread.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from wane.models.manifest import Role
from wane.service.batching import batch
from wane.service.batching.batch import Work
from wane.service.runners.runner import Runner
from wane.service.state.pool import START, StatePool

RUN_EMA_ALPHA = 1 / 8
"""Weight of the latest run in an average."""


class RunTimeModel:
    """Seconds a run, by role and by the batch's size rounded up to a power of two.

    A run on the runner's thread shares the interpreter with the event loop, so its time includes waiting. Such a run
    counts only if it was quicker than the known time.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[Role, int], float] = {}

    def expected(self, role: Role, items: int) -> float:
        """Returns the expected seconds of a batch; infinite if no batch of its size has run."""
        return self._seconds.get((role, (items - 1).bit_length()), math.inf)

    def took(self, role: Role, items: int, seconds: float, *, here: bool) -> None:
        """Records a run. `here`: it was on the event loop's thread, not on the runner's."""
        size = role, (items - 1).bit_length()
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + RUN_EMA_ALPHA * (seconds - known) if here else min(known, seconds)


COST_EMA_ALPHA = 1 / 16
"""Weight of the latest run in an average: the average follows a change of load within some tens of runs."""

REPEATS = 3
"""Runs of each kind that warm-up measures; the quickest counts."""


class Cost(TypedDict):
    """Milliseconds that an item of about `tokens` tokens takes."""

    tokens: float
    compute_ms: float


Costs = Annotated[
    dict[Role, list[Cost]],
    Field(
        description="by graph, shortest first: compute time an item, measured at warm-up and averaged over the runs "
        "since, the latest counting most; auto chooses by it"
    ),
]


@dataclass(slots=True)
class _Point:
    tokens: float
    seconds: float


def run_seconds(works: Sequence[Work], pool: StatePool, runner: Runner, clock: Callable[[], float]) -> float:
    """Runs a batch and returns its seconds. Blocks, and raises the runner's errors."""
    started_s = clock()
    rows = batch.run(works, pool, runner)
    taken_s = clock() - started_s
    for row in rows:
        if isinstance(row, Exception):
            raise row
    return taken_s


class CostModel:
    """One model's costs. Before `measure` or the first `observe` every cost is 0."""

    def __init__(self, piece_tokens: int) -> None:
        """`piece_tokens`: the longest piece of a sequence that runs in order."""
        self._piece = piece_tokens
        self.parallel_cost: Callable[[int], float | None] = lambda _: None
        """Returns the seconds that a sequence takes in parallel chunks; None if it runs in order."""
        self._points: dict[Role, dict[int, _Point]] = {}

    def observe(self, role: Role, items: int, tokens: int, seconds: float) -> None:
        """Records that a batch of `items`, with `tokens` positions in total without padding, took `seconds`."""
        length, each = tokens / items, seconds / items
        points = self._points.setdefault(role, {})
        place = int(length).bit_length()
        point = points.get(place)
        if point is None:
            points[place] = _Point(length, each)
        else:
            point.tokens += COST_EMA_ALPHA * (length - point.tokens)
            point.seconds += COST_EMA_ALPHA * (each - point.seconds)

    def run(self, role: Role, tokens: int) -> float:
        """Returns the seconds of compute that an item of `tokens` takes in one run."""
        points = sorted(self._points.get(role, {}).values(), key=lambda point: point.tokens)
        if not points:
            return 0.0
        at = bisect_left(points, float(tokens), key=lambda point: point.tokens)
        if at == len(points):
            return points[-1].seconds * tokens / points[-1].tokens
        if at == 0:
            return points[0].seconds
        before, after = points[at - 1], points[at]
        share = (tokens - before.tokens) / (after.tokens - before.tokens)
        return before.seconds + share * (after.seconds - before.seconds)

    def window(self, k: int) -> float:
        """Returns the seconds of compute that a window of `k` tokens takes."""
        return self.run("window", k)

    def full(self, tokens: int) -> float:
        """Returns the seconds of compute of a whole sequence: in one run or, if it is long, in chunks or pieces."""
        if tokens <= self._piece:
            return self.window(tokens)
        chunks = self.parallel_cost(tokens)
        if chunks is not None:
            return chunks + self.run("head", 1)
        pieces, rest = divmod(tokens, self._piece)
        last = self.run("advance", rest) if rest else 0.0
        return pieces * self.run("advance", self._piece) + last + self.run("head", 1)

    def measure(
        self,
        runner: Runner,
        pool: StatePool,
        eos_id: int,
        lengths: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measures the graphs of predictions and steps, with one item a run, over every length.

        Blocks, and raises the runner's errors. Call it after every graph has run once: first runs are slow.
        """
        eos = np.array([eos_id], np.int64)
        works = [Work("step", eos, read=START), Work("head", read=START)]
        for length in sorted(set(lengths)):
            some = np.repeat(eos, length)
            works += [Work("window", some), Work("advance", some, read=START)]
        for work in works:
            quickest_s = min(run_seconds([work], pool, runner, clock) for _ in range(REPEATS))
            self.observe(work.role, 1, work.length, quickest_s)

    def document(self) -> Costs:
        """Returns the known costs by role, the shortest length first."""
        return {
            role: [
                {"tokens": point.tokens, "compute_ms": 1e3 * point.seconds}
                for point in sorted(points.values(), key=lambda point: point.tokens)
            ]
            for role, points in self._points.items()
        }
