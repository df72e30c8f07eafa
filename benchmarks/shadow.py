"""Measures the cost of shadows: the latency of live answers with and without shadows, and the CPU time of shadows. A
shadow is a window prediction from the last k tokens of a session, which the server compares with the live answer. The
rate is the share of live answers for which a shadow is computed. Every rate is measured with every k.

    python -m benchmarks.shadow measure docs/figures/shadow.json [--k K ...]    keeps the figures of other k in the file
    python -m benchmarks.shadow table docs/figures/shadow.json
    python -m benchmarks.shadow plot docs/figures/shadow.json docs/figures/shadow.png

One server runs for each shadow rate. All servers have the same bundle, whose default window is the measured k. Sessions
longer than k are stepped in an open loop at a share of the server's capacity. Every round measures one server after the
other, and each round begins with another server. While one server is under load, the others are idle.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import matplotlib
from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.bench.connections import http_request
from benchmarks.bench.contenders import STEP_PATH, Contender
from benchmarks.bench.loads import step_body
from benchmarks.bench.open_loop import drive, poisson
from benchmarks.bench.process import ServerProcess
from benchmarks.summary import Spread, digits, provenance, write_json
from wane.models.bundle_checks import read_manifest
from wane.models.layer_registry import Frozen

matplotlib.use("Agg")

from matplotlib import pyplot as plt

BUNDLE = Path("models/bundles/gated-stable")
RATES = (0.0, 0.01, 0.1, 1.0)
WINDOWS = (16, 64, 256)
SESSIONS = 512
BEYOND = 32
"""Every session has k + BEYOND tokens before the first measurement."""
SATURATING = 20_000.0
"""Events per second when the capacity is measured. No server can answer so many events, so the rate of answers equals
the server's capacity."""
SATURATED = 3000


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one server under load.

    compared: the number of sampled answers whose shadow was computed in time. dropped: the number of sampled answers
    whose shadow was not computed in time. cpu_s: the server's CPU time. shadow_cpu_s: the CPU time of the thread that
    computes shadows.
    """

    requests: int
    p50_ms: float
    p99_ms: float
    longest_ms: float
    cpu_s: float
    shadow_cpu_s: float
    compared: int
    dropped: int


class OfRate(Frozen):
    """The figures of one shadow rate over all rounds. Counts are sums.

    *_over_none_ms: the latency minus the latency in the same round at the rate 0; None for the rate 0 itself.
    shadow_cpu_s_per_1000: CPU seconds of shadows per thousand live answers.
    """

    rounds: int
    requests: int
    compared: int
    dropped: int
    p50_ms: Spread
    p99_ms: Spread
    longest_ms: Spread
    cpu_s: Spread
    shadow_cpu_s_per_1000: Spread
    p50_over_none_ms: Spread | None
    p99_over_none_ms: Spread | None

    @classmethod
    def of(cls, rounds: Sequence[Round], none: Sequence[Round] | None) -> OfRate:
        """Summarises rounds. `none` has the figures at the rate 0 in the same rounds. It is None if `rounds` has the
        figures at the rate 0 itself."""
        pairs = [] if none is None else list(zip(rounds, none, strict=True))
        return cls(
            rounds=len(rounds),
            requests=sum(one.requests for one in rounds),
            compared=sum(one.compared for one in rounds),
            dropped=sum(one.dropped for one in rounds),
            p50_ms=Spread.of(one.p50_ms for one in rounds),
            p99_ms=Spread.of(one.p99_ms for one in rounds),
            longest_ms=Spread.of(one.longest_ms for one in rounds),
            cpu_s=Spread.of(one.cpu_s for one in rounds),
            shadow_cpu_s_per_1000=Spread.of(1000 * one.shadow_cpu_s / one.requests for one in rounds),
            p50_over_none_ms=Spread.of(one.p50_ms - other.p50_ms for one, other in pairs) if pairs else None,
            p99_over_none_ms=Spread.of(one.p99_ms - other.p99_ms for one, other in pairs) if pairs else None,
        )


class OfWindow(Frozen):
    """The figures of one k, by shadow rate."""

    k: int
    events_per_s: float
    capacity_per_s: float
    seconds: float
    rates: dict[str, OfRate]


class Results(Frozen):
    """The figures of every k, and the run's metadata."""

    model: str
    model_version: str
    machine: str
    versions: dict[str, str]
    command: str | None = None
    commit: str | None = None
    bundles: dict[str, str] = Field(default_factory=dict)
    windows: dict[str, OfWindow]


