"""Simulates the latencies of one replica and of one Redis at rising rates, up to the rate at which tail latencies rise
steeply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from research.scaling.costs import Costs, Limits
from research.scaling.sample import Sample
from research.scaling.shard import response_times

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
STEPS = 12_000
HELD = 256
SHARD_LOAD = 0.5
MOST_PER_S = 10_000.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The planned load of one replica, and results of the simulation at this load. A trip to the store sends several
    commands to Redis at once and waits for all answers.

    steps_per_s: the planned number of steps per second.
    loop_s: the seconds per step for which the event loop's thread is busy.
    runner_s: the seconds per step for which the runner's thread is busy.
    trips: the number of trips to the store per step.
    p99_ms: the p99 latency of a step.
    """

    steps_per_s: float
    loop_s: float
    runner_s: float
    trips: float
    p99_ms: float


def at(costs: Costs, steps_per_s: float, trips_s: Any, seed: int = 0) -> dict[str, float]:
    """Simulates one replica at a given rate of steps. The states of all its sessions are in memory. trips_s: the
    durations of trips to the store from which the simulation draws (see `trips_of`)."""
    sample = Sample(
        costs,
        sessions=10_000,
        away=0,
        rate=steps_per_s / 10_000,
        capacity=10_000,
        held=HELD,
        trips_s=trips_s,
        seed=seed,
    )
    seconds = STEPS / steps_per_s
    record = sample.run(seconds)
    found = record.between(0.1 * seconds, seconds)
    replica = sample.replica
    return {
        "steps_per_s": steps_per_s,
        "p50_ms": found["p50_ms"],
        "p99_ms": found["p99_ms"],
        "refused_share": found["refused_share"],
        "loop_share": replica.loop.busy_s / seconds,
        "runner_share": replica.runner.busy_s / seconds,
        "trips": replica.trips / max(replica.steps, 1),
    }


def shard_rates(costs: Costs, fsync: str, commands: float) -> list[dict[str, float]]:
    """Simulates one Redis at rising rates of trips. Each trip has `commands` commands on average."""
    least_s = costs.store_trip_s + commands * costs.store_command_s
    found = []
    for share in SHARES:
        trips_per_s = share / least_s
        taken = 1e3 * response_times(costs, trips_per_s, commands, STEPS, 0, fsync=fsync)
        p50, p99 = (float(value) for value in np.percentile(taken, (50, 99)))
        found.append({"commands_per_s": trips_per_s * commands, "p50_ms": p50, "p99_ms": p99})
    return found


def trips_of(costs: Costs, fsync: str = "always", commands: float = 1.0) -> Any:
    """Returns the duration in seconds of each simulated trip to a shard (one of several Redis servers) whose thread is
    busy half of the time."""
    least_s = costs.store_trip_s + commands * costs.store_command_s
    return response_times(costs, SHARD_LOAD / least_s, commands, STEPS, 0, fsync=fsync)


def curve(costs: Costs, trips_s: Any) -> list[dict[str, float]]:
    """Simulates one replica at rising rates of steps. The highest rate is near the capacity of the event loop."""
    most = 1.0 / (costs.loop_step_s + costs.loop_batch_s / 4)
    return [at(costs, share * most, trips_s) for share in SHARES]


def plan(costs: Costs, limits: Limits, trips_s: Any) -> Plan:
    """Returns the plan with the highest rate of steps at which the event loop's thread is busy for at most the share
    `limits.load` of the time. Finds this rate by bisection."""
    low, high = 10.0, MOST_PER_S
    for _ in range(9):
        middle = (low + high) / 2
        if at(costs, middle, trips_s)["loop_share"] <= limits.load:
            low = middle
        else:
            high = middle
    found = at(costs, low, trips_s)
    return Plan(low, found["loop_share"] / low, found["runner_share"] / low, found["trips"], found["p99_ms"])
