"""What is done with a model before its first request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wane.service.batching import batch
from wane.service.batching.batch import Work
from wane.service.runners.runner import Runner
from wane.service.state.pool import START, ZERO, StatePool


def warm_up(runner: Runner, pool: StatePool, eos_id: int, *, window: int, max_batch_size: int) -> None:
    """Computes the state that sequences start from, and runs every graph, alone and in the largest batch.

    First runs allocate and plan: no request should pay for that. Blocks, so it belongs off the event loop.
    Raises whatever the runner raises.
    """
    eos = np.array([eos_id], np.int64)
    some = np.repeat(eos, window)
    _run([Work("advance", eos, read=ZERO, write=START)], pool, runner)
    for work in (
        Work("step", eos, read=START),
        Work("window", some),
        Work("advance", some, read=START),
        Work("scan", some, some, read=START),
        Work("head", read=START),
    ):
        sizes = [size for size in (1, max_batch_size) if batch.fits(work.role, work.length, work.length * size, size)]
        for size in sizes:
            _run([work] * size, pool, runner)


def _run(works: Sequence[Work], pool: StatePool, runner: Runner) -> None:
    for row in batch.run(works, pool, runner):
        if isinstance(row, Exception):
            raise row
