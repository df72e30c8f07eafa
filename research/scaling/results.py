"""Computes all results of the simulation from the costs, as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from research.scaling.capacity import curve, plan, shard_rates, trips_of
from research.scaling.costs import Costs, Limits, Prices
from research.scaling.scenarios import QUEUES, SLOWSTARTS, Setting, deployed, joined, lost, ring_changes
from research.scaling.sizing import Size, saturated_at, size, worth_keeping_s
from research.scaling.skew import skew

SESSIONS = tuple(10**power for power in range(5, 9))
THINKS_S = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
THINK_S = 20.0
EXPONENTS = (0.0, 0.4, 0.6, 0.8, 1.0, 1.2)
ZONE = 1 / 3
JOINED_S = 100.0
AT_ONCE = 0.05
Result = dict[str, Any]
Advance = Callable[[str], None]


def compute(
    costs: dict[str, Costs], limits: Limits, prices: Prices, wire_s: float, advance: Advance = lambda _: None
) -> Result:
    """Computes the document of all results. costs: the costs by the store's policy. wire_s: the one-way latency between
    two machines."""
    document: Result = {"think_s": THINK_S, "thinks_s": THINKS_S, "wire_s": wire_s}
    document |= {"limits": asdict(limits), "prices": asdict(prices)}
    document["ring"] = ring_changes()
    advance("ring")
    document["policies"] = {}
    for policy, own in costs.items():
        document["policies"][policy] = of_policy(own, limits, prices, advance)
    tail = document["policies"]["tail"]["sizes"]
    document["skew"] = {}
    most_per_s = 1e3 / document["policies"]["tail"]["curve"]["p50_ms"][0]
    for one in tail:
        sessions, replicas = int(one["sessions"]), one["replicas"]
        found = [
            skew(sessions, replicas, one["steps_per_s"], exponent, most_per_s).document() for exponent in EXPONENTS
        ]
        document["skew"][str(sessions)] = {"replicas": replicas, **columns(found)}
        advance(f"skew of {sessions:,}")
    return document


def of_policy(costs: Costs, limits: Limits, prices: Prices, advance: Advance) -> Result:
    """Computes sizes and scenarios for one policy of the store."""
    name = costs.policy
    trips_s = trips_of(costs)
    planned = plan(costs, limits, trips_s)
    found: Result = {"plan": asdict(planned), "curve": columns(curve(costs, trips_s))}
    advance(f"{name}: capacity")
    found["shard"] = {fsync: columns(shard_rates(costs, fsync, 1.0)) for fsync in ("always", "everysec")}
    advance(f"{name}: Redis")
    found["worth_keeping_s"] = worth_keeping_s(costs, prices, limits)
    found["saturated_at"] = columns([saturated_at(costs, planned, limits, think_s) for think_s in THINKS_S])
    sizes = [size(costs, planned, limits, sessions, THINK_S) for sessions in SESSIONS]
    found["sizes"] = [document_of(one, prices) for one in sizes]
    crowded = [share_in_memory(costs, limits, planned.steps_per_s * think_s) for think_s in THINKS_S]
    found["by_think"] = {
        kind: columns([per_million(size(costs, planned, limits, 1e6, *one), prices) for one in given])
        for kind, given in (
            ("all resident", [(think_s,) for think_s in THINKS_S]),
            ("state pool as it is set", list(zip(THINKS_S, crowded, strict=True))),
        )
    }
    settings = [Setting(costs, planned, limits, trips_s, one.shards, THINK_S) for one in sizes]
    found["lost"] = [
        {"sessions": one.sessions, "replicas": one.replicas, **without_slices(lost(setting, 1 / one.replicas))}
        for one, setting in zip(sizes, settings, strict=True)
    ]
    advance(f"{name}: a replica lost")
    small = Setting(costs, planned, limits, trips_s, 1, THINK_S)
    found["lost_zone"] = [lost(settings[-1], ZONE, queue) for queue in QUEUES]
    advance(f"{name}: a third lost")
    found["joined"] = [joined(small, slowstart_s, JOINED_S + slowstart_s) for slowstart_s in SLOWSTARTS]
    advance(f"{name}: a replica joins")
    found["deployed"] = [deployed(setting, one.replicas, AT_ONCE) for one, setting in zip(sizes, settings, strict=True)]
    advance(f"{name}: deploys")
    return found


def without_slices(found: Result) -> Result:
    """Returns a scenario's results without its time slices, for the page's table."""
    return {name: value for name, value in found.items() if name != "slices_p99_ms"}


def share_in_memory(costs: Costs, limits: Limits, sessions: float) -> float:
    """Returns the share of a replica's sessions whose states fit into the state pool."""
    return min(1.0, limits.state_budget_bytes / costs.state_bytes / sessions)


def document_of(one: Size, prices: Prices) -> Result:
    """Returns a fleet's size for JSON, with the hourly cost of a million sessions."""
    assert math.isfinite(one.steps_per_s)
    return {**asdict(one), "million_an_hour": one.per_million(one.cost(prices))}


def per_million(one: Size, prices: Prices) -> Result:
    """Returns the resources and the hourly cost for a million sessions, and the share of sessions whose states are in
    memory."""
    return {
        "resident": one.resident,
        **{f"cores: {name}": one.per_million(value) for name, value in one.cores.items()},
        **{f"GiB: {name}": one.per_million(value) for name, value in one.gib.items()},
        "an_hour": one.per_million(one.cost(prices)),
    }


def columns(rows: Sequence[Result]) -> dict[str, list[Any]]:
    """Converts a list of dictionaries with equal keys to one list of values per key."""
    return {name: [row[name] for row in rows] for name in rows[0]}
