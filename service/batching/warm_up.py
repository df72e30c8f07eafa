"""Warm-up of a model before its first request."""

from __future__ import annotations

import numpy as np

from wane.models.manifest import Manifest
from wane.service.batching import batch
from wane.service.batching.batch import Work
from wane.service.batching.cost_model import run_seconds
from wane.service.runners.runner import Runner
from wane.service.state.pool import START, ZERO, StatePool


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
