"""Compares consistent hashing, which routes each session to its own replica, with plain round robin.

    python -m benchmarks.routing [--rounds N] [--seconds S] [--json FILE] [--page FILE]

The topology of docker-compose.yml runs as processes of this machine, with one model: three replicas, HAProxy, and
Redis, which writes every step to the disk before it answers. Each connection steps its own sessions in turn, by one
token per request, in a closed loop. Every round measures consistent hashing and round robin with the same replicas and
new sessions. Between the two measurements, only HAProxy is restarted, with another value of its variable BALANCE.

Server, clients, HAProxy and Redis share the machine. The last three columns of the table show the replicas' additional
work: states that were rebuilt, states to which tokens of other replicas were applied, and steps that were run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.bench.connections import READ_AT_ONCE, HttpAnswers, connect, http_request
from benchmarks.bench.open_loop import summary
from benchmarks.page import markdown, put
from benchmarks.summary import Spread, cpu, provenance, write_json
from deploy.stack.local import ROOT
from deploy.stack.stack import ENTRANCE, Stack, replicas

BUNDLE = ROOT / "models" / "bundles" / "gated-stable"
VOCABULARY = 2048
WAYS = {"a replica of its own": "", "round robin": "roundrobin"}
CONNECTIONS = 32
SESSIONS_EACH = 8
FIRST_TOKENS = 100
COUNTERS = {
    "rebuilt": "wane_state_rebuilds_total",
    "caught_up": "wane_state_replays_total",
    "conflicts": "wane_step_conflicts_total",
}
COLUMNS = (
    "routing",
    "steps/s: median (smallest to largest)",
    "p50, ms",
    "p99, ms",
    "steps from rebuilt states",
    "steps after other replicas' tokens",
    "steps run again",
)
NAME = "routing"


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round with one routing method.

    The last three fields are shares of all steps. rebuilt: the share of steps that were answered from a rebuilt state.
    caught_up: the share for which the replica first applied tokens that other replicas had appended. conflicts: the
    share that was run again because the session's revision in the store had changed.
    """

    way: str
    steps: int
    steps_per_s: float
    p50_ms: float
    p99_ms: float
    rebuilt: float
    caught_up: float
    conflicts: float


def counters(stack: Stack) -> dict[str, float]:
    """Returns, for each metric in COUNTERS, the sum of its values at all replicas."""
    found = dict.fromkeys(COUNTERS, 0.0)
    for replica in stack.replicas:
        with urllib.request.urlopen(f"{replica.url}/metrics") as answer:
            text = answer.read().decode()
        for name, metric in COUNTERS.items():
            found[name] += sum(float(value) for value in re.findall(rf"^{metric}\{{.*\}} (\S+)$", text, re.MULTILINE))
    return found


def begin(port: int, sessions: Sequence[str], random: Random) -> None:
    """Starts sessions with FIRST_TOKENS random tokens each."""
    answers, connection = HttpAnswers(), connect(port)
    with connection:
        for session in sessions:
            tokens = [random.randrange(1, VOCABULARY) for _ in range(FIRST_TOKENS)]
            for path, body in (
                ("/v1/sessions", {"session": session}),
                (f"/v1/sessions/{session}/tokens", {"tokens": tokens}),
            ):
                connection.sendall(http_request(path, json.dumps(body)))
                while answers.receive(connection.recv(READ_AT_ONCE)) is None:
                    pass


def steps(sessions: Sequence[str], random: Random) -> Iterator[bytes]:
    """Yields requests without end. Each request is a step with one random token, for the next of `sessions`."""
    for session in cycle(sessions):
        yield http_request(f"/v1/sessions/{session}/tokens", f'{{"tokens":[{random.randrange(1, VOCABULARY)}]}}')