class Subject:
    """A running server and its sessions."""

    def __init__(self, server: ServerProcess, rate: float, k: int, vocabulary: int) -> None:
        self.server, self.rate = server, rate
        self._client = httpx.Client(base_url=server.url, timeout=60, trust_env=False)
        names = [f"live-{index}" for index in range(SESSIONS)]
        fill = [index % (vocabulary - 2) + 2 for index in range(k + BEYOND)]
        for name in names:
            self._client.post("/v1/sessions", json={"session": name}).raise_for_status()
            self._client.post(STEP_PATH.format(session=name), json={"tokens": fill}).raise_for_status()
        self._requests: Iterator[bytes] = itertools.cycle(
            [
                http_request(STEP_PATH.format(session=name), step_body(2 + index % 1000))
                for index, name in enumerate(names)
            ]
        )

    def load(self, rate: float, seconds: float, seed: int) -> Round:
        """Sends `rate` events per second for `seconds`, and returns the figures of that time."""
        before, cpu_s = self._shadows(), self.server.cpu_seconds()
        timed = drive(self.server.port, self._requests, poisson(rate, seconds, seed))
        after, cpu_s = self._shadows(), self.server.cpu_seconds() - cpu_s
        return Round(
            requests=timed.requests,
            p50_ms=timed.p50_ms,
            p99_ms=timed.p99_ms,
            longest_ms=timed.longest_ms,
            cpu_s=cpu_s,
            shadow_cpu_s=after["cpu_s"] - before["cpu_s"],
            compared=int(after["compared"] - before["compared"]),
            dropped=int(after["dropped"] - before["dropped"]),
        )

    def capacity(self) -> float:
        """Returns the number of events per second that the server answers under overload."""
        timed = drive(self.server.port, self._requests, poisson(SATURATING, SATURATED / SATURATING, 0))
        return timed.requests / timed.seconds

    def _shadows(self) -> dict[str, float]:
        (model,) = self._client.get("/v1/report").raise_for_status().json()["models"]
        found: dict[str, float] = model["shadow"]
        return found


