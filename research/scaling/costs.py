"""The inputs of the simulation: measured costs and assumed prices.

`research/figures/scaling_costs.json` contains the results of `measure`. The bytes of a model's state are from
`docs/figures/stores.json`. `check.py` compares the simulation with other measurements. No input is fitted to those
measurements.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wane.service.settings import STATE_CHECKPOINT_INTERVAL_TOKENS

FIGURES = Path("research/figures")
BENCHMARKS = Path("docs/figures")
FILE = FIGURES / "scaling_costs.json"
MODEL = "gated-stable"
MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of steps over HTTP, with a Redis that all replicas share, and settings of the service. Seconds are busy
    seconds of one thread, unless stated otherwise. A trip to the store sends several commands at once and waits for all
    answers.

    loop_step_s: seconds of the replica's event loop per step.
    loop_batch_s: seconds of the event loop per batch, including the batch's trip to the store.
    loop_rebuilt_s: additional seconds of the event loop for a step whose state is rebuilt.
    run_batch_s: seconds of a model's run per batch of steps.
    run_step_s: additional seconds of this run for each step in the batch.
    windows: pairs (number of tokens, seconds of the run that rebuilds a state from these tokens).
    restored_s: seconds of the run that rebuilds a state from a stored state and the tokens after it. The number of
        these tokens is half of a checkpoint interval on average.
    front_s: seconds of HAProxy per request.
    store_trip_s: seconds of Redis's thread per trip.
    store_command_s: additional seconds of Redis's thread for each command in the trip.
    write_s: quantiles of the duration of a write to the disk, by the value of Redis's setting `appendfsync`.
    client_s: seconds of the load generator per step.
    ready_s: elapsed seconds from a replica's restart until it is ready.
    load_cpu_s: CPU seconds of this restart.
    state_bytes: bytes of the state of one session.
    replica_session_bytes: bytes of memory of one session in a replica, including its state.
    replica_base_bytes: bytes of memory of a replica without sessions.
    store_session_bytes: bytes of memory of one session in Redis.
    front_bytes: network bytes of HAProxy per step.
    store_bytes: network bytes of Redis per step.
    policy: what the store keeps of a session (see `read`).
    """

    loop_step_s: float
    loop_batch_s: float
    loop_rebuilt_s: float
    run_batch_s: float
    run_step_s: float
    windows: tuple[tuple[float, float], ...]
    restored_s: float
    front_s: float
    store_trip_s: float
    store_command_s: float
    write_s: dict[str, tuple[float, ...]]
    client_s: float
    ready_s: float
    load_cpu_s: float
    state_bytes: float
    replica_session_bytes: float
    replica_base_bytes: float
    store_session_bytes: float
    front_bytes: float
    store_bytes: float
    policy: str = "tail"
    wire_s: float = 5e-5
    """The one-way network latency in seconds. The default is for one machine. Between machines the latency is a
    parameter of the simulation."""

    max_batch_size: int = 64
    max_queue: int = 1024
    trips: int = 2
    """The largest number of a replica's concurrent trips to the store."""

    def window_s(self, tokens: int) -> float:
        """Returns the seconds of a model's run over a window of `tokens` tokens."""
        return window_s(self.windows, tokens)


def window_s(windows: Sequence[tuple[float, float]], tokens: int) -> float:
    """Returns the seconds of a model's run over a window. Interpolates linearly between measurements. For windows
    longer than the longest measured one, the time is proportional to the number of tokens."""
    (low, low_s), *rest = windows
    for high, high_s in rest:
        if tokens <= high:
            return low_s + max(tokens - low, 0) * (high_s - low_s) / (high - low)
        low, low_s = high, high_s
    return low_s * tokens / low


def read(policy: str = "tail", file: Path = FILE) -> Costs:
    """Reads the measured costs. policy: `tail` if the store contains only the last tokens of a session, `state` if it
    also contains the session's state."""
    return of(json.loads(file.read_text(encoding="utf-8")), policy)


