"""Compares running a long sequence in parallel chunks with running it sequentially, on this machine's CPUs.

    python -m benchmarks.parallel_scan [BUNDLE ...] [--tokens N] [--rounds N] [--json FILE] [--figure FILE]

Without BUNDLE, the bundles are the model of `benchmarks/bench/lstm256.py` and the shipped gated-stable. Two results are
measured: `state`, the last state alone, and `score`, the log-probability of every token. Every round measures each of
these methods once:

- one call: one run of the graph `advance` or `scan` over the whole sequence, on two spinning threads. For an LSTM, this
  is one call of ONNX Runtime's LSTM operator.
- in pieces: the same graph runs over PIECE tokens at a time. The last state of each run is the initial state of the
  next run. This is the fastest sequential method.
- step: the graph `step` runs token by token over the first STEPPED tokens. Its time is extrapolated to the whole
  sequence.
- chunks: the graph runs over WIDTH parallel chunks that have no warm-up tokens. This measures the cost of the parallel
  runs alone. In `chunks, 2 threads`, one run computes all chunks on two threads. In `chunks, 2 runs`, each of two
  concurrent runs computes half of the chunks on one thread.
- parallel: the method that the server uses. The engine measures the throughput of runs when it loads the model, and
  derives the number of chunks from the throughput. Each chunk starts with warm-up tokens, and the batcher runs the
  chunks. The error of each chunk's initial state is measured and bounded. Chunks whose error is over 1e-5 are run
  again.
- parallel, exact: like parallel, but a chunk is run again unless its initial state is bitwise equal to the previous
  chunk's last state.

The table also shows the largest differences of each method's log-probabilities and last states from those of `one
call`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import matplotlib

from wane.service.chunked.chunked import ChunkedRunner, ChunkPlan
from wane.service.chunked.layout import ThroughputProfile
from wane.service.engine.top1_proof import MarginProof
from wane.service.state.pool import StatePool

matplotlib.use("Agg")

import numpy as np
import onnxruntime
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.bench import lstm256
from benchmarks.summary import Spread, provenance, ratios, rounded, write_json
from wane.models.bundle import Bundle
from wane.models.manifest import Role
from wane.service.batching.batcher import Batcher
from wane.service.batching.ticket import Ticket
from wane.service.engine.engine import Engine
from wane.service.engine.score import RESIDUAL
from wane.service.observability.metrics import Metrics
from wane.service.runners.onnx import OnnxRunner
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings
from wane.service.state.pool import ZERO
from wane.service.types.predict import ScoreMethod
from wane.service.types.request import ScoreRequest

SHIPPED = Path("models/bundles/gated-stable")
THREADS = 2
PIECE = 512
WIDTH, STEPS = 64, 64
STEPPED = 2048
ROLES: dict[str, Role] = {"state": "advance", "score": "scan"}
WAYS = (
    "one call",
    "in pieces",
    "step",
    "chunks, 2 threads",
    "chunks, 2 runs",
    "parallel",
    "parallel, exact",
)

Feeds = dict[str, NDArray[np.generic]]
Way = Callable[[], None]


class Session:
    """One graph in its own ONNX Runtime session."""

    def __init__(self, bundle: Bundle, role: Role, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            str(bundle.graph_path(role)), options, providers=["CPUExecutionProvider"]
        )
        self._wanted = {output.name for output in self._session.get_outputs()} & {"logprobs"}
        self._states = [tensor.name for tensor in bundle.manifest.state]

    def __call__(self, feeds: Feeds) -> Feeds:
        """Runs the graph. Returns the next states by name, and `logprobs` if the graph computes them."""
        names = [f"next.{name}" for name in self._states] + sorted(self._wanted)
        found = dict(zip(names, self._session.run(names, feeds), strict=True))
        return {name.removeprefix("next."): value for name, value in found.items()}


class Subject:
    """One bundle and a random sequence of its tokens."""

    def __init__(self, path: Path, tokens: int) -> None:
        self.bundle = bundle = Bundle.read(path)
        self.manifest = manifest = bundle.manifest
        self.tokens = np.random.default_rng(0).integers(manifest.vocabulary.size, size=tokens + 1)
        self.tokens[0] = manifest.vocabulary.eos_id
        self.two = {role: Session(bundle, role, THREADS) for role in ROLES.values()}
        self.ones = {role: [Session(bundle, role, 1) for _ in range(THREADS)] for role in ROLES.values()}
        self.stepper = Session(bundle, "step", 1)
        self.workers = ThreadPoolExecutor(THREADS)
        self.loop = asyncio.new_event_loop()
        runner = OnnxRunner(bundle, "cpu", THREADS)
        settings = Settings(threads=THREADS)
        store = MemoryStore(manifest.max_window, settings.session_ttl_s, settings.session_budget_bytes)
        self.throughput = ThroughputProfile()
        metrics = Metrics()
        self.engine = Engine(
            manifest,
            bundle.vocabulary,
            MarginProof(bundle.weights()),
            runner,
            store,
            settings,
            metrics,
            throughput=self.throughput,
        )
        self.engine.warm_up(bundle.propagation())
        self.pool = StatePool(manifest.state, manifest.architecture.hidden, settings.state_budget_bytes)
        self.batcher = Batcher(
            runner, self.pool, Metrics(), "state", max_batch_size=WIDTH, max_queue=settings.max_queue
        )
        for _ in self.throughput.measure(runner, self.pool, manifest, settings.max_batch_size):
            pass
        self.parallel = ChunkedRunner(manifest, self.batcher, self.pool, self.throughput)
        self.ends: dict[tuple[str, str], Feeds] = {}
        self.told: dict[tuple[str, str], dict[str, object]] = {}

    def close(self) -> None:
        """Stops every thread."""
        self.loop.run_until_complete(self.batcher.close())
        self.loop.run_until_complete(self.engine.close())
        self.loop.close()
        self.workers.shutdown()

    def ways(self, kind: str) -> dict[str, Way]:
        """Returns a function for each measured method, by the method's name. The function computes the result `kind`,
        which is `state` or `score`."""
        role, length = ROLES[kind], len(self.tokens) - 1
        found: dict[str, Way] = {
            "one call": lambda: self._keep(kind, "one call", self._ordered(self.two[role], role, length)),
            "in pieces": lambda: self._keep(kind, "in pieces", self._ordered(self.two[role], role, PIECE)),
            "step": self._step,
            "chunks, 2 threads": lambda: self._chunks(role, self.two[role]),
            "chunks, 2 runs": lambda: self._chunks(role, self._halves(role)),
        }
        for name, tolerance in (("parallel", None), ("parallel, exact", 0.0)):
            found[name] = self._parallel(kind, name, tolerance)
        return found

    def differences(self, kind: str, name: str) -> dict[str, float]:
        """Returns the largest difference between the states of the method `name` and those of `one call`, and the
        largest difference between their log-probabilities."""
        one, other = self.ends[kind, "one call"], self.ends[kind, name]
        return {
            what: max(
                float(np.abs(np.float64(one[name]) - np.float64(value)).max())
                for name, value in other.items()
                if (name == "logprobs") == scored
            )
            for what, scored in (("states", False), ("logprobs", True))
            if any((name == "logprobs") == scored for name in other)
        }

    def _keep(self, kind: str, name: str, end: Feeds) -> None:
        self.ends[kind, name] = end

    def _feeds(self, role: Role, rows: slice | NDArray[np.int64], state: Feeds) -> Feeds:
        """Returns the inputs of a graph. rows: the positions of the input tokens in the sequence, (T) or (B, T)."""
        tokens = np.atleast_2d(self.tokens[rows])
        feeds: Feeds = {"tokens": tokens, "lengths": np.full(len(tokens), tokens.shape[1]), **state}
        if role == "scan":
            after = slice(rows.start + 1, rows.stop + 1) if isinstance(rows, slice) else rows + 1
            feeds["targets"] = np.atleast_2d(self.tokens[after])
        return feeds

    def _zeros(self, batch: int) -> Feeds:
        return {tensor.name: np.zeros((batch, *tensor.shape), np.float32) for tensor in self.manifest.state}

    def _ordered(self, session: Session, role: Role, piece: int) -> Feeds:
        state, logprobs = self._zeros(1), []
        for start in range(0, len(self.tokens) - 1, piece):
            stop = min(start + piece, len(self.tokens) - 1)
            state = session(self._feeds(role, slice(start, stop), state))
            if role == "scan":
                logprobs.append(state.pop("logprobs")[0])
        return {**state, "logprobs": np.concatenate(logprobs)} if logprobs else state

    def _step(self) -> None:
        state = self._zeros(1)
        for token in self.tokens[:STEPPED]:
            state = self.stepper({"tokens": token[None], **state})

    def _chunks(self, role: Role, run: Callable[[Feeds], Feeds]) -> None:
        rows = np.arange(len(self.tokens) - 1).reshape(WIDTH, -1)
        state = self._zeros(WIDTH)
        for start in range(0, rows.shape[1], STEPS):
            state = run(self._feeds(role, rows[:, start : start + STEPS], state))
            state.pop("logprobs", None)

    def _halves(self, role: Role) -> Callable[[Feeds], Feeds]:
        def run(feeds: Feeds) -> Feeds:
            halves = [{name: value[part::THREADS] for name, value in feeds.items()} for part in range(THREADS)]
            halves = [{name: np.ascontiguousarray(value) for name, value in half.items()} for half in halves]
            ends = list(self.workers.map(lambda session, half: session(half), self.ones[role], halves))
            whole = {name: np.empty((WIDTH, *value.shape[1:]), value.dtype) for name, value in ends[0].items()}
            for part, end in enumerate(ends):
                for name, value in end.items():
                    whole[name][part::THREADS] = value
            return whole

        return run

    def _parallel(self, kind: str, name: str, tolerance: float | None) -> Way:
        def tell(plan: ChunkPlan) -> None:
            self.told[kind, name] = {
                "chunks": plan.chunks,
                "warm_up": plan.warm_up,
                "rounds": plan.rounds,
                "max_residual": plan.residual,
            }

        async def state() -> None:
            limit = 0.0 if tolerance == 0 else RESIDUAL
            with self.pool.lease() as slot:
                pieces = self.parallel.run("advance", self.tokens[:-1], None, Ticket(), limit, read=ZERO, write=slot)
                async with aclosing(pieces):
                    async for piece in pieces:
                        tell(piece.plan)
                self._keep(kind, name, dict(self.pool.memory.gather([slot])))

        async def score() -> None:
            request = ScoreRequest(tuple(self.tokens[1:].tolist()), method=ScoreMethod.PARALLEL, tolerance=tolerance)
            scored = await self.engine.score(request)
            self.told[kind, name] = {
                field: getattr(scored, field)
                for field in ("chunks", "warm_up", "rounds", "max_residual", "error_bound")
            }
            self._keep(kind, name, {"logprobs": np.array(scored.logprobs)})

        return lambda: self.loop.run_until_complete(state() if kind == "state" else score())


def measure(path: Path, tokens: int, rounds: int, progress: Progress) -> dict[str, Any]:
    """Measures every method. Returns, for each method, the durations and ratios that `against` returns, and the
    differences between the method's results and those of `one call`."""
    subject = Subject(path, tokens)
    ways = {(kind, name): way for kind in ROLES for name, way in subject.ways(kind).items()}
    seconds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in WAYS} for kind in ROLES}
    bar = progress.add_task(subject.manifest.name, total=len(ways) * (rounds + 1))
    for index in range(rounds + 1):
        for (kind, name), way in ways.items():
            begun = time.perf_counter()
            way()
            taken = time.perf_counter() - begun
            if index:  # the first round is a warm-up
                seconds[kind][name].append(taken * (tokens / STEPPED if name == "step" else 1))
            progress.advance(bar)
    subject.close()
    return {
        "model": subject.manifest.name,
        "version": subject.manifest.version,
        "cell": subject.manifest.architecture.family,
        "vocabulary": subject.manifest.vocabulary.size,
        "paces_us": {
            role: {str(width): 1e6 * pace for width, pace in subject.throughput.pace(role).items()}
            for role in ROLES.values()
        },
        "ways": {kind: {name: against(of_kind, name) for name in WAYS} for kind, of_kind in seconds.items()},
        "told": {kind: {name: told for (of, name), told in subject.told.items() if of == kind} for kind in ROLES},
        "differences": {
            kind: {
                name: subject.differences(kind, name) for of, name in subject.ends if of == kind and name != "one call"
            }
            for kind in ROLES
        },
    }


