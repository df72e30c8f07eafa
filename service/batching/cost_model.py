"""The cost of runs: seconds of compute per item, by role and length. Costs are measured at warm-up and updated by every
run.

`CostModel` keeps one point for each power of two of the length: the exponential moving averages of the length and of
the seconds. Between two points the cost is interpolated linearly. Beyond the last point the cost is proportional to the
length. In a batch each item costs an equal share of the run's time, because under load one more item of the same kind
adds about that share to the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from wane.models.manifest import Manifest, Role
from wane.service.batching import batch
from wane.service.batching.batch import Work
from wane.service.runners.runner import Runner
from wane.service.state.pool import START, ZERO, StatePool
from wane.service.types.common import Result, says

RUN_EMA_ALPHA = 1 / 8
"""Weight of the latest run in the average run time of a batch (`RunTimeModel`)."""


class RunTimeModel:
    """Estimates the run time of a batch of steps or heads in seconds, by role and by the batch size rounded up to a
    power of two.

    A run on the runner's thread shares the interpreter with the event loop, so its time includes waiting for the event
    loop. A run on that thread changes the estimate only if the run was faster than the estimate.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[Role, int], float] = {}

    def expected(self, role: Role, items: int) -> float:
        """Returns the expected seconds of a batch. Returns infinity if no batch of its size has run."""
        return self._seconds.get((role, (items - 1).bit_length()), math.inf)

    def took(self, role: Role, items: int, seconds: float, *, on_loop: bool) -> None:
        """Records a run. `on_loop`: whether it ran on the event loop's thread, not on the runner's."""
        size = role, (items - 1).bit_length()
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + RUN_EMA_ALPHA * (seconds - known) if on_loop else min(known, seconds)


COST_EMA_ALPHA = 1 / 16
"""Weight of the latest run in the averages of `CostModel`. These averages follow a change of load within some
tens of runs."""

REPEATS = 3
"""The number of times that warm-up measures each run. The fastest time counts."""


class Cost(Result):
    """The compute time of an item."""

    tokens: Annotated[float, says("the mean length of the measured items, in tokens")]
    compute_ms: Annotated[float, says("the compute time of one item, in milliseconds")]


Costs = Annotated[
    dict[Role, list[Cost]],
    says(
        "the compute time per item, by graph, shortest length first; each time is measured at warm-up and "
        "averaged over later runs, with the largest weight on the latest run; mode auto chooses a window by these times"
    ),
]


@dataclass(slots=True)
class _Point:
    tokens: float
    seconds: float


def run_seconds(
    works: Sequence[Work], pool: StatePool, runner: Runner, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Runs a batch and returns the seconds that it took. Blocks. Raises the runner's errors."""
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
        """`piece_tokens`: the longest piece into which a sequence is cut if its pieces run one after another."""
        self._piece = piece_tokens
        self.parallel_cost: Callable[[int], float | None] = lambda _: None
        """Returns the expected seconds of compute for a sequence of this many tokens, if it runs in parallel chunks.
        Returns None if it runs in pieces, one after another."""
        self._points: dict[Role, dict[int, _Point]] = {}

    def observe(self, role: Role, items: int, tokens: int, seconds: float) -> None:
        """Records that a batch of `items` items took `seconds`. `tokens`: the total number of the items' positions,
        without padding."""
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
        """Returns the seconds of compute of an item of `tokens` tokens in one run."""
        points = self._sorted(role)
        if not points:
            return 0.0
        if tokens > points[-1].tokens:
            return points[-1].seconds * tokens / points[-1].tokens
        return float(np.interp(tokens, [point.tokens for point in points], [point.seconds for point in points]))

    def _sorted(self, role: Role) -> list[_Point]:
        return sorted(self._points.get(role, {}).values(), key=lambda point: point.tokens)

    def window(self, k: int) -> float:
        """Returns the seconds of compute of a window of `k` tokens."""
        return self.run("window", k)

    def full(self, tokens: int) -> float:
        """Returns the seconds of compute of a whole sequence. A short sequence is one run. A long sequence runs in
        parallel chunks, or in pieces one after another."""
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
        """Measures the step, head, window and advance graphs with one item per run. Measures window and advance for
        each number of tokens in `lengths`.

        Blocks. Raises the runner's errors. Call this after every graph has run once, because first runs are slow.
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
        """Returns the measured costs by role, shortest length first."""
        return {
            role: [Cost(point.tokens, 1e3 * point.seconds) for point in self._sorted(role)] for role in self._points
        }


def warm_up(runner: Runner, pool: StatePool, manifest: Manifest, *, max_batch_size: int) -> None:
    """Computes the state in which every sequence starts. Runs the graphs `step` and `head` with batches of 1, 2, 4, ...
    items up to the largest batch, and the other graphs with one item and with the largest batch. With a zero start,
    sequences start in the zero state, which is already in the slot START.

    The first run of a graph allocates memory and plans kernels, and no request should wait for that. A runner that pads
    batches allocates memory for each padded size. Blocks, so call it outside the event loop's thread. Raises the
    runner's errors.
    """
    eos = np.array([manifest.vocabulary.eos_id], np.int64)
    some = np.repeat(eos, manifest.window)
    if manifest.start_tokens:
        run_seconds([Work("advance", np.array(manifest.start_tokens), read=ZERO, write=START)], pool, runner)
    for work in (
        Work("step", eos, read=START),
        Work("window", some),
        Work("advance", some, read=START),
        Work("scan", some, some, read=START),
        Work("head", read=START),
    ):
        sizes = {1, max_batch_size}
        if work.length == 1:
            sizes |= {2**exponent for exponent in range(max_batch_size.bit_length())}
        for size in sorted(sizes):
            if batch.fits(work.role, work.length, work.length * size, size):
                run_seconds([work] * size, pool, runner)