def of(document: dict[str, Any], policy: str) -> Costs:
    """Returns the costs from the JSON document of `measure`."""
    found = document["policies"][policy]
    some, few, crowded = (found[name] for name in ("some", "few", "crowded"))
    loop_batch, loop_step = two_parts(few, crowded, "loop_us", "batches")
    run_batch, run_step = two_parts(few, crowded, "runner_us", "batches")
    trip, command = two_parts(few, crowded, "store_us", "trips")
    stores = json.loads((BENCHMARKS / "stores.json").read_text(encoding="utf-8"))
    windows = tuple((one["tokens"], 1e-3 * one["compute_ms"]) for one in document["window_ms"])
    plain = [MICRO * 1e3 * value for value in document["write_ms"]["everysec"]]
    return Costs(
        loop_step_s=MICRO * loop_step,
        loop_batch_s=MICRO * loop_batch,
        loop_rebuilt_s=MICRO * max(statistics.mean(one["loop_more_us"] for one in found["moved"]), 0),
        run_batch_s=MICRO * run_batch,
        run_step_s=MICRO * run_step,
        windows=windows,
        restored_s=MICRO * max(statistics.mean(one["runner_more_us"] for one in found["moved"]), 0)
        + window_s(windows, STATE_CHECKPOINT_INTERVAL_TOKENS // 2),
        front_s=MICRO * some["front_us"],
        store_trip_s=MICRO * trip,
        store_command_s=MICRO * command,
        write_s={
            fsync: tuple(max(MICRO * 1e3 * value - statistics.median(plain), 0) for value in values)
            for fsync, values in document["write_ms"].items()
        },
        client_s=MICRO * some["client_us"],
        ready_s=statistics.median(one["ready_s"] for one in found["restarts"]),
        load_cpu_s=statistics.median(one["cpu_s"] for one in found["restarts"]),
        state_bytes=float(stores["state_bytes"][MODEL]),
        replica_session_bytes=found["memory"]["replica_session_bytes"],
        replica_base_bytes=found["memory"]["replica_base_bytes"],
        store_session_bytes=found["memory"]["store_session_bytes"],
        front_bytes=some["front_bytes"],
        store_bytes=some["store_bytes"],
        policy=policy,
    )


def two_parts(few: dict[str, float], crowded: dict[str, float], cost: str, per: str) -> tuple[float, float]:
    """Computes two parts of a mean cost per step: the cost of a batch (or trip), and the additional cost of each step
    in it. Replaces negative results by 0.

    few, crowded: the mean values per step under two loads. cost: the key of the cost. per: the key of the number of
        batches (or trips).
    """
    batch = max((few[cost] - crowded[cost]) / (few[per] - crowded[per]), 0.0)
    return batch, max(few[cost] - batch * few[per], 0.0)


@dataclass(frozen=True, slots=True)
class Prices:
    """Assumed prices of a core and of a GiB of memory, per hour. They are close to the on-demand prices of
    general-purpose cloud machines.

    The longest step interval at which keeping a state costs less than rebuilding it depends only on the ratio of the
    two prices. Total costs are proportional to the prices.
    """

    core_hour: float = 0.040
    gib_hour: float = 0.005
    currency: str = "USD"


@dataclass(frozen=True, slots=True)
class Limits:
    """The planned limits of one replica, one Redis, one HAProxy and one network link."""

    load: float = 0.6
    """The largest planned share of the time in which a thread is busy."""

    state_budget_bytes: float = 256 * 2**20
    """The bytes of memory for the states of a replica (WANE_STATE_BUDGET_BYTES)."""

    store_gib: float = 24.0
    """The memory for the sessions in one Redis, in GiB."""

    network_bytes_per_s: float = 1e9 / 8
    """The network bandwidth of a replica or a Redis in bytes per second: 1 Gbit/s for both directions together."""

    front_cores: float = 2.0
