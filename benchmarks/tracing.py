"""Measures the duration of a session's step over HTTP without traces, with a trace that is not sampled, and with a
sampled trace.

    python -m benchmarks.tracing [--rounds N] [--json FILE] [--page FILE]

Three servers run with one model. One of them sends no traces. The others send traces to a real collector, one with the
sampling ratio 0, one with the ratio 1. `WAYS` lists the cases. Each case has one connection, which sends steps of one
token one after another. In each round, every case sends a hundred steps. All processes share the machine. Needs the
extras `otel` and `dev`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.page import markdown, put
from benchmarks.summary import cpu, provenance, rounded, write_json
from deploy.stack.local import ROOT
from tests.service.live_server import live_server
from tests.stack.harness.receiver import receiver

BUNDLE = ROOT / "models" / "bundles" / "gated-stable"
PAGE = "docs/observability.md"
FIGURES = "docs/figures/tracing.json"
NAME = "tracing"
EACH = 100
WARM_UP = 5  # number of rounds at the beginning whose times are dropped
NOT_SAMPLED = {"traceparent": f"00-{1:032x}-{1:016x}-00"}
SHARE_0 = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
COLUMNS = ("a step", "median, µs", "p90, µs")
WAYS: dict[str, tuple[Mapping[str, str] | None, Mapping[str, str]]] = {
    "no endpoint": (None, {}),
    "no endpoint, with a `traceparent`": (None, NOT_SAMPLED),
    "traced, its parent not sampled": (SHARE_0, NOT_SAMPLED),
    "traced, a share of 0 without a parent": (SHARE_0, {}),
    "traced and sampled, four spans": ({}, {}),
}
"""For each case, the environment variables of its server, and the headers of its requests. The variables are None for
the server that has no address of a collector."""


class Client:
    """A client that sends the steps of one session, with the headers of its case."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.headers = {"content-type": "application/json", **headers}
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"))
        self.connection.connect()
        self.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.path = "/v1/sessions"
        session = json.loads(self.ask("{}"))["session"]
        self.path = f"/v1/sessions/{session}/tokens"
        self.took_s: list[float] = []

    def ask(self, body: str) -> bytes:
        self.connection.request("POST", self.path, body, self.headers)
        return self.connection.getresponse().read()

    def steps(self) -> list[float]:
        """Sends EACH steps. Returns the duration of each step, in seconds."""
        took_s: list[float] = []
        for _ in range(EACH):
            started_s = time.perf_counter()
            self.ask('{"tokens":[5]}')
            took_s.append(time.perf_counter() - started_s)
        return took_s


def measure(rounds: int) -> dict[str, list[float]]:
    """Returns the durations of all steps by case, in seconds."""
    with ExitStack() as running:
        collector = running.enter_context(receiver())
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
        servers: dict[str, str] = {}
        clients: dict[str, Client] = {}
        for way, (variables, headers) in WAYS.items():
            own = {} if variables is None else {**endpoint, **variables}
            known = json.dumps(own, sort_keys=True)
            if known not in servers:
                servers[known] = running.enter_context(live_server(WANE_BUNDLES=str(BUNDLE), **own)).url
            clients[way] = Client(servers[known], headers)
        for number in range(WARM_UP + rounds):
            for client in clients.values():
                took_s = client.steps()
                if number >= WARM_UP:
                    client.took_s += took_s
        for client in clients.values():
            client.connection.close()
        return {way: client.took_s for way, client in clients.items()}


def lines(document: dict[str, Any]) -> list[str]:
    """Returns a description of the measurement and the table, as lines of Markdown."""
    rows = [(way, f"{found['median_us']:.0f}", f"{found['p90_us']:.0f}") for way, found in document["ways"].items()]
    return [f"{document['how']}:", "", *markdown(COLUMNS, rows)]


def main() -> None:
    """Measures all cases, and writes the figures and the page's table."""
    parser = argparse.ArgumentParser("python -m benchmarks.tracing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, default=Path(FIGURES))
    parser.add_argument("--page", type=Path, default=Path(PAGE))
    options = parser.parse_args()
    found = measure(options.rounds)
    ways = {
        way: {"median_us": 1e6 * statistics.median(took_s), "p90_us": 1e6 * statistics.quantiles(took_s, n=10)[-1]}
        for way, took_s in found.items()
    }
    how = f"{cpu()}, {os.cpu_count()} cores; `python -m benchmarks.tracing`, {options.rounds} rounds of {EACH} steps"
    origin = provenance("benchmarks.tracing", "opentelemetry-sdk", bundles=["gated-stable"])
    document = rounded({**origin, "how": how, "ways": ways})
    write_json(options.json, document)
    put(options.page, NAME, lines(document))
    print("\n".join(lines(document)))


if __name__ == "__main__":
    main()
