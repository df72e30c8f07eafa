"""Measures what live accuracy (`WANE_LIVE_ACCURACY`) adds to the processor time of a step in the engine, without HTTP.

    python -m benchmarks.events.live_accuracy [BUNDLE] [--k K] [--rounds N]

Two engines serve the bundle in one process, one with live accuracy. They take turns: each submits the steps of all
clients in one iteration of the event loop, and the other one follows when they are answered. So whatever else runs on
the machine slows both alike. Every step asks for K tokens. A step over HTTP takes at least twice as long, so the share
of a served step is smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from itertools import cycle
from pathlib import Path

import uvloop
from rich.progress import track

from benchmarks.engine import BATCH, SHIPPED, Subject
from benchmarks.summary import Spread, ratios
from wane.service.types.request import StepRequest

TURNS = {1: 1200, BATCH: 100}
"""For each number of clients, the turns of each engine in a round."""


async def turn(subject: Subject, tokens: list[cycle[int]], top_k: int) -> float:
    """Submits one step of each client. Returns the processor time that a step took, in microseconds."""
    started_s = time.process_time()
    steps = [StepRequest(f"client-{at}", (next(own),), top_k=top_k) for at, own in enumerate(tokens)]
    await asyncio.gather(*map(subject.engine.submit, steps))
    return 1e6 * (time.process_time() - started_s) / len(tokens)


async def measure(bundle: Path, k: int, rounds: int) -> None:
    """Prints the processor time of a step with and without live accuracy, and the ratio."""
    subjects = Subject(bundle), Subject(bundle, live_accuracy=k)
    for subject in subjects:
        await subject.start()
    for clients, turns in TURNS.items():
        means: tuple[list[float], list[float]] = [], []
        for _ in track(range(rounds), f"{clients} at once"):
            took_us = [0.0, 0.0]
            tokens = [[cycle(row) for row in one.tokens[:clients].tolist()] for one in subjects]
            for number in range(turns):
                for which in (0, 1) if number % 2 else (1, 0):
                    took_us[which] += await turn(subjects[which], tokens[which], k)
            for mean, took in zip(means, took_us, strict=True):
                mean.append(took / turns)
        off, on = map(Spread.of, means)
        print(f"{clients} at once: {off:.1f} us a step without, {on:.1f} with; ratio {ratios(means[1], means[0]):.3f}")
    for subject in subjects:
        await subject.close()


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.events.live_accuracy", description=__doc__)
    parser.add_argument("bundle", nargs="?", type=Path, default=SHIPPED)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    uvloop.run(measure(options.bundle, options.k, options.rounds))


if __name__ == "__main__":
    main()
