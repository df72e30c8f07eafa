"""Runs Wane's engine without HTTP, with the clients of `benchmarks.engine`. The engine's time per step minus the time
per step of the loop in `bare.py` is the cost of batching, sessions and answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.bench.open_loop import summary
from benchmarks.bench.results import Timed
from benchmarks.engine import CLIENTS, Subject


def prepare_engine(bundle: Path, way: str, stack: ExitStack) -> Callable[[float], Timed]:
    """Returns a function that runs concurrent clients for a given number of seconds. Each client sends session steps.
    way: the component that receives the steps, `batcher` or `engine`. The exit of `stack` stops the engine's threads.
    """
    runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
    subject = Subject(bundle)
    runner.run(subject.start())
    stack.callback(lambda: runner.run(subject.close()))
    ask = subject.ask(way, "step")

    async def drive(seconds: float) -> Timed:
        taken: list[float] = []
        begun = time.perf_counter()
        end = begun + seconds

        async def client(number: int) -> None:
            last = time.perf_counter()
            while last < end:
                await ask(number)
                now = time.perf_counter()
                taken.append(now - last)
                last = now

        await asyncio.gather(*map(client, range(CLIENTS)))
        return summary(taken, time.perf_counter() - begun)

    return lambda seconds: runner.run(drive(seconds))
