"""Runs a soak test: minutes of session churn at 80 % of the server's capacity. The server and the clients each count
all requests.

    python -m benchmarks.soak [--minutes M] [--load SHARE] [--hostile] [--workers N] [--json FILE] [--figure FILE]

Clients of a real server create, step, read, rewind and delete sessions, or leave them to expire. Some clients hang up
after sending a step and send it again. There are several times more sessions than the state pool has slots, so that
states are constantly evicted and rebuilt. First, the soak measures the capacity: the rate of the clients' actions in a
closed loop on every connection, with server and clients on the same CPU cores. Then the clients act in an open loop, at
a share of the capacity.

With `--hostile`, the server requires keys, and hostile clients attack it at the same time (`attacks.py`). The answers
to hostile clients are checked separately. No request may end in a status of 500 or more.

Passes (exit code 0) if all of these are true: every answer was as expected; no request ended in a status of 500 or
more; the server's counts of requests by route and status equal the clients' counts; the server, which aborts if its
states are inconsistent, still runs at the end, and no worker of it has ended; the server's resident memory grew by at
most 1 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.soak.attacks import Target
from benchmarks.soak.connection import Connection
from benchmarks.soak.hostile import Hostiles, keys
from benchmarks.soak.plot import plot
from benchmarks.soak.server import Server
from benchmarks.soak.visitors import ROUTES, Ledger, Visitors, closed, opened
from benchmarks.summary import provenance, write_json
from wane.models.bundle import Bundle
from wane.service.settings import Settings

SHIPPED = Path("models/bundles/gated-stable")
CONNECTIONS = 64
STATES = 250
LIVELY, OTHERS = 400, 1700
SESSION_TTL_S = 30
MEASURED_S = 20.0
SETTLING = 0.2  # share of the soak's time, at its start, in which the server's memory may still grow
GROWTH = 0.01  # accepted relative growth of the server's memory in the time after SETTLING
SAMPLED_S = 1.0
SLICE_S = 10.0  # length of a slice of time in the figure
SEED = 0
IDLE_S = 5.0  # idle time after the load, in which the server checks its invariants
COMPARED = 40
PROBABILITY = 1e-3  # tolerated difference between the probabilities of one token in two exact answers
# If an answer comes from a rebuilt state, its probabilities may additionally differ by its error bound, but by at most
# NEARLY.
NEARLY = 0.05


@dataclass
class Samples:
    """Samples of the server over time. seconds: the time of each sample since the first one. rebuilt: the number of
    states that the server has rebuilt since its start. requests: the number of requests since the server's start."""

    seconds: list[float] = field(default_factory=list)
    resident_mib: list[float] = field(default_factory=list)
    rebuilt: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)

    def over_time(self) -> dict[str, list[float]]:
        """Returns the figures in slices of SLICE_S seconds: the time in the middle of each slice, the memory at this
        time, and the numbers of rebuilt states and of requests per second in the slice."""
        edges = np.append(np.arange(0, self.seconds[-1], SLICE_S), self.seconds[-1])
        at_s = (edges[1:] + edges[:-1]) / 2
        found = {"at_s": at_s, "resident_mib": np.interp(at_s, self.seconds, self.resident_mib)}
        for name, counted in (("rebuilt_per_s", self.rebuilt), ("requests_per_s", self.requests)):
            found[name] = np.diff(np.interp(edges, self.seconds, counted)) / np.diff(edges)
        return {name: values.round(1).tolist() for name, values in found.items()}

    def memory(self) -> dict[str, float]:
        """Returns the median memory in the first and in the last quarter of the time after SETTLING, in MiB."""
        settled = np.array(self.resident_mib)[int(SETTLING * len(self.resident_mib)) :]
        quarter = len(settled) // 4
        return {"settled": float(np.median(settled[:quarter])), "end": float(np.median(settled[-quarter:]))}


async def sample(server: Server, samples: Samples) -> None:
    """Samples the server once a second until cancelled."""
    begun_s = time.monotonic()
    while True:
        counts = await asyncio.to_thread(server.counts)
        samples.seconds.append(time.monotonic() - begun_s)
        samples.resident_mib.append(server.resident_bytes() / 2**20)
        samples.rebuilt.append(sum_of(counts, "wane_state_rebuilds_total"))
        samples.requests.append(sum_of(counts, "wane_http_requests_total"))
        await asyncio.sleep(SAMPLED_S)