@contextmanager
def serving(k: int) -> Iterator[list[Subject]]:
    """Starts a server for each of RATES, with sessions longer than k."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bundle = scratch / f"k{k}"
        shutil.copytree(BUNDLE, bundle)
        manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
        (bundle / "manifest.json").write_text(json.dumps(manifest | {"window": k}), encoding="utf-8")
        servers: list[ServerProcess] = []
        for rate in RATES:
            command = ("{bin}/wane", "serve", "--bundles={bundle}", "--port={ports[0]}")
            wane = Contender("wane", "Wane", "wane", (*command, "--log-level=warning", f"--shadow-rate={rate}"))
            servers.append(stack.enter_context(ServerProcess(wane, bundle, scratch / f"{rate}.log")))
        for server in servers:
            server.wait_ready("/v1/predict", json.dumps({"tokens": [2, 3]}))
        vocabulary = manifest["vocabulary"]["size"]
        yield [Subject(server, rate, k, vocabulary) for server, rate in zip(servers, RATES, strict=True)]


def measure(subjects: list[Subject], k: int, rounds: int, seconds: float, share: float) -> OfWindow:
    """Measures the servers alternately. The load is `share` times the capacity of the server without shadows."""
    capacity = statistics.median(subjects[0].capacity() for _ in range(3))
    found: dict[str, list[Round]] = {str(subject.rate): [] for subject in subjects}
    for index in range(rounds + 1):
        for turn in range(len(subjects)):
            subject = subjects[(index + turn) % len(subjects)]
            figures = subject.load(share * capacity, seconds, seed=index)
            if index:  # the first round is a warm-up
                found[str(subject.rate)].append(figures)
    return OfWindow(
        k=k,
        events_per_s=digits(share * capacity),
        capacity_per_s=digits(capacity),
        seconds=seconds,
        rates={rate: OfRate.of(rounds, found["0.0"] if float(rate) else None) for rate, rounds in found.items()},
    )


def table(results: Results) -> Table:
    """Returns a table with a row for each k and rate. Its columns are the latency of live answers, the difference
    between this latency and the latency in the same round without shadows, the CPU time of shadows, the share of
    answers that were compared with a shadow, and the share whose shadow was dropped."""
    made = Table(title=f"Shadows of {results.model} version {results.model_version}: median (least to most) of rounds")
    for name in ("k", "rate"):
        made.add_column(name, justify="right")
    for name in (
        "p50, ms",
        "p99, ms",
        "p50 minus p50 without shadows, ms",
        "p99 minus p99 without shadows, ms",
        "CPU s per 1,000 answers",
        "compared",
        "dropped",
    ):
        made.add_column(name, justify="right")
    for of_window in results.windows.values():
        for rate, found in of_window.rates.items():
            over = (found.p50_over_none_ms, found.p99_over_none_ms)
            made.add_row(
                str(of_window.k),
                rate,
                f"{found.p50_ms:.2f}",
                f"{found.p99_ms:.2f}",
                *("" if spread is None else f"{spread:+.2f}" for spread in over),
                f"{found.shadow_cpu_s_per_1000:.3f}",
                f"{found.compared / found.requests:.2%}",
                f"{found.dropped / found.requests:.2%}",
                end_section=rate == str(RATES[-1]),
            )
    return made


def plot(results: Results, path: Path) -> None:
    """Plots the p50 and the p99 of live answers (median and range over the rounds) and the CPU time of shadows against
    the shadow rate."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for index, of_window in enumerate(results.windows.values()):
        colour = f"C{index}"
        for place, (rate, found) in enumerate(of_window.rates.items()):
            at = place + (index - 1) * 0.22
            for axis, spread in ((axes[0], found.p50_ms), (axes[1], found.p99_ms)):
                label = f"k = {of_window.k}, {of_window.events_per_s:,.0f} events/s" if rate == "0.0" else None
                axis.plot([at, at], [spread.least, spread.most], color=colour, linewidth=1, alpha=0.6)
                axis.plot(at, spread.median, "o", color=colour, markersize=4, label=label)
        shares = [float(rate) for rate in of_window.rates if float(rate)]
        spent = [of_window.rates[str(rate)].shadow_cpu_s_per_1000.median for rate in shares]
        axes[2].plot(shares, spent, "o-", color=colour, label=f"k = {of_window.k}")
    names = ["none" if rate == 0 else f"{rate:g}" for rate in RATES]
    for axis, title in ((axes[0], "live p50, ms"), (axes[1], "live p99, ms")):
        axis.set_xticks(range(len(RATES)), names)
        axis.set(title=title, xlabel="shadow rate", ylim=(0, None))
        axis.grid(alpha=0.3, axis="y")
    axes[0].legend(fontsize=8, loc="lower left")
    axes[2].set(xscale="log", yscale="log", xlabel="shadow rate", title="CPU seconds added to 1,000 live answers")
    axes[2].grid(alpha=0.3)
    axes[2].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "table", "plot"))
    parser.add_argument("results", type=Path)
    parser.add_argument("figure", type=Path, nargs="?")
    parser.add_argument("--k", type=int, nargs="+", default=list(WINDOWS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument(
        "--share", type=float, default=0.5, help="load as a share of the server's capacity (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.command == "measure":
        manifest = read_manifest(BUNDLE)
        origin = provenance("benchmarks.shadow", "onnxruntime", bundles=["gated-stable"])
        known: dict[str, OfWindow] = {}
        if options.results.exists():
            known = Results.model_validate_json(options.results.read_bytes()).windows
        for k in options.k:
            with serving(k) as subjects:
                known[str(k)] = measure(subjects, k, options.rounds, options.seconds, options.share)
            results = Results(
                model=manifest.name,
                model_version=manifest.version,
                **origin,
                windows=dict(sorted(known.items(), key=lambda item: int(item[0]))),
            )
            write_json(options.results, results)
    results = Results.model_validate_json(options.results.read_bytes())
    if options.command == "plot":
        plot(results, options.figure or options.results.with_suffix(".png"))
    else:
        Console(width=160).print(table(results))


if __name__ == "__main__":
    main()
