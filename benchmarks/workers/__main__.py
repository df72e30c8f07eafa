"""Compares a server of two workers with a server of one process.

    python -m benchmarks.workers [--rounds N] [--seconds S] [--model NAME] [--json FILE]
    python -m benchmarks.workers --render

Both servers run at the same time, and wrk drives them in turn. With 64 connections and 64 sessions, half of the steps
are passed to the other worker. With one connection, either all steps are, or none, because all sessions of the load
belong to one worker. Predictions from prompts have no session, so the worker that accepted one answers it. Client and
servers share the machine's cores, so the processor time of a step says what more cores would give. `--render` writes
the stored figures into docs/sizing.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from benchmarks.bench.contenders import wanes
from benchmarks.bench.process import ServerProcess
from benchmarks.bench.wrk import drive, require_wrk
from benchmarks.page import markdown, put
from benchmarks.summary import BUNDLES, Spread, provenance, ratios, write_json
from wane.service.workers.placement import worker_of

PAGE, FIGURES = Path("docs/sizing.md"), Path("docs/figures/workers.json")
WORKERS, CONNECTIONS, SESSIONS = 2, 64, 64
PROMPTS, PROMPT_TOKENS = 512, 60  # too few tokens for a kept state of the prompt
COLUMNS = (
    ("steps_per_s", ",.0f", "steps a second"),
    ("cpu_us", ".1f", "processor time of a step, us"),
    ("predictions_per_s", ",.0f", f"predictions a second from {PROMPT_TOKENS} tokens"),
)
LEAST_SHARE = 0.05
"""The least share of a server's processor time at which a worker counts as having passed steps on."""

SINGLE, OWN, PASSED = "one process", "own sessions", "other worker's sessions"


class Server:
    """A running server."""

    def __init__(self, stack: ExitStack, workers: int, model: str, folder: Path) -> None:
        contender = replace(wanes()[0], environment={"WANE_WORKERS": str(workers)})
        self.process = stack.enter_context(ServerProcess(contender, BUNDLES / model, folder / f"{workers}.log"))
        with httpx.Client(base_url=self.process.url, timeout=30) as http:
            self.process.wait_ready("/v1/predict", '{"tokens": [5]}')
            while http.get("/readyz").status_code != httpx.codes.OK:
                pass
            for name in names():
                http.post("/v1/sessions", json={"session": name}).raise_for_status()

    def measure(
        self, requests: Sequence[tuple[str, str]], connections: int, seconds: float
    ) -> tuple[float, float, list[float]]:
        """Sends requests. Returns the answers a second, the server's processor time of a request in microseconds, and
        the processes' shares of it, smallest first."""
        before = self._cpu_s()
        timed = drive(self.process.url, requests, connections, seconds)
        spent = {pid: s - before.get(pid, 0.0) for pid, s in self._cpu_s().items()}
        total_s = sum(spent.values())
        shares = sorted(s / total_s for s in spent.values())
        return timed.requests / timed.seconds, 1e6 * total_s / timed.requests, shares

    def _cpu_s(self) -> dict[int, float]:
        """Returns the processor time of each of the server's processes, in seconds."""
        found = {}
        for pid in self.process.pids():
            tasks = Path(f"/proc/{pid}/task").iterdir()
            found[pid] = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
        return found


def names() -> list[str]:
    """Returns the names of all sessions. Each worker has SESSIONS of them or more."""
    return [f"session-{number}" for number in range(4 * SESSIONS)]


def steps(sessions: Sequence[str]) -> list[tuple[str, str]]:
    """Returns a step for each session."""
    return [(f"/v1/sessions/{name}/tokens", f'{{"tokens": [{5 + n}]}}') for n, name in enumerate(sessions)]


def predictions() -> list[tuple[str, str]]:
    """Returns predictions from random prompts."""
    random = Random(0)
    return [
        ("/v1/predict", json.dumps({"tokens": random.choices(range(2, 256), k=PROMPT_TOKENS), "mode": "recurrent"}))
        for _ in range(PROMPTS)
    ]


def measured(rounds: int, seconds: float, model: str, console: Console) -> dict[str, Any]:
    """Returns the figures of all rounds."""
    together, prompts = steps(names()[:SESSIONS]), predictions()
    of_one = steps([name for name in names() if worker_of(name, WORKERS) == 0][:SESSIONS])
    rates: dict[str, list[float]] = {"1": [], "2": []}
    predicted: dict[str, list[float]] = {"1": [], "2": []}
    cpus: dict[str, list[float]] = {"1": [], "2": []}
    alone: dict[str, list[float]] = {SINGLE: [], OWN: [], PASSED: []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {"1": Server(stack, 1, model, folder), "2": Server(stack, WORKERS, model, folder)}
        for server in servers.values():
            server.measure(together, CONNECTIONS, 1)
        for turn in track(range(rounds), "rounds", console=console, transient=True):
            for name in ("1", "2") if turn % 2 else ("2", "1"):
                rate, cpu_us, _ = servers[name].measure(together, CONNECTIONS, seconds)
                rates[name].append(rate)
                cpus[name].append(cpu_us)
                predicted[name].append(servers[name].measure(prompts, CONNECTIONS, seconds)[0])
            for _ in range(3):
                alone[SINGLE].append(servers["1"].measure(of_one, 1, seconds)[1])
                _, cpu_us, shares = servers["2"].measure(of_one, 1, seconds)
                alone[PASSED if shares[-2] > LEAST_SHARE else OWN].append(cpu_us)
    return {
        "steps_per_s": {name: Spread.of(values).model_dump() for name, values in rates.items()},
        "ratio": ratios(rates["2"], rates["1"]).model_dump(),
        "predictions_per_s": {name: Spread.of(values).model_dump() for name, values in predicted.items()},
        "predictions_ratio": ratios(predicted["2"], predicted["1"]).model_dump(),
        "cpu_us": {name: Spread.of(values).model_dump() for name, values in cpus.items()},
        "cpu_ratio": ratios(cpus["2"], cpus["1"]).model_dump(),
        "alone_us": {name: Spread.of(values).model_dump() for name, values in alone.items() if values},
    }


def lines(document: dict[str, Any]) -> list[str]:
    """Returns a Markdown table of medians, with the smallest and the largest value of all rounds."""
    rows = [
        [f"{workers} worker{'s' * (workers != '1')}"]
        + [f"{Spread(**document[name][workers]):{form}}" for name, form, _ in COLUMNS]
        for workers in ("1", "2")
    ]
    rows.append(["ratio", *[f"{Spread(**document[name]):.2f}" for name in ("ratio", "cpu_ratio", "predictions_ratio")]])
    alone = [[name, f"{Spread(**spread):.0f}"] for name, spread in document["alone_us"].items()]
    return [
        *markdown([f"{CONNECTIONS} connections", *(heading for _, _, heading in COLUMNS)], rows),
        "",
        *markdown(["one connection", "processor time of a step, us"], alone),
    ]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement")
    parser.add_argument("--model", default="rnn-stable")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if options.render:
        put(PAGE, "workers", lines(json.loads(FIGURES.read_text(encoding="utf-8"))))
        return
    require_wrk()
    console = Console()
    document = {
        **provenance("benchmarks.workers", bundles=[options.model]),
        "rounds": options.rounds,
        **measured(options.rounds, options.seconds, options.model, console),
    }
    console.print("\n".join(lines(document)), markup=False, soft_wrap=True)
    if options.json:
        write_json(options.json, document)


if __name__ == "__main__":
    main()