def against(seconds: dict[str, list[float]], name: str) -> dict[str, Spread]:
    """Returns the durations of the method `name` in seconds. Also divides, in each round, the duration of `one call`
    and that of `in pieces` by the duration of the method `name`, and returns these ratios."""
    ordered = {f"{other} / it": ratios(seconds[other], seconds[name]) for other in ("one call", "in pieces")}
    return {"seconds": Spread.of(seconds[name]), **ordered}


def table(found: dict[str, Any], tokens: int) -> Table:
    """Returns a table of medians with the smallest and the largest value of all rounds. A ratio is computed within each
    round."""
    made = Table(title=f"{found['model']} version {found['version']}, {tokens:,} tokens")
    for heading in ("method", "seconds", "us per token", "one call / method", "in pieces / method", "details"):
        made.add_column(heading, justify="left" if heading in ("method", "details") else "right")
    for kind in ROLES:
        for name in WAYS:
            way: dict[str, Spread] = found["ways"][kind][name]
            told = dict(found["told"][kind].get(name, {}))
            told |= {f"{what} off": value for what, value in found["differences"][kind].get(name, {}).items()}
            made.add_row(
                f"{kind}, {name}",
                f"{way['seconds']:.3f}",
                f"{1e6 * way['seconds'].median / tokens:.2f}",
                f"{way['one call / it']:.2f}",
                f"{way['in pieces / it']:.2f}",
                ", ".join(f"{what} {value:.3g}" for what, value in told.items() if value is not None),
            )
    return made


