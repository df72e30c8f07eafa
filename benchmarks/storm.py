"""Measures the latency of the steps of sessions with resident states, while the states of a thousand other sessions
(parked sessions) are rebuilt, as after the loss of a replica.

    python -m benchmarks.storm [--bundle BUNDLE] [--rounds N] [--within S] [--json FILE] [--plot FILE]

One engine runs without HTTP. The sessions with resident states are stepped at a steady rate, in an open loop. A step's
latency is measured from its due time. After half a second, the storm begins: every parked session takes one step. These
steps are spread evenly over S seconds (`--within`). Parked sessions have no states, so the engine rebuilds their states
from their tails (their last tokens). Every round measures each of three cases once:

- undisturbed: no parked session returns.
- fair: the engine's own queue (`service/batching/scheduler.py`).
- first come: one queue. The next batch is the oldest item and the later items of the same role that fit into the batch.

The figures are the latencies of the steps that are due between the storm's start and end. In the case `undisturbed`,
they are the latencies of the steps that are due in an interval of UNDISTURBED_S seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.summary import Spread, provenance, write_json
from wane.models.bundle import Bundle
from wane.models.manifest import Role
from wane.service.batching import batch
from wane.service.batching.scheduler import COLUMNS, FairScheduler
from wane.service.batching.ticket import WorkItem
from wane.service.engine.engine import Engine
from wane.service.engine.top1_proof import MarginProof
from wane.service.observability.metrics import Metrics
from wane.service.runners.onnx import OnnxRunner
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.store import Commit
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.common import StateSource
from wane.service.types.request import StepRequest

matplotlib.use("Agg")

from matplotlib import pyplot as plt

SHIPPED = Path("models/bundles/gated-stable")
PARKED = 1000
RESIDENT = 200
RATE = 500.0
"""Steps per second of all sessions with resident states together."""

LEAD_S = 0.5
"""Seconds of steady load before the storm."""

UNDISTURBED_S = 2.0
SLICE_S = 0.025
"""Duration of a slice in the plot, in seconds."""

TAIL = 256
WAYS = ("undisturbed", "fair", "first come")


class FirstCome(FairScheduler[WorkItem]):
    """A scheduler with one queue. A batch is the oldest item and the later items of the same role that fit into the
    batch. All steps of a request in the columns format are one item, which forms a batch alone."""

    def __init__(self, max_batch_size: int) -> None:
        super().__init__(max_batch_size)
        self._line: deque[WorkItem] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def before(self, _: Role) -> int:
        return len(self._line)

    def put(self, item: WorkItem) -> None:
        self._line.append(item)

    def take(self, runs: Callable[[WorkItem], bool]) -> list[WorkItem]:
        taken, left, longest, total = list[WorkItem](), list[WorkItem](), 0, 0
        while self._line and len(taken) < self._max_batch:
            item = self._line.popleft()
            if not runs(item):
                continue
            role, length = item.work.role, item.work.length
            first = taken[0].work.role if taken else role
            if item.work is COLUMNS and not taken:
                taken.append(item)
                break
            if (
                item.work is COLUMNS
                or role != first
                or not batch.fits(role, max(longest, length), total + length, len(taken) + 1)
            ):
                left.append(item)
                continue
            taken.append(item)
            longest, total = max(longest, length), total + length
        self._line.extendleft(reversed(left))
        return taken

    def ran(self, role: Role, seconds: float) -> None:
        pass

    def clear(self) -> list[WorkItem]:
        items = list(self._line)
        self._line.clear()
        return items


@dataclass(frozen=True)
class Round:
    """One round of one case.

    due_s: each step's due time, in seconds after the storm's start. taken_ms: each step's latency. storm_s: the time
    from the storm's start until the last parked session was answered; None if no parked session returned.
    """

    due_s: list[float]
    taken_ms: list[float]
    storm_s: float | None


class Subject:
    """One engine, its store, and a source of new sessions."""

    def __init__(self, path: Path) -> None:
        self.bundle = bundle = Bundle.read(path)
        self.settings = settings = Settings(max_queue=16 * PARKED)
        self.store = MemoryStore(
            max(TAIL, bundle.manifest.max_window), settings.session_ttl_s, settings.session_budget_bytes
        )
        runner = OnnxRunner(bundle, "cpu", threads=1)
        self.engine = Engine(
            bundle.manifest, bundle.vocabulary, MarginProof(bundle.weights()), runner, self.store, settings, Metrics()
        )
        self.engine.warm_up()
        self.random = np.random.default_rng(0)
        self.opened = 0

    async def sessions(self, count: int) -> list[str]:
        """Creates sessions with full tails and without states. Returns their ids."""
        size = self.bundle.manifest.vocabulary.size
        names = []
        for _ in range(count):
            self.opened += 1
            name = f"session-{self.opened}"
            await self.engine.create_session(name)
            record = await self.store.get(name)
            assert record is not None, "the session that was just created is not in the store: this is a bug"
            tokens = self.random.integers(2, size, size=TAIL).tolist()
            await self.store.append_many([Commit(record, tokens)])
            names.append(name)
        return names

    async def round(self, way: str, within_s: float) -> Round:
        """Runs one round of one case. Creates the round's sessions and deletes them at the end."""
        batcher = self.engine.batcher
        most = self.settings.max_batch_size
        batcher._queue = FirstCome(most) if way == "first come" else FairScheduler(most, self.engine._cost_model)
        resident, parked = await self.sessions(RESIDENT), await self.sessions(PARKED)
        for session in resident:
            await self.engine.submit(StepRequest(session, (5,)))
        due_s: list[float] = []
        taken_ms: list[float] = []
        stop = asyncio.Event()
        begun_s = time.perf_counter() + LEAD_S

        async def step(session: str, due: float) -> None:
            answer = await self.engine.submit(StepRequest(session, (5,)))
            assert answer.state is StateSource.RESIDENT
            due_s.append(due - begun_s)
            taken_ms.append(1e3 * (time.perf_counter() - due))

        async def steady() -> None:
            steps, due = list[asyncio.Task[None]](), time.perf_counter()
            while not stop.is_set():
                session = resident[len(steps) % RESIDENT]
                steps.append(asyncio.create_task(step(session, due)))
                due += 1 / RATE
                await asyncio.sleep(max(due - time.perf_counter(), 0))
            await asyncio.gather(*steps)

        async def come_back(index: int, session: str) -> Answer:
            await asyncio.sleep(max(begun_s + within_s * index / PARKED - time.perf_counter(), 0))
            return await self.engine.submit(StepRequest(session, (5,)))

        load = asyncio.create_task(steady())
        await asyncio.sleep(begun_s - time.perf_counter())
        storm_s = None
        if way == "undisturbed":
            await asyncio.sleep(UNDISTURBED_S)
        else:
            answers = await asyncio.gather(*(come_back(*one) for one in enumerate(parked)))
            assert all(answer.state is StateSource.REBUILT for answer in answers)
            storm_s = time.perf_counter() - begun_s
        stop.set()
        await load
        for session in (*resident, *parked):
            await self.engine.delete_session(session)
        return Round(due_s, taken_ms, storm_s)


