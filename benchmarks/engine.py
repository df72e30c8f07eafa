"""Compares the engine without HTTP with a loop that only runs the same graphs (the bare loop), to measure the cost of
batching, sessions and answers.

    python -m benchmarks.engine [BUNDLE ...] [--rounds N] [--seconds S] [--json FILE]

For every bundle, measures two kinds of requests: steps of sessions whose states are resident, and windows of the length
that the bundle's manifest states. In every round, each of these methods is measured once for each bundle, so the rates
of two bundles can be compared:

- bare: the runner computes full batches in a loop on one thread. The states that a run returns are the input of the
  next run. The other outputs are dropped.
- batcher: each client awaits its own future. States are read from the state pool and written back to it.
- engine: the same clients use the whole engine, with sessions, limits, deadlines, predictions, bounds and reports.
- turns: 64 requests are submitted to the engine in one iteration of the event loop. The next 64 follow when all
  64 are answered.

`batcher` and `engine` have twice as many clients as the largest batch has requests. While the runner computes a batch
with the requests of one half of the clients, the other half of the clients receive answers and send their next
requests. A further run with one client measures the median latency of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.summary import Spread, provenance, ratios, write_json
from wane.models.bundle import Bundle
from wane.service.batching.batch import Work
from wane.service.batching.batcher import Batcher
from wane.service.batching.ticket import Ticket
from wane.service.engine.engine import Engine
from wane.service.engine.top1_proof import MarginProof
from wane.service.observability.metrics import Metrics
from wane.service.runners.onnx import OnnxRunner
from wane.service.runners.runner import NEXT, Array
from wane.service.server import spare_the_collector
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings
from wane.service.state.pool import StatePool
from wane.service.types.common import Mode
from wane.service.types.request import PredictRequest, StepRequest

SHIPPED = Path("models/bundles/gated-stable")
ROLES = ("step", "window")
WAYS = {"rate": ("bare", "batcher", "engine", "turns"), "latency_us": ("bare", "batcher", "engine")}
"""For each kind of figure, the methods that are measured."""
BATCH = 64
CLIENTS = 2 * BATCH
TIMEOUT_S = 60.0

Ask = Callable[[int], Awaitable[object]]
"""A function that sends one request of the client with a given number."""


class Subject:
    """One bundle, and what the methods need: its runner, its engine, its batcher, and the clients' tokens."""

    def __init__(self, path: Path, **settings_given: Any) -> None:
        self.bundle = bundle = Bundle.read(path)
        self.manifest = bundle.manifest
        self.runner = OnnxRunner(bundle, "cpu", threads=1)
        settings = Settings(max_batch_size=BATCH, **settings_given)
        store = MemoryStore(
            max(settings.session_history_tokens, bundle.manifest.max_window),
            settings.session_ttl_s,
            settings.session_budget_bytes,
        )
        self.engine = Engine(
            bundle.manifest, bundle.vocabulary, MarginProof(bundle.weights()), self.runner, store, settings, Metrics()
        )
        self.engine.warm_up()
        self.pool = StatePool(bundle.manifest.state, bundle.manifest.architecture.hidden, settings.state_budget_bytes)
        self.batcher = Batcher(
            self.runner, self.pool, Metrics(), "batcher", max_batch_size=BATCH, max_queue=settings.max_queue
        )
        random = np.random.default_rng(0)
        size = bundle.manifest.vocabulary.size
        self.tokens: NDArray[np.int64] = random.integers(size, size=(CLIENTS, bundle.manifest.window))
        self.slots = [self.pool.acquire() for _ in range(CLIENTS)]

    async def start(self) -> None:
        """Creates the clients' sessions. Then excludes existing objects from garbage collection, as a server does."""
        for client in range(CLIENTS):
            await self.engine.create_session(f"client-{client}")
        spare_the_collector()

    async def close(self) -> None:
        """Stops every thread."""
        await self.batcher.close()
        await self.engine.close()

    def bare(self, role: str, batch: int, seconds: float) -> list[float]:
        """Runs the bare loop for `seconds`. Returns the duration of each run, in seconds."""
        tokens = self.tokens[:batch]
        feeds: dict[str, Array]
        if role == "step":
            feeds = {t.name: np.zeros((batch, *t.shape), np.float32) for t in self.manifest.state}
            feeds["tokens"] = tokens[:, 0].copy()
        else:
            feeds = {"tokens": tokens.copy(), "lengths": np.full(batch, tokens.shape[1])}
        taken, end = [], time.perf_counter() + seconds
        while (begun := time.perf_counter()) < end:
            outputs = self.runner.run("step" if role == "step" else "window", feeds)
            if role == "step":
                feeds |= {t.name: outputs[NEXT + t.name] for t in self.manifest.state}
            taken.append(time.perf_counter() - begun)
        return taken

    def ask(self, way: str, role: str) -> Ask:
        """Returns a function that sends one request of a client. The request runs a graph of the kind `role` (`step` or
        `window`) with the method `way` (`batcher` or `engine`). The function's argument is the client's number."""
        token, window = [row[:1] for row in self.tokens], list(self.tokens)
        tuples = [tuple(row.tolist()) for row in self.tokens]
        steps = [cycle((token,) for token in row) for row in tuples]
        slots, submit, engine = self.slots, self.batcher.submit, self.engine

        def by_batcher(client: int) -> Awaitable[object]:
            if role == "window":
                return submit(Work("window", window[client]), Ticket())
            return submit(Work("step", token[client], read=slots[client], write=slots[client]), Ticket())

        def by_engine(client: int) -> Awaitable[object]:
            # The deadline is set because requests over HTTP also have one.
            deadline = asyncio.get_running_loop().time() + TIMEOUT_S
            if role == "window":
                return engine.submit(PredictRequest(tuples[client], mode=Mode.WINDOW, deadline=deadline))
            return engine.submit(StepRequest(f"client-{client}", next(steps[client]), deadline=deadline))

        return by_batcher if way == "batcher" else by_engine

    async def rate(self, way: str, role: str, seconds: float) -> float:
        """Returns the number of answered requests per second while all clients send requests in a closed loop."""
        if way == "bare":
            taken = self.bare(role, BATCH, seconds)
            return BATCH * len(taken) / sum(taken)
        if way == "turns":
            return await self.turns(role, seconds)
        ask, answered, end = self.ask(way, role), 0, time.perf_counter() + seconds

        async def client(number: int) -> None:
            nonlocal answered
            while time.perf_counter() < end:
                await ask(number)
                answered += 1

        begun = time.perf_counter()
        await asyncio.gather(*map(client, range(CLIENTS)))
        return answered / (time.perf_counter() - begun)

    async def turns(self, role: str, seconds: float) -> float:
        """Submits BATCH requests in one iteration of the event loop, waits for their answers, and repeats this. Returns
        the number of answered requests per second."""
        ask, answered, begun = self.ask("engine", role), 0, time.perf_counter()
        while (now := time.perf_counter()) - begun < seconds:
            pending = [ask(client) for client in range(BATCH)]
            for one in pending:
                await one
            answered += BATCH
        return answered / (now - begun)

    async def latency_us(self, way: str, role: str, seconds: float) -> float:
        """Returns the median latency of one client's requests, in microseconds."""
        if way == "bare":
            return 1e6 * float(np.median(self.bare(role, 1, seconds)))
        ask, taken, end = self.ask(way, role), [], time.perf_counter() + seconds
        while (begun := time.perf_counter()) < end:
            await ask(0)
            taken.append(time.perf_counter() - begun)
        return 1e6 * float(np.median(taken))


