"""Compares Ray Serve's proxy with HAProxy, each in front of two replicas of Wane.

    python -m benchmarks.clusters [--rounds N] [--seconds S] [--json FILE] [--page FILE]

There are two clusters, one for each proxy. A cluster has two replicas of one model, and a Redis that writes every step
to the disk before it answers. Ray Serve runs as `scripts/ray` with `deploy/ray/serve.yaml`. HAProxy runs in the stack
of docker-compose.yml, without its third replica. Both proxies route all steps of a session to the same replica. Each
connection steps its own sessions in turn, by one token per request, in a closed loop. Every round starts and measures
first one cluster, then the other. Servers, clients and Redis share the machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

from benchmarks.bench.open_loop import summary
from benchmarks.page import markdown, put
from benchmarks.routing import BUNDLE, CONNECTIONS, SESSIONS_EACH, begin, drive, ways_of
from benchmarks.summary import Spread, cpu, provenance, write_json
from deploy.stack.local import ROOT
from deploy.stack.stack import Stack, replicas

NAME = "clusters"
COLUMNS = ("two replicas behind", "steps/s: median (smallest to largest)", "p50, ms", "p99, ms")
SERVE = ROOT / "deploy" / "ray" / "serve.yaml"
VARIABLES = {"WANE_BUNDLES": str(BUNDLE), "WANE_LOG_LEVEL": "warning"}
PORT = 18_640
WARM_UP_S = 2.0
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round with one of the proxies."""

    way: str
    steps: int
    steps_per_s: float
    p50_ms: float
    p99_ms: float


@contextmanager
def haproxy() -> Iterator[int]:
    """Starts the stack, stops one of its replicas, and yields HAProxy's port."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder), variables=dict.fromkeys(replicas(), VARIABLES)) as it,
    ):
        it.replicas[-1].terminate()
        it.replicas[-1].wait()
        yield it.port


@contextmanager
def ray() -> Iterator[int]:
    """Starts Ray Serve and yields the port of its proxy."""
    document = yaml.safe_load(SERVE.read_text(encoding="utf-8"))
    document["applications"][0]["args"]["log_level"] = VARIABLES["WANE_LOG_LEVEL"]
    with tempfile.TemporaryDirectory(prefix="wane-") as folder:
        configuration = Path(folder) / "serve.yaml"
        configuration.write_text(yaml.safe_dump(document), encoding="utf-8")
        command = [sys.executable, "-m", "deploy.ray", f"--config={configuration}", f"--port={PORT}"]
        command += [f"--folder={folder}/redis", f"--ray-folder={folder}/ray"]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **VARIABLES}, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process.stdout:
            if not any(": ready at " in line for line in process.stdout):
                raise SystemExit("scripts/ray ended before it was ready")
            try:
                yield PORT
            finally:
                process.send_signal(signal.SIGINT)
                process.stdout.read()
                process.wait(WAIT_S)


WAYS: dict[str, Callable[[], AbstractContextManager[int]]] = {"HAProxy": haproxy, "Ray Serve's proxy": ray}


def measure(way: str, number: int, seconds: float) -> Round:
    """Measures one round with one of the proxies."""
    random = Random(number)
    sessions = [[f"{NAME}-{one}-{other}" for other in range(SESSIONS_EACH)] for one in range(CONNECTIONS)]
    with WAYS[way]() as port:
        begin(port, [session for own in sessions for session in own], random)
        drive(port, sessions, WARM_UP_S, random)
        begun = time.perf_counter()
        timed = summary(drive(port, sessions, seconds, random), time.perf_counter() - begun)
    return Round(way, timed.requests, timed.requests / seconds, timed.p50_ms, timed.p99_ms)


def rows(ways: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yields a table row for each proxy."""
    for way, found in ways.items():
        latencies = (f"{found[name]['median']:.1f}" for name in ("p50_ms", "p99_ms"))
        yield [way, f"{Spread(**found['steps_per_s']):,.0f}", *latencies]


def main() -> None:
    """Measures both proxies, and writes the figures and the page's table."""
    parser = argparse.ArgumentParser("python -m benchmarks.clusters", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each round")
    parser.add_argument("--json", type=Path, default=Path("docs/figures/clusters.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/clusters.md"))
    options = parser.parse_args()
    rounds: list[Round] = []
    for number in range(options.rounds):
        for way in WAYS:
            rounds.append(measure(way, number, options.seconds))
            print(rounds[-1], flush=True)
    ways = ways_of(rounds, "steps_per_s", "p50_ms", "p99_ms")
    table = markdown(COLUMNS, rows(ways))
    print("\n".join(table))
    sessions = f"{CONNECTIONS} connections, {CONNECTIONS * SESSIONS_EACH} sessions"
    how = f"{cpu()}, {os.cpu_count()} cores; {sessions}; {options.rounds} rounds of {options.seconds:g} s each"
    write_json(options.json, {**provenance("benchmarks.clusters", bundles=["gated-stable"]), "how": how, "ways": ways})
    put(options.page, NAME, [f"{how}:", "", *table])


if __name__ == "__main__":
    main()