def draw(subjects: list[dict[str, Any]], tokens: int, path: Path) -> None:
    """Plots the tokens per second of every method: the median, the smallest and the largest value of all rounds."""
    figure, axes = plt.subplots(
        1, len(subjects), figsize=(5.4 * len(subjects), 3.8), layout="constrained", squeeze=False
    )
    for axis, found in zip(axes[0], subjects, strict=True):
        for index, kind in enumerate(ROLES):
            taken = [found["ways"][kind][name]["seconds"] for name in WAYS]
            slowest, middle, quickest = (
                1e-3 * tokens / np.array([getattr(spread, end) for spread in taken])
                for end in ("most", "median", "least")
            )
            spread = [middle - slowest, quickest - middle]
            places = np.arange(len(WAYS)) + 0.4 * (index - 0.5)
            axis.barh(places, middle, 0.36, xerr=spread, color=f"C{index}", label=kind, error_kw={"linewidth": 1})
        axis.set_yticks(np.arange(len(WAYS)), WAYS)
        axis.invert_yaxis()
        axis.set(title=f"{found['model']}", xlabel="thousand tokens a second")
        axis.grid(alpha=0.3, axis="x")
    axes[0][0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path, metavar="BUNDLE")
    parser.add_argument(
        "--tokens", type=int, default=65_536, help=f"number of tokens of the sequence, a multiple of {WIDTH * STEPS}"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="output file for the figures")
    parser.add_argument("--figure", type=Path, help="output file for the plot")
    options = parser.parse_args()
    if options.tokens < WIDTH * STEPS or options.tokens % (WIDTH * STEPS):
        parser.error(f"--tokens is {options.tokens}, but must be a multiple of {WIDTH * STEPS}")
    with tempfile.TemporaryDirectory() as temporary, Progress(transient=True) as progress:
        paths = options.bundles
        if not paths:
            lstm256.export(Path(temporary))
            paths = [Path(temporary) / lstm256.NAME, SHIPPED]
        subjects = [measure(path, options.tokens, options.rounds, progress) for path in paths]
    for found in subjects:
        Console(width=190).print(table(found, options.tokens))
    if options.json:
        document = rounded(
            {
                **provenance("benchmarks.parallel_scan", "onnxruntime", "numpy", bundles=["gated-stable"]),
                "tokens": options.tokens,
                "rounds": options.rounds,
                "threads": THREADS,
                "subjects": subjects,
            }
        )
        write_json(options.json, document)
    if options.figure:
        draw(subjects, options.tokens, options.figure)


if __name__ == "__main__":
    main()
