"""Cuts a long sequence into parallel chunks, based on the measured speed.

Two things are measured while the model is served: the *pace*, which is the seconds for each token as a function of the
number of parallel sequences, and how fast the model forgets its initial state. The second is used only to choose the
warm-up length. It guarantees nothing, so every run measures the difference that remains after its warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wane.models.manifest import Manifest, Role
from wane.service.batching.batch import MOST_POSITIONS, Work
from wane.service.batching.cost_model import run_seconds
from wane.service.runners.runner import KEPT, NEXT, Array, Runner
from wane.service.state.pool import START, ZERO, StatePool

LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The numbers of common tokens after which two runs are compared that start from different states."""
ROWS = 4
PAST = 512
"""Number of random tokens that only one run of each pair reads, before the common tokens. The other run starts the
common tokens from the zero state."""
MARGIN = 0.25
"""Safety factor on the limit of the difference, because a model may forget a little more slowly over other tokens than
over the measured tokens."""

Pace = Mapping[int, float]
"""Seconds for each token, by the number of parallel sequences."""
WIDTHS = (1, 4, 8, 16, 32, 64)
"""Numbers of parallel sequences for which the pace is measured, up to the largest batch."""
POSITIONS, MEASURED_STEPS = 512, 16
"""The total number of tokens of a measured run, and the smallest number of tokens of each of its sequences."""
REPEATS = 3
"""Number of measured runs for each number of parallel sequences. The pace is that of the fastest of these runs."""

SEGMENT_TOKENS = 65_536
"""Largest number of tokens of one segment of parallel chunks. A longer sequence runs one segment after another."""
FEWEST_TOKENS = 64
"""Smallest number of tokens of a chunk. A chunk also has at least twice as many tokens as its warm-up."""
RUN_SECONDS = 0.025
"""Target for the longest time of one run, in seconds, so that other requests are not delayed."""
FEWEST_STEPS = 16
"""Smallest number of tokens of each chunk in a run."""
WORTHWHILE = 0.9
"""Chunks run in parallel if their expected time is less than this fraction of the expected time of a run in order."""


class ThroughputProfile:
    """One model's paces, and the differences that remain after warm-ups. Before `measure` there are no values, and
    every sequence runs in order (from the first token to the last, without chunks)."""

    def __init__(
        self, residuals: Sequence[tuple[int, float]] = (), clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`residuals`: pairs (tokens, difference), fewest tokens first. Two runs start from different states and read
        `tokens` common tokens. The difference is the largest one between the two values of a unit of the state."""
        self._paces: dict[Role, dict[int, float]] = {}
        self._residuals = residuals
        self._clock = clock

    def pace(self, role: Role) -> Pace:
        """Returns the pace of the graph `advance` or `scan`; empty before `measure`."""
        return self._paces.get(role, {})

    def warm_up(self, residual: float) -> int | None:
        """Returns the smallest number of tokens from which the measured difference stays at most MARGIN * `residual`.
        Returns None if there is no such number."""
        fewest: int | None = None
        for tokens, left in reversed(self._residuals):
            if left > residual * MARGIN:
                break
            fewest = tokens
        return fewest

    def measure(self, runner: Runner, pool: StatePool, manifest: Manifest, max_batch_size: int) -> Iterator[None]:
        """Measures the paces and the differences. Yields after each of about fifty runs of about ten milliseconds, so
        that other runs can be interleaved. Each run blocks, and may raise the runner's errors. Every graph must have
        run once before, because its first run is slow."""
        for role in ("advance", "scan"):
            paces: dict[int, float] = {}
            for width in REPEATS * [width for width in WIDTHS if width <= max_batch_size]:
                tokens = np.full(max(MEASURED_STEPS, POSITIONS // width), manifest.vocabulary.eos_id, np.int64)
                work = Work(role, tokens, tokens if role == "scan" else None, read=START)
                taken = run_seconds([work] * width, pool, runner, self._clock) / (width * len(tokens))
                paces[width] = min(taken, paces.get(width, taken))
                yield
            self._paces[role] = paces
        random, size = np.random.default_rng(4), manifest.vocabulary.size
        zeros = pool.memory.read([ZERO] * ROWS)
        for name in KEPT:
            zeros.pop(name, None)
        past = _advance(runner, random.integers(size, size=(ROWS, PAST)), zeros)
        both = {name: np.concatenate([past[name], zeros[name]]) for name in zeros}
        residuals: list[tuple[int, float]] = []
        for before, length in zip((0, *LENGTHS), LENGTHS, strict=False):
            yield
            tokens = random.integers(size, size=(ROWS, length - before))
            both = _advance(runner, np.concatenate([tokens, tokens]), both)
            apart = max(float(np.abs(each[:ROWS] - each[ROWS:]).max()) for each in both.values())
            residuals.append((length, apart if np.isfinite(apart) else np.inf))
        self._residuals = residuals


def _advance(runner: Runner, tokens: Array, state: dict[str, Array]) -> dict[str, Array]:
    """Runs tokens (B, T) from the B rows of `state`. Returns the states at the end."""
    outputs = runner.run("advance", {"tokens": tokens, "lengths": np.full(len(tokens), tokens.shape[1]), **state})
    return {name: outputs[NEXT + name] for name in state}


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The layout of a segment: `chunks` chunks of `cells` cells with `steps` tokens each. The last chunk may be
    shorter. A cell is the part of a chunk in one run. Every chunk except the first is warmed up over the `warm_up`
    tokens before it, in runs of `warm_up_steps` tokens. `seconds` is the expected time of the whole segment."""

    chunks: int
    cells: int
    steps: int
    warm_up: int
    warm_up_steps: int
    seconds: float = field(default=0.0, compare=False)

    @property
    def length(self) -> int:
        """The number of tokens of a chunk."""
        return self.cells * self.steps


def lay_out(tokens: int, warm_up: int, role: Role, pace: Pace, warm_up_pace: Pace) -> ChunkLayout | None:
    """Returns the fastest layout of the next segment of a sequence that has `tokens` tokens left to run. None: a run in
    order is fastest.

    `role` is the graph that runs the chunks, and `pace` is the pace of that graph. `warm_up_pace` is the pace of
    `advance`.
    """
    tokens = min(tokens, SEGMENT_TOKENS)
    best = WORTHWHILE * pace.get(1, 0.0) * tokens
    fastest: ChunkLayout | None = None
    for width, seconds in pace.items():
        length = -(-tokens // width)
        if width == 1 or width not in warm_up_pace or length < max(2 * warm_up, FEWEST_TOKENS):
            continue
        taken = seconds * tokens + warm_up_pace[width] * warm_up * (width - 1)
        if taken < best:
            best = taken
            cells = -(-length // _steps(role, width, seconds))
            steps = -(-length // cells)
            chunks = -(-tokens // (cells * steps))
            fastest = ChunkLayout(chunks, cells, steps, warm_up, _steps("advance", width, warm_up_pace[width]), taken)
    return fastest


def _steps(role: Role, width: int, seconds: float) -> int:
    """Returns the number of tokens of each chunk in a run of `width` chunks."""
    most = MOST_POSITIONS[role] // width
    return max(1, min(most, max(FEWEST_STEPS, int(RUN_SECONDS / (seconds * width)))))
