"""Simulates the loss, the deployment and the addition of replicas, at the replica whose latency rises most.

The number of replicas in the fleet matters only for the share of sessions that an event moves. A replica has its
planned load before each event. Sessions that move to the replica are `away` (their states are not in this replica's
memory). Their states are rebuilt at their next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.storm import FirstCome
from research.scaling.capacity import HELD, Plan
from research.scaling.costs import Costs, Limits
from research.scaling.fleet import SLOWSTART_S
from research.scaling.ring import POINTS, Ring, full, places
from research.scaling.sample import Sample
from wane.service.batching.scheduler import FairScheduler

BEFORE_S, AFTER_S, SLICE_S = 10.0, 60.0, 2.0
QUEUES: dict[str, Callable[..., Any]] = {"fair": FairScheduler, "first come": lambda most, _: FirstCome(most)}
SLOWSTARTS = (0.0, 10.0, 60.0, 180.0)
RINGS = (3, 10, 30, 100, 300)
KEYS = 20_000
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """The parameters that are common to all scenarios. think_s: the mean seconds between two steps of a session."""

    costs: Costs
    plan: Plan
    limits: Limits
    trips_s: Any
    shards: int
    think_s: float
    seed: int = 0

    @property
    def sessions(self) -> int:
        """The number of sessions of one replica."""
        return round(self.plan.steps_per_s * self.think_s)

    def sample(self, sessions: int, away: int, queue: str = "fair") -> Sample:
        """Returns a simulated replica whose memory has room for the states of all its sessions."""
        return Sample(
            self.costs,
            sessions=sessions,
            away=away,
            rate=1 / self.think_s,
            capacity=10 * self.sessions,
            held=HELD,
            trips_s=self.trips_s,
            shards=self.shards,
            seed=self.seed,
            queue=QUEUES[queue],
        )


def lost(setting: Setting, share: float, queue: str = "fair", after_s: float = AFTER_S) -> Result:
    """Simulates a remaining replica after the loss of a share of all replicas at once.

    The remaining replica receives its share of the lost replicas' sessions. None of the states of these sessions are in
    its memory.
    """
    sample = setting.sample(setting.sessions, 0, queue)
    more = round(setting.sessions * share / (1 - share))
    events = [(BEFORE_S, lambda: sample.states.join(more))] if more else []
    record = sample.run(BEFORE_S + after_s, events)
    slices = record.over_time(BEFORE_S, BEFORE_S + after_s, SLICE_S)
    calm = record.between(1.0, BEFORE_S)
    storm = record.between(BEFORE_S, BEFORE_S + after_s)
    return {
        "share": share,
        "queue": queue,
        "moved_here": more,
        "calm_p99_ms": calm["p99_ms"],
        **storm_of(slices, calm["p99_ms"], BEFORE_S),
        "rebuilt": storm["rebuilt"],
        "first_rebuilt_per_s": slices[0]["rebuilt"] / SLICE_S,
        "refused_share": storm["refused_share"],
        "loop_share": sample.replica.loop.busy_s / (BEFORE_S + after_s),
        "slices_p99_ms": p99_over_time(slices),
    }


def p99_over_time(slices: list[Result]) -> list[float | None]:
    """Returns the p99 latency in ms of the steps with resident states for each time slice, rounded to two decimals."""
    return [None if one["resident_p99_ms"] is None else round(one["resident_p99_ms"], 2) for one in slices]


def storm_of(slices: list[Result], calm_ms: float, begun_s: float) -> Result:
    """Returns the highest p99 latency of all time slices, separately for steps with resident and with rebuilt states.
    Also returns the number of seconds from the event (`begun_s`) until the p99 of steps with resident states is at most
    twice its value before the event (`calm_ms`) and stays there.
    """

    def worst(name: str) -> float | None:
        return max((one[name] for one in slices if one[name] is not None), default=None)

    raised = [
        one["at_s"] + SLICE_S / 2 - begun_s
        for one in slices
        if one["resident_p99_ms"] is not None and one["resident_p99_ms"] > 2 * calm_ms
    ]
    return {
        "worst_resident_p99_ms": worst("resident_p99_ms"),
        "worst_rebuilt_p99_ms": worst("rebuilt_p99_ms"),
        "raised_s": max(raised, default=0.0),
    }


def joined(setting: Setting, slowstart_s: float, after_s: float) -> Result:
    """Simulates a new or restarted replica. The replica's sessions arrive in sixteen groups during the slow start, or
    all at once if `slowstart_s` is 0. None of their states are in memory."""
    steps = POINTS if slowstart_s else 1
    first = setting.sessions // steps
    sample = setting.sample(first, first)
    more = [(slowstart_s * number / POINTS, lambda: sample.states.join(first)) for number in range(1, steps)]
    record = sample.run(after_s, more)
    slices = record.over_time(0.0, after_s, SLICE_S)
    calm = record.between(0.8 * after_s, after_s)
    return {
        "slowstart_s": slowstart_s,
        "sessions": setting.sessions,
        "late_p99_ms": calm["p99_ms"],
        **storm_of(slices, calm["p99_ms"], 0.0),
        "rebuilt": sum(record.rebuilt),
        "refused": record.refused,
        "slices_p99_ms": p99_over_time(slices),
    }


def deployed(setting: Setting, replicas: int, at_once: float, notice_s: float = 2.0) -> Result:
    """Computes a rolling restart of all replicas, in which a share of the replicas restarts at a time. Returns the
    duration, the number of rebuilt states, and the highest rate of rebuilds in the whole fleet.

    The state of a session that steps while its replica restarts is rebuilt at another replica. After the restart the
    state of every session is rebuilt at its own replica. notice_s: the seconds until HAProxy notices that a replica
    shuts down.
    """
    together = max(1, int(at_once * replicas))
    each_s = notice_s + setting.costs.ready_s + SLOWSTART_S
    away_s = setting.costs.ready_s + SLOWSTART_S / 2
    stepped = 1 - float(
        np.exp(-away_s / setting.think_s)
    )  # the share of the moved sessions that step before they move back
    sessions = replicas * setting.sessions
    peak = together * setting.sessions / setting.think_s
    return {
        "replicas": replicas,
        "at_once": together,
        "takes_s": each_s * -(-replicas // together),
        "rebuilt_elsewhere": sessions * stepped,
        "rebuilt_back": sessions,
        "rebuilt_for_each_session": 1 + stepped,
        "most_rebuilt_per_s": peak,
    }


def ring_changes() -> list[Result]:
    """Counts the sessions that HAProxy's ring moves when a replica is added or lost, and compares their number with the
    number of necessary moves."""
    keys = places(f"session-{number}" for number in range(KEYS))
    found = []
    for replicas in RINGS:
        before = Ring(full(range(1, replicas + 1)))
        owners = before.owners(keys)
        more = Ring(full(range(1, replicas + 2))).owners(keys)
        fewer = Ring(full(range(2, replicas + 1))).owners(keys)
        moved, kept = more != owners, owners != 1
        shares = np.array(list(before.shares().values()))
        found.append(
            {
                "replicas": replicas,
                "added_moves": float(moved.mean()),
                "added_must": 1 / (replicas + 1),
                "added_moves_elsewhere": int((moved & (more != replicas + 1)).sum()),
                "lost_moves": float((fewer != owners).mean()),
                "lost_moves_others": int((fewer != owners)[kept].sum()),
                "largest_share": float(shares.max() * replicas),
                "least_share": float(shares.min() * replicas),
            }
        )
    return found
