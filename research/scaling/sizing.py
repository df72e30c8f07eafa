"""Computes the sizes of fleets: the number of replicas, Redis and HAProxy instances, their resources, the first
bottleneck, and the cost.

The required amount of a resource is the product of the steps per second and the amount that one step needs. The costs
of a replica are those of the simulation at the planned load. Sessions step once in `think_s` seconds on average. A
replica keeps as many states in memory as fit into its state pool. If all sessions have equal rates, the share of
resident states is also the share of steps that find their state in memory (`memory.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from research.scaling.capacity import Plan
from research.scaling.costs import Costs, Limits, Prices

GIB = 2**30
WINDOW = 64
THREADS = 2
"""The processors of a replica: one for its event loop and one for its runner."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a fleet.

    think_s: the mean seconds between two steps of a session.
    resident: the share of the sessions whose states are in memory.
    replicas, shards, fronts: the numbers of replicas, of Redis servers, and of HAProxy servers.
    cores: the required cores, by part of the fleet: the used cores divided by the planned load of a core.
    gib: the required GiB of memory, by part of the fleet.
    """

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
        """Returns the fleet's cost per hour."""
        return prices.core_hour * sum(self.cores.values()) + prices.gib_hour * sum(self.gib.values())

    def per_million(self, value: float) -> float:
        """Scales a value of the fleet to a million sessions."""
        return 1e6 * value / self.sessions


def size(costs: Costs, plan: Plan, limits: Limits, sessions: float, think_s: float, resident: float = 1.0) -> Size:
    """Returns the size of a fleet. resident: the share of the sessions whose states are in memory."""
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
    """Returns the numbers of sessions at which one replica, one Redis, one HAProxy and one network link reach their
    limits. In a stack with one of each, the part with the smallest number is the first bottleneck.
    """
    each = size(costs, plan, limits, 1e6, think_s)
    cores = {name: each.per_million(value) / 1e6 for name, value in each.cores.items()}
    loop = 1 / think_s * plan.loop_s / limits.load
    # If all batches of steps are short, they run on the event loop, and the runner's thread is idle.
    runner = {"replica's runner": think_s * limits.load / plan.runner_s} if plan.runner_s else {}
    return {
        "replica's event loop": 1 / loop,
        **runner,
        "state pool (256 MiB): all states resident": limits.state_budget_bytes / costs.state_bytes,
        "Redis's processor": 1 / cores["Redis"],
        f"Redis's memory ({limits.store_gib:.0f} GiB)": limits.store_gib * GIB / costs.store_session_bytes,
        f"HAProxy ({limits.front_cores:.0f} cores)": limits.front_cores / cores["HAProxy"],
        "network (1 Gbit/s)": limits.network_bytes_per_s * think_s / (costs.front_bytes + costs.store_bytes),
    }


def worth_keeping_s(costs: Costs, prices: Prices, limits: Limits) -> float:
    """Returns the step interval, in seconds, for which the memory of a state costs as much as one rebuild. For shorter
    intervals, it is cheaper to keep the state in memory.
    """
    tokens = costs.window_s(WINDOW) if costs.policy == "tail" else costs.restored_s
    rebuild = (costs.loop_rebuilt_s + tokens) / limits.load * prices.core_hour / 3600
    return rebuild / (costs.state_bytes / GIB * prices.gib_hour / 3600)
