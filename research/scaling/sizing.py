"""How many of each for so many sessions, what each is used to, what saturates first, and what it costs.

Demands are products of rates and measured costs, for one replica as it was simulated at the load that is planned with.
Sessions step once in `think_s` seconds on average. A replica keeps as many states as its pool has room for; of sessions
that step alike, the share that is resident is the share of steps that find theirs (`memory.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from research.scaling.capacity import Plan
from research.scaling.costs import Costs, Limits, Prices

GIB = 2**30
WINDOW = 64
THREADS = 2
"""Processors of a replica: its loop's, and its runner's."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of a fleet. Cores and GiB are what is used at these rates divided by the planned load: what has to be there."""

    sessions: float
    think_s: float
    resident: float
    steps_per_s: float
    replicas: int
    shards: int
    fronts: int
    cores: dict[str, float]
    gib: dict[str, float]
    network_bytes_per_s: float

    def cost(self, prices: Prices) -> float:
        """Money an hour."""
        return prices.core_hour * sum(self.cores.values()) + prices.gib_hour * sum(self.gib.values())

    def per_million(self, value: float) -> float:
        """Of anything, for a million sessions."""
        return 1e6 * value / self.sessions


def size(costs: Costs, plan: Plan, limits: Limits, sessions: float, think_s: float, resident: float = 1.0) -> Size:
    """`resident`: the share of the sessions whose states have room."""
    rate = sessions / think_s
    missed = 1 - resident
    loop = rate * (plan.loop_s + missed * costs.loop_rebuilt_s) / limits.load
    rebuilt_s = costs.window_s(WINDOW) if costs.policy == "tail" else costs.restored_s
    runner = rate * (plan.runner_s + missed * rebuilt_s) / limits.load
    store = rate * (plan.trips * costs.store_trip_s + costs.store_command_s) / limits.load
    front = rate * costs.front_s / limits.load
    tail = costs.replica_session_bytes - costs.state_bytes
    states = sessions * resident * costs.state_bytes / GIB
    kept = sessions * costs.store_session_bytes / GIB
    replicas = max(1, math.ceil(max(loop, runner)))
    shards = max(1, math.ceil(max(store, kept / limits.store_gib)))
    return Size(
        sessions=sessions,
        think_s=think_s,
        resident=resident,
        steps_per_s=rate,
        replicas=replicas,
        shards=shards,
        fronts=max(1, math.ceil(front / limits.front_cores)),
        cores={"replicas": loop + runner, "Redis": store, "HAProxy": front},
        gib={
            "states": states,
            "replicas, the rest": sessions * tail / GIB + replicas * costs.replica_base_bytes / GIB,
            "Redis": kept,
        },
        network_bytes_per_s=rate * (costs.front_bytes + costs.store_bytes),
    )


def saturated_at(costs: Costs, plan: Plan, limits: Limits, think_s: float) -> dict[str, float]:
    """Sessions at which one of each is used to its limit: one replica with its state pool as it is set, one Redis, one
    HAProxy, one network. The least is what saturates first in a stack of one of each."""
    each = size(costs, plan, limits, 1e6, think_s)
    cores = {name: each.per_million(value) / 1e6 for name, value in each.cores.items()}
    loop = 1 / think_s * plan.loop_s / limits.load
    return {
        "replica's event loop": 1 / loop,
        "replica's runner": 1 / (think_s**-1 * plan.runner_s / limits.load),
        "state pool (256 MiB): all states resident": limits.state_budget_bytes / costs.state_bytes,
        "Redis's processor": 1 / cores["Redis"],
        f"Redis's memory ({limits.store_gib:.0f} GiB)": limits.store_gib * GIB / costs.store_session_bytes,
        f"HAProxy ({limits.front_cores:.0f} cores)": limits.front_cores / cores["HAProxy"],
        "network (1 Gbit/s)": limits.network_bytes_per_s * think_s / (costs.front_bytes + costs.store_bytes),
    }


def worth_keeping_s(costs: Costs, prices: Prices, limits: Limits) -> float:
    """A state is worth its memory if it is used more often than once in so many seconds: what it costs to rebuild it
    once, against what its bytes cost for that long."""
    tokens = costs.window_s(WINDOW) if costs.policy == "tail" else costs.restored_s
    rebuild = (costs.loop_rebuilt_s + tokens) / limits.load * prices.core_hour / 3600
    return rebuild / (costs.state_bytes / GIB * prices.gib_hour / 3600)