def sum_of(counts: dict[str, float], name: str) -> float:
    """Returns the sum of a metric over all its labels. Raises KeyError for an unknown metric."""
    found = [value for key, value in counts.items() if key.split(":")[0] == name]
    if not found:
        raise KeyError(name)
    return sum(found)


async def soak(
    server: Server,
    ledger: Ledger,
    minutes: float,
    share: float,
    key: str | None = None,
    hostiles: Hostiles | None = None,
    measured_s: float = MEASURED_S,
) -> dict[str, Any]:
    """Runs the whole soak. key: the API key of the visitors, which are the clients that behave well. hostiles: the
    hostile clients, if any."""
    visitors = Visitors(ledger)
    connections = [Connection(server.port, key) for _ in range(CONNECTIONS)]
    await visitors.populate(connections[0], LIVELY, OTHERS)
    await closed(connections, visitors, measured_s / 4)
    capacity = await closed(connections, visitors, measured_s)
    rate = share * capacity
    print(f"capacity: {capacity:.0f} actions/s; the soak runs {minutes:g} minutes at {rate:.0f} actions/s", flush=True)
    ledger.latencies_s.clear()
    samples = Samples()
    sampling = asyncio.create_task(sample(server, samples))
    async with AsyncExitStack() as beside:
        if hostiles is not None:
            await beside.enter_async_context(hostiles.beside())
        actions = await opened(connections, visitors, rate, 60 * minutes)
    sampling.cancel()
    compared = await compare(connections[0], ledger)
    for connection in connections:
        connection.close()
    await asyncio.sleep(IDLE_S)
    p50, p90, p99 = (1e3 * float(value) for value in np.percentile(ledger.latencies_s, (50, 90, 99)))
    return {
        "capacity": capacity,
        "rate": rate,
        "actions": actions,
        "compared": compared,
        "over_time": samples.over_time(),
        "resident_mib": samples.memory(),
        "latency_ms": {"p50": p50, "p90": p90, "p99": p99},
    }


async def compare(connection: Connection, ledger: Ledger) -> int:
    """For at most COMPARED sessions, compares the prediction from the session with the prediction from all tokens of
    the session. Returns the number of compared sessions.

    The probabilities in the two predictions may differ by at most PROBABILITY. If the session's state was rebuilt from
    the session's last tokens, the answer's error bound, but at most NEARLY, is added to this limit.
    """
    now_s = time.monotonic()
    there = [kept for kept in ledger.lively if kept.tokens and now_s - kept.touched_s < ledger.ttl_s / 2]
    chosen = random.sample(there, min(COMPARED, len(there)))
    for kept in chosen:
        probabilities, bounds = [], []
        bodies: tuple[dict[str, object], ...] = ({"session": kept.name}, {"tokens": kept.tokens, "mode": "recurrent"})
        for body in bodies:
            reply = await connection.ask("POST", "/v1/predict", body)
            ledger.count("predict", reply)
            probabilities.append({one["token_id"]: one["probability"] for one in reply.body["predictions"]})
            bounds.append(reply.body["error_bound"])
        (first, second), (apart, exact) = probabilities, bounds
        most = PROBABILITY + min(apart, NEARLY)
        if exact or any(abs(first[token] - second[token]) > most for token in first.keys() & second.keys()):
            ledger.wrong.append(
                f"the prediction from session {kept.name} was {first} with error bound {apart}; "
                f"the prediction from its tokens was {second}"
            )
    return len(chosen)


def differences(ledger: Ledger, before: dict[str, float], after: dict[str, float], others: bool = False) -> list[str]:
    """Returns the differences between the server's counts and the clients' counts.

    For a request whose client hung up, the server may count any status. If `others` is true, hostile clients also send
    requests, so the server's counts may be higher than the clients' counts.
    """
    found = []
    for method, route in sorted(set(ROUTES.values())):
        key = f"wane_http_requests_total:method={method}:route={route}:status="
        served = {
            status.removeprefix(key): round(value - before.get(status, 0))
            for status, value in after.items()
            if status.startswith(key)
        }
        asked = ledger.asked[f"{method} {route}"]
        if sum(served.values()) < asked or (sum(served.values()) > asked and not others):
            found.append(
                f"{method} {route}: {sum(served.values())} requests counted by the server, {asked} by the clients"
            )
        left = asked - sum(n for name, n in ledger.answered.items() if name.rpartition(" ")[0] == f"{method} {route}")
        for status, count in served.items():
            here = ledger.answered[f"{method} {route} {status}"]
            if count < here or (count > here + left and not others):
                found.append(f"{method} {route} {status}: {count} counted by the server, {here} by the clients")
    return found


