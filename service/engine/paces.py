"""What a token costs where so many sequences run side by side: measured at warm-up, to choose chunks by."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from models.manifest import Role
from service.engine import batch
from service.engine.batch import Work
from service.engine.slab import START, Slab
from service.runners.runner import Runner

WIDTHS = (1, 4, 8, 16, 32, 64)
"""Sequences side by side that are tried, as far as a batch holds them."""

POSITIONS = 512
"""Tokens of a run that is measured, more where many sequences have to share them."""

FEWEST_STEPS = 16

REPEATS = 3
"""Runs of each width, in turn; the quickest counts."""

Pace = Mapping[int, float]
"""Seconds a token, by the number of sequences side by side."""


def measure(
    role: Role,
    runner: Runner,
    slab: Slab,
    eos_id: int,
    max_batch: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Pace:
    """The pace of `advance` or `scan`. Blocks, and raises what the runner raises. To be called once the graph has run:
    first runs are slow."""
    found: dict[int, float] = {}
    for _ in range(REPEATS):
        for width in WIDTHS:
            if width > max_batch:
                break
            tokens = np.full(max(FEWEST_STEPS, POSITIONS // width), eos_id, np.int64)
            work = Work(role, tokens, tokens if role == "scan" else None, read=START)
            started_s = clock()
            for row in batch.run([work] * width, slab, runner):
                if isinstance(row, Exception):
                    raise row
            taken = (clock() - started_s) / (width * len(tokens))
            found[width] = min(taken, found.get(width, taken))
    return found