Figures = dict[str, dict[str, dict[str, list[float]]]]
"""The figures of all rounds, by role, kind of figure and method."""


async def measure(paths: Sequence[Path], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures every method of every bundle in every round: rates in requests per second, median latencies in
    microseconds. `of_first` is the rate divided by the first bundle's rate in the same round."""
    subjects = [Subject(path) for path in paths]
    found: list[Figures] = []
    for subject in subjects:
        await subject.start()
        found.append({role: {kind: {way: [] for way in WAYS[kind]} for kind in WAYS} for role in ROLES})
    for index in range(rounds + 1):
        for role in ROLES:
            for kind, ways in WAYS.items():
                for way in ways:
                    for subject, figures in zip(subjects, found, strict=True):
                        one = subject.rate if kind == "rate" else subject.latency_us
                        figure = await one(way, role, seconds)
                        if index:  # the first round is a warm-up
                            figures[role][kind][way].append(figure)
    for subject in subjects:
        await subject.close()
    return [summary(subject, figures, found[0]) for subject, figures in zip(subjects, found, strict=True)]


def summary(subject: Subject, found: Figures, first: Figures) -> dict[str, Any]:
    """Returns the spreads of one bundle's figures. `first` has the figures of the first bundle."""
    architecture = subject.manifest.architecture
    return {
        "model": subject.manifest.name,
        "model_version": subject.manifest.version,
        "cell": architecture.family,
        "vocabulary": subject.manifest.vocabulary.size,
        "window": subject.manifest.window,
        "figures": {
            role: {
                way: {
                    "rate": Spread.of(figures["rate"][way]),
                    "of_bare": ratios(figures["rate"][way], figures["rate"]["bare"]),
                    "of_first": ratios(figures["rate"][way], first[role]["rate"][way]),
                    "latency_us": Spread.of(taken) if (taken := figures["latency_us"].get(way)) else None,
                }
                for way in WAYS["rate"]
            }
            for role, figures in found.items()
        },
    }


def table(subject: dict[str, Any]) -> Table:
    """Returns a table of the figures: their medians over the rounds, with the smallest and the largest value."""
    title = f"{subject['model']} version {subject['model_version']}, window of {subject['window']}"
    made = Table(title=title)
    headings = ("rate / rate of bare", "rate / first bundle's rate", "latency of one client, us")
    for heading in ("", f"requests/s, batch {BATCH}", *headings):
        made.add_column(heading, justify="left" if not heading else "right")
    for role in ROLES:
        figures = subject["figures"][role]
        for way, one in figures.items():
            latency = f"{one['latency_us']:,.0f}" if one["latency_us"] else ""
            shares = (f"{one[name]:.3f}" for name in ("of_bare", "of_first"))
            made.add_row(f"{role}, {way}", f"{one['rate']:,.0f}", *shares, latency)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path, default=[SHIPPED], metavar="BUNDLE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of one measurement")
    parser.add_argument("--json", type=Path, help="output file for the figures")
    options = parser.parse_args()
    found = uvloop.run(measure(options.bundles, options.rounds, options.seconds))
    for subject in found:
        Console(width=120).print(table(subject))
    if options.json:
        document = {
            **provenance("benchmarks.engine", "onnxruntime", "numpy", bundles=[one["model"] for one in found]),
            "batch": BATCH,
            "clients": CLIENTS,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "subjects": found,
        }
        write_json(options.json, document)


if __name__ == "__main__":
    main()