async def measure(path: Path, rounds: int, within_s: float) -> dict[str, Any]:
    """Measures all cases in every round. The first round is a warm-up, whose figures are dropped."""
    subject = Subject(path)
    found: dict[str, list[Round]] = {way: [] for way in WAYS}
    for index in range(rounds + 1):
        for way in WAYS:
            one = await subject.round(way, within_s)
            if index:
                found[way].append(one)
    await subject.engine.close()
    manifest = subject.bundle.manifest
    return {
        **provenance("benchmarks.storm", "onnxruntime", "numpy", bundles=["gated-stable"]),
        "model": manifest.name,
        "model_version": manifest.version,
        "parked": PARKED,
        "resident": RESIDENT,
        "steps_per_s": RATE,
        "within_s": within_s,
        "tail": TAIL,
        "window": manifest.window,
        "max_batch_size": subject.settings.max_batch_size,
        "ways": {way: summary(of_way) for way, of_way in found.items()},
    }


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Returns the latency percentiles of the steps that were due between the storm's start and its end, and the
    timeline of the last round."""
    found: dict[str, list[float]] = {"p50_ms": [], "p99_ms": [], "max_ms": []}
    steps = 0
    for one in rounds:
        end = UNDISTURBED_S if one.storm_s is None else one.storm_s
        during = [taken for due, taken in zip(one.due_s, one.taken_ms, strict=True) if 0 <= due <= end]
        steps += len(during)
        for values, value in zip(found.values(), np.percentile(during, (50, 99, 100)), strict=True):
            values.append(float(value))
    storms = [one.storm_s for one in rounds if one.storm_s is not None]
    return {
        "rounds": len(rounds),
        "steps": steps,
        **{name: Spread.of(values).model_dump() for name, values in found.items()},
        "storm_s": Spread.of(storms).model_dump() if storms else None,
        "last": timeline(rounds[-1]),
    }


def timeline(one: Round) -> dict[str, Any]:
    """Returns one round in slices of SLICE_S seconds. at_s: the middle of each slice. p50_ms, max_ms: the median and
    the longest latency of the steps that were due in the slice. Slices without steps are left out. storm_s: the time
    from the storm's start until all parked sessions were answered.
    """
    taken_ms = np.array(one.taken_ms)
    slices = np.floor(np.array(one.due_s) / SLICE_S)
    columns: dict[str, list[float]] = {"at_s": [], "p50_ms": [], "max_ms": []}
    for number in np.unique(slices):
        own = taken_ms[slices == number]
        columns["at_s"].append(round((float(number) + 0.5) * SLICE_S, 4))
        columns["p50_ms"].append(round(float(np.median(own)), 2))
        columns["max_ms"].append(round(float(own.max()), 2))
    return {**columns, "storm_s": one.storm_s}


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns a table row for each case: medians with the smallest and the largest value of all rounds."""
    made = []
    for way in WAYS:
        found = result["ways"][way]
        cells = [f"{Spread(**found[name]):.1f}" for name in ("p50_ms", "p99_ms", "max_ms")]
        made.append((way, *cells, "" if found["storm_s"] is None else f"{Spread(**found['storm_s']):.2f}"))
    return made


