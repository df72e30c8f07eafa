"""Measures the time from the start of `wane serve` to its first answers, and its memory, idle and under load.

    python -m benchmarks.start [--repeats N] [--seconds S] [--baseline FOLDER [--module MODULE]] [--json FILE]

Each repeat starts new servers one after another, first with all shipped models, then with the default model alone. With
each set of models, a repeat starts a server of the baseline (see `--baseline`), if there is one, and then a server of
this checkout. Two times are measured from the start of the server's process: until its first prediction, and until
/readyz answers 200.

Memory is read from /proc/PID/smaps_rollup. The idle memory is read SETTLED_S after the server is ready. The memory
under load is the maximum of many samples. The load is CONNECTIONS clients. Each client has a session of one model and
sends steps, and requests for predictions from windows, for scores and for generations.

`--baseline` is the folder of another checkout of Wane. The server of that checkout is started as `python -m MODULE
serve`, as in `benchmarks.bench`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from rich.console import Console
from rich.table import Table

from benchmarks.summary import Spread, provenance, write_json

ROOT = Path(__file__).parents[1]
BUNDLES = ROOT / "models" / "bundles"
SERVED = {"all models": BUNDLES, "gated-stable-64": BUNDLES / "gated-stable-64"}
CONNECTIONS = 32
SETTLED_S = 5.0  # longer than the measurements that the server makes after it is ready
SAMPLE_S = 0.1
READY_WITHIN_S = 120.0
MIB = 2**20
FIGURES = {
    "first_s": "first answer, s",
    "ready_s": "all models ready, s",
    "idle_mib": "resident, idle, MiB",
    "idle_anonymous_mib": "anonymous, idle, MiB",
    "load_mib": "resident, load, MiB",
    "load_anonymous_mib": "anonymous, load, MiB",
    "answers": "answers under load",
}
TIMES = ("first_s", "ready_s")


def shown(figure: str, spread: Spread) -> str:
    """Formats a figure: times with two decimals, other figures as integers."""
    return f"{spread:.2f}" if figure in TIMES else f"{spread:,.0f}"


@dataclass(frozen=True, slots=True)
class Subject:
    """The command and the working folder of one checkout's server."""

    name: str
    command: list[str]
    folder: Path


class Client:
    """A keep-alive connection to a server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_WITHIN_S)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, object]]:
        """Sends a request. Returns the answer's status and JSON document. The status is 0 if no server listens."""
        try:
            self._connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
            response = self._connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return 0, {}

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


@contextmanager
def started(subject: Subject, bundles: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, float]]:
    """Starts a server. Yields its process, its port, and the time when it was started, by `time.perf_counter`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [*subject.command, "--port", str(port), "--bundles", str(bundles), "--log-level", "warning"]
    environment = {**os.environ, "PYTHONPATH": str(subject.folder)}
    started_s = time.perf_counter()
    process = subprocess.Popen(command, cwd=subject.folder, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process, port, started_s
    finally:
        process.terminate()
        process.wait()


def wait(
    client: Client, process: subprocess.Popen[bytes], method: str, path: str, body: object, since_s: float
) -> float:
    """Repeats a request until it succeeds. Returns the number of seconds between `since_s`, a time by
    `time.perf_counter`, and the success."""
    while client.ask(method, path, body)[0] != 200:
        if process.poll() is not None or time.perf_counter() - since_s > READY_WITHIN_S:
            raise SystemExit(f"the server does not answer {method} {path}")
        time.sleep(0.01)
    return time.perf_counter() - since_s


def memory(pid: int) -> tuple[float, float]:
    """Returns a process's resident memory and the anonymous part of it, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kib["Rss"] * 1024 / MIB, kib["Anonymous"] * 1024 / MIB