def failures(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Returns a message for each pair of a route and a status of 500 or more with which the server has answered
    requests."""
    return [
        f"{name}: {value - before.get(name, 0):.0f}"
        for name, value in after.items()
        if name.startswith("wane_http_requests_total:") and ":status=5" in name and value > before.get(name, 0)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--load",
        type=float,
        help="rate of actions as a share of the capacity (default 0.8; 0.5 with --hostile)",
    )
    parser.add_argument("--hostile", action="store_true", help="require keys, and add hostile clients")
    parser.add_argument("--workers", type=int, default=1, help="the number of the server's processes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--log", type=Path, default=Path("soak.log"), help="the server's log file")
    arguments = parser.parse_args()
    share = arguments.load or (0.5 if arguments.hostile else 0.8)
    result = run(arguments.minutes, share, arguments.log, hostile=arguments.hostile, workers=arguments.workers)
    show(result)
    if arguments.json is not None:
        write_json(arguments.json, {**provenance("benchmarks.soak", "onnxruntime"), "seed": SEED, **result})
    if arguments.figure is not None:
        plot(result, arguments.figure)
    return 0 if result["passed"] else 1


def run(
    minutes: float, share: float, log: Path, *, hostile: bool, measured_s: float = MEASURED_S, workers: int = 1
) -> dict[str, Any]:
    """Runs a server with visitors and, if `hostile`, hostile clients. Returns the result."""
    manifest = Bundle.open(SHIPPED).manifest
    floats = manifest.architecture.hidden + sum(int(np.prod(tensor.shape)) for tensor in manifest.state)
    settings: dict[str, object] = {
        "bundles": SHIPPED,
        "state_budget_bytes": 4 * floats * STATES,
        "session_ttl_s": SESSION_TTL_S,
        "log_level": "info",
        "check_invariants": True,
    }
    random.seed(SEED)
    ledger = Ledger(manifest.vocabulary.size, SESSION_TTL_S)
    with ExitStack() as stack:
        key, hostiles, own = None, None, None
        if hostile:
            own = stack.enter_context(keys())
            key, settings["api_keys_file"] = own.visitor, own.file
        server = stack.enter_context(Server(settings, log, key, workers))
        if own is not None:
            target = Target(
                server.port,
                own.hostile,
                Settings().max_body_bytes,
                manifest.vocabulary.size,
                lambda: [kept.name for kept in ledger.lively],
            )
            hostiles = Hostiles(target)
        before = server.counts()
        result = asyncio.run(soak(server, ledger, minutes, share, key, hostiles, measured_s))
        after = server.counts()
        ledger.wrong += server.ended_workers
    if hostiles is not None:
        result["hostile"] = {name: dict(told) for name, told in sorted(hostiles.told.items())}
        ledger.wrong += hostiles.wrong
    return result | {"load": share, "workers": workers} | verdict(result, ledger, before, after)


def verdict(
    result: dict[str, Any],
    ledger: Ledger,
    before: dict[str, float],
    after: dict[str, float],
) -> dict[str, Any]:
    """Returns the counts, the errors, and whether the soak passed."""
    memory = result["resident_mib"]
    counted = {
        name: round(sum_of(after, f"wane_{name}_total") - sum_of(before, f"wane_{name}_total"))
        for name in ("state_rebuilds", "states_evicted", "queue_rejected", "queue_failed")
    }
    apart = differences(ledger, before, after, others="hostile" in result)
    failed = failures(before, after)
    return {
        "asked": dict(ledger.asked),
        "answered": dict(ledger.answered),
        "outcomes": dict(ledger.outcomes),
        "states": dict(ledger.states),
        "server": counted,
        "wrong": ledger.wrong[:20],
        "counted_differently": apart,
        "failed": failed,
        "passed": not ledger.wrong and not failed and not apart and memory["end"] <= memory["settled"] * (1 + GROWTH),
    }


def show(result: dict[str, Any]) -> None:
    """Prints the result as a table."""
    table = Table(title="passed" if result["passed"] else "FAILED", show_header=False)
    for name in (
        "capacity",
        "rate",
        "actions",
        "latency_ms",
        "answered",
        "outcomes",
        "states",
        "compared",
        "server",
        "resident_mib",
        "wrong",
        "counted_differently",
        "failed",
        "hostile",
    ):
        value = result.get(name)
        table.add_row(name, f"{value:,.0f}" if isinstance(value, float | int) else json.dumps(value, indent=1))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
