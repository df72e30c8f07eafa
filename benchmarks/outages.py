"""Measures how long clients wait while replicas are killed.

    python -m benchmarks.outages [--kills N]

The stack runs as local processes: three replicas behind HAProxy, with sessions in Redis. Each of 200 sessions takes
1.25 steps a second. After 15 seconds, a replica is killed with SIGKILL every ten seconds and restarted immediately. An
outage lasts from a kill until the killed replica is ready again. A step's latency is measured from its due time to its
answer and includes all retries. Prints the longest latency and three p99s: before the kills, outside the outages, and
during the outages. The time before the kills is divided into slices of five seconds. The p99 before the kills is the
median of the slices' p99s. The time after the first kill is divided into slices of ten seconds. The p99 outside the
outages is the median of the p99s of these slices, without the steps that were in flight during an outage. It includes
steps of sessions that move back to a restarted replica. On a machine with few cores, loading a model takes CPU time
from the other replicas. tests/stack/test_killed_replicas.py tests that killed replicas lose no step.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from deploy.stack.stack import Stack, replicas
from tests.stack.harness.load_generator import failures, histories, longest_gap_s, open_clients, stepping
from tests.stack.harness.session_client import SessionClient
from wane.models.bundle import Bundle
from wane.service.settings import Settings

BUNDLE = Path("models/bundles/gated-stable")
SESSIONS = 200
FIRST_TOKENS = 40
RATE = 1.25
SETTLING_S = 5.0
UNDISTURBED_S = 15.0
SLICE_S = 5.0
KILL_EVERY_S = 10.0

Span = tuple[float, float]


def slices(start_s: float, count: int, each_s: float) -> list[Span]:
    """Returns `count` consecutive spans of `each_s` seconds. The first span starts at `start_s`."""
    return [(start_s + number * each_s, start_s + (number + 1) * each_s) for number in range(count)]


def p99_ms(clients: Iterable[SessionClient], spans: Sequence[Span], outside: Sequence[Span] = ()) -> float:
    """Returns the p99 latency of the steps that were due in one of `spans`. Leaves out steps that were in flight during
    one of the spans in `outside`.

    Returns NaN if no step is left.
    """
    latencies = [
        timed.latency_s * 1e3
        for client in clients
        for timed in client.timed
        if any(start <= timed.due_s < end for start, end in spans)
        and not any(timed.due_s < end and timed.ended_s > start for start, end in outside)
    ]
    return float(np.percentile(latencies, 99)) if latencies else math.nan


async def measure(stack: Stack, kills: int) -> dict[str, float]:
    """Kills replicas while clients send steps. Returns the figures by name. Exits if a step failed or was lost."""
    clock = asyncio.get_running_loop().time
    outages: list[Span] = []
    async with open_clients(stack.port, [FIRST_TOKENS] * SESSIONS) as clients:
        async with stepping(clients, RATE):
            start_s = clock() + SETTLING_S
            calm = slices(start_s, int(UNDISTURBED_S / SLICE_S), SLICE_S)
            storm = slices(start_s + UNDISTURBED_S, kills, KILL_EVERY_S)
            for number, (kill_s, _) in enumerate(storm):
                await asyncio.sleep(kill_s - clock())
                victim, killed_s = stack.replicas[number % len(stack.replicas)], clock()
                await asyncio.to_thread(victim.kill)
                victim.start()
                await asyncio.to_thread(victim.wait_ready)
                outages.append((killed_s, clock()))
            await asyncio.sleep(storm[-1][1] - clock())
        session_history_tokens = max(Settings().session_history_tokens, Bundle.open(BUNDLE).manifest.max_window)
        if wrong := [*failures(clients), *await histories(clients, stack.store, session_history_tokens)]:
            raise SystemExit("\n".join(wrong))
    before = statistics.median(p99_ms(clients, [span]) for span in calm)
    beside = statistics.median(p99_ms(clients, [span], outages) for span in storm)
    return {
        "steps": sum(len(client.timed) for client in clients),
        "steps sent again by clients": sum(client.repeated for client in clients),
        "longest latency, s": longest_gap_s(clients),
        "longest outage, s": max(end - begun for begun, end in outages),
        "p99 before the kills, ms": before,
        "p99 outside the outages, ms": beside,
        "p99 in the outages, ms": p99_ms(clients, outages),
        "p99 outside / before": beside / before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=6, help="number of kills (default: %(default)s)")
    options = parser.parse_args()
    if options.kills < 1:
        parser.error(f"--kills is {options.kills}, but must be at least 1")
    variables = {name: {"WANE_BUNDLES": str(BUNDLE.absolute())} for name in replicas()}
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), variables=variables) as stack:
        figures = asyncio.run(measure(stack, options.kills))
    table = Table(title=f"{SESSIONS} sessions, {options.kills} kills", show_header=False)
    for name, figure in figures.items():
        table.add_row(name, f"{figure:,.2f}" if isinstance(figure, float) else f"{figure:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