def visit(port: int, models: list[str], seed: int, stop: Event, answers: list[int]) -> None:
    """Runs one client until `stop` is set. `answers[seed]` counts its successful answers."""
    choices = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [choices.randrange(2, 2000) for _ in range(count)]

    model = models[seed % len(models)]
    with closing(Client(port)) as client:
        _, created = client.ask("POST", "/v1/sessions", {"model": model})
        step = f"/v1/sessions/{created.get('session')}/tokens"
        while not stop.is_set():
            for path, body in (
                *((step, {"tokens": tokens(1)}) for _ in range(8)),
                *(("/v1/predict", {"model": model, "tokens": tokens(64), "mode": "window"}) for _ in range(4)),
                ("/v1/score", {"model": model, "tokens": tokens(choices.choice((200, 1000, 4000)))}),
                ("/v1/generate", {"model": model, "tokens": tokens(16), "max_tokens": 16}),
            ):
                answers[seed] += client.ask("POST", path, body)[0] == 200
                if stop.is_set():
                    break


def measure(subject: Subject, bundles: Path, seconds: float) -> dict[str, float]:
    """Starts a server. Returns the measured values of FIGURES."""
    with started(subject, bundles) as (process, port, started_s), closing(Client(port)) as client:
        first_s = wait(client, process, "POST", "/v1/predict", {"tokens": [5, 6, 7]}, started_s)
        ready_s = wait(client, process, "GET", "/readyz", None, started_s)
        time.sleep(SETTLED_S)
        idle = memory(process.pid)
        _, ready = client.ask("GET", "/readyz")
        listed = ready["models"]
        assert isinstance(listed, list)
        models = [str(model["model"]) for model in listed]
        stop, answers, most = Event(), [0] * CONNECTIONS, [0.0, 0.0]
        clients = [Thread(target=visit, args=(port, models, seed, stop, answers)) for seed in range(CONNECTIONS)]
        for thread in clients:
            thread.start()
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            most = [max(pair) for pair in zip(most, memory(process.pid), strict=True)]
            time.sleep(SAMPLE_S)
        stop.set()
        for thread in clients:
            thread.join()
    return {
        "first_s": first_s,
        "ready_s": ready_s,
        "idle_mib": idle[0],
        "idle_anonymous_mib": idle[1],
        "load_mib": most[0],
        "load_anonymous_mib": most[1],
        "answers": float(sum(answers)),
    }


def main() -> None:
    """Measures all servers, prints the table, and writes the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of the load, in seconds")
    parser.add_argument("--baseline", type=Path, metavar="FOLDER", help="another checkout of Wane to compare with")
    parser.add_argument("--module", default="wane", help="module that starts the server of FOLDER (default: wane)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    python = [sys.executable, "-m"]
    subjects = [Subject("wane", [*python, "wane", "serve"], ROOT)]
    if given.baseline is not None:
        subjects.insert(0, Subject("baseline", [*python, given.module, "serve"], given.baseline.resolve()))
    measured: dict[str, dict[str, list[dict[str, float]]]] = {
        served: {subject.name: [] for subject in subjects} for served in SERVED
    }
    for _ in range(given.repeats):
        for served, bundles in SERVED.items():
            for subject in subjects:
                measured[served][subject.name].append(measure(subject, bundles, given.seconds))
    table = Table("serves", "server", *FIGURES.values(), title=f"Median (least to most) of {given.repeats} starts")
    figures: dict[str, dict[str, dict[str, Spread]]] = {}
    for served, by_subject in measured.items():
        for name, runs in by_subject.items():
            spreads = {figure: Spread.of(run[figure] for run in runs) for figure in FIGURES}
            figures.setdefault(served, {})[name] = spreads
            table.add_row(served, name, *(shown(one, spreads[one]) for one in FIGURES))
    Console(width=200).print(table)
    if given.json is not None:
        load = {"connections": CONNECTIONS, "seconds": given.seconds, "repeats": given.repeats}
        write_json(given.json, {**provenance("benchmarks.start", "onnxruntime", "numpy"), **load, "servers": figures})


if __name__ == "__main__":
    main()