def drive(port: int, sessions: Sequence[Sequence[str]], seconds: float, random: Random) -> list[float]:
    """Sends steps in a closed loop for `seconds`. There is one connection for each list in `sessions`. Each connection
    steps the sessions of its list in turn. Returns the latencies of the steps in seconds."""
    latencies: list[float] = []
    with selectors.DefaultSelector() as selector:
        begun = time.perf_counter()
        sent: dict[int, float] = {}
        opened = [connect(port) for _ in sessions]
        for connection, own in zip(opened, sessions, strict=True):
            requests = steps(own, random)
            selector.register(connection, selectors.EVENT_READ, (HttpAnswers(), requests))
            sent[connection.fileno()] = time.perf_counter()
            connection.sendall(next(requests))
        while sent:
            for key, _ in selector.select():
                answers, requests = key.data
                if answers.receive(key.fileobj.recv(READ_AT_ONCE)) is None:  # type: ignore[union-attr]
                    continue
                now = time.perf_counter()
                latencies.append(now - sent.pop(key.fd))
                if now - begun < seconds:
                    sent[key.fd] = now
                    key.fileobj.sendall(next(requests))  # type: ignore[union-attr]
        for connection in opened:
            connection.close()
    return latencies


def measure(stack: Stack, way: str, number: int, seconds: float) -> Round:
    """Measures one round with one routing method."""
    haproxy = stack.processes[ENTRANCE]
    haproxy.terminate()
    haproxy.wait()
    environment = {**haproxy.command.environment, "BALANCE": WAYS[way]}
    haproxy.command = replace(haproxy.command, environment=environment)
    haproxy.start()
    haproxy.wait_ready()
    random = Random(number)
    sessions = [
        [f"{NAME}-{number}-{WAYS[way]}-{connection}-{session}" for session in range(SESSIONS_EACH)]
        for connection in range(CONNECTIONS)
    ]
    begin(stack.port, [session for own in sessions for session in own], random)
    drive(stack.port, sessions, 1.0, random)
    before = counters(stack)
    begun = time.perf_counter()
    timed = summary(drive(stack.port, sessions, seconds, random), time.perf_counter() - begun)
    after = counters(stack)
    shares = {name: (after[name] - before[name]) / timed.requests for name in COUNTERS}
    return Round(way, timed.requests, timed.requests / seconds, timed.p50_ms, timed.p99_ms, **shares)


def ways_of(rounds: Sequence[Any], *figures: str) -> dict[str, dict[str, Any]]:
    """Returns, for each routing method, the numbers of rounds and steps, and the spread of each of `figures`."""
    found: dict[str, dict[str, Any]] = {}
    for way in dict.fromkeys(one.way for one in rounds):
        own = [one for one in rounds if one.way == way]
        spreads = {name: Spread.of(getattr(one, name) for one in own).model_dump() for name in figures}
        found[way] = {"rounds": len(own), "steps": sum(one.steps for one in own), **spreads}
    return found


def rows(ways: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yields a table row for each routing method."""
    for way, found in ways.items():
        yield [
            way,
            f"{Spread(**found['steps_per_s']):,.0f}",
            *(f"{found[name]['median']:.1f}" for name in ("p50_ms", "p99_ms")),
            *(f"{100 * found[name]['median']:.1f}%" for name in COUNTERS),
        ]


def main() -> None:
    """Measures consistent hashing and round robin, and writes the figures and the page's table."""
    parser = argparse.ArgumentParser("python -m benchmarks.routing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each round")
    parser.add_argument("--json", type=Path, default=Path("docs/figures/routing.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/stack.md"))
    options = parser.parse_args()
    every = {"WANE_BUNDLES": str(BUNDLE), "WANE_LOG_LEVEL": "warning"}
    rounds: list[Round] = []
    variables = dict.fromkeys(replicas(), every)
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), variables=variables) as stack:
        for number in range(options.rounds):
            for way in WAYS:
                rounds.append(measure(stack, way, number, options.seconds))
                print(rounds[-1], flush=True)
    ways = ways_of(rounds, "steps_per_s", "p50_ms", "p99_ms", *COUNTERS)
    table = markdown(COLUMNS, rows(ways))
    print("\n".join(table))
    sessions = f"{CONNECTIONS} connections, {CONNECTIONS * SESSIONS_EACH} sessions"
    how = f"{cpu()}, {os.cpu_count()} cores; {sessions}; {options.rounds} rounds of {options.seconds:g} s each"
    write_json(options.json, {**provenance("benchmarks.routing", bundles=["gated-stable"]), "how": how, "ways": ways})
    put(options.page, NAME, [f"{how}:", "", *table])


if __name__ == "__main__":
    main()