HEADINGS = ("", "steps, p50 ms", "p99 ms", "max ms", f"s until {PARKED} states are rebuilt")


def plot(result: dict[str, Any], path: Path) -> None:
    """Plots the latency of resident steps against their due time in each case's last round. A line shows each slice's
    median latency. A shaded area extends to the slice's longest latency."""
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    axes.set_yscale("log")
    for index, way in enumerate(WAYS):
        last = result["ways"][way]["last"]
        # A log scale shows only positive values. A median latency may be negative, because a timer may fire too early,
        # so that a step is sent before its due time.
        middle = np.array([value if value > 0 else np.nan for value in last["p50_ms"]])
        axes.plot(last["at_s"], middle, color=f"C{index}", label=way)
        axes.fill_between(last["at_s"], middle, last["max_ms"], color=f"C{index}", alpha=0.25, linewidth=0)
        if last["storm_s"] is not None:
            axes.axvline(last["storm_s"], color=f"C{index}", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="due time, seconds after the storm's start (dotted: all parked states are rebuilt)",
        ylabel=f"latency of a step, ms\n({1e3 * SLICE_S:.0f} ms: median to longest)",
    )
    axes.set_title(f"{result['parked']} parked sessions return; other sessions: {result['steps_per_s']:g} steps/s")
    figure.legend(loc="outside lower center", ncols=len(WAYS))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=SHIPPED)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--within",
        type=float,
        default=RESIDENT / RATE,
        help="number of seconds over which the parked sessions' steps are spread",
    )
    parser.add_argument("--json", type=Path, help="output file for the figures")
    parser.add_argument("--plot", type=Path, help="output file for the plot")
    options = parser.parse_args()
    result = uvloop.run(measure(options.bundle, options.rounds, options.within))
    table = Table(title=f"{result['model']} version {result['model_version']}")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows(result):
        table.add_row(*row)
    Console(width=120).print(table)
    if options.json:
        write_json(options.json, result)
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
