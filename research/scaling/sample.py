"""Simulates one replica of a large fleet in detail. Its sessions are a population, and the rest of the fleet is
background load.

One replica is sufficient for two reasons. Sessions step independently, so the steps at a replica are a Poisson process
with the sum of the sessions' rates, and which session steps next does not depend on the past (`memory.py`). Replicas
share only HAProxy and Redis. HAProxy and Redis serve so many replicas that one replica's own requests hardly affect
their latency. The time of a trip to Redis is therefore drawn from a separate simulation of one shard, which receives
the trips of all replicas (a mean field). Events at other replicas are simulated as sessions that join and leave.

Therefore the simulation of a fleet with 10^8 sessions has no more events than the simulation of one replica with 10^4
sessions. `tests/research/scaling/test_sample.py` shows that this simulation and that of a whole fleet (`fleet.py`)
agree where both can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import simpy
from numpy.typing import NDArray

from research.scaling.costs import Costs
from research.scaling.memory import Population
from research.scaling.record import Record
from research.scaling.replica import Item, Replica
from research.scaling.worker import Then, after
from wane.service.batching.cost_model import CostModel
from wane.service.batching.scheduler import FairScheduler


class Sample:
    """A simulation of one replica. Scenarios add sessions to its population `states`, or remove sessions, during the
    run."""

    def __init__(
        self,
        costs: Costs,
        *,
        sessions: int,
        away: int,
        rate: float,
        capacity: int,
        held: int,
        trips_s: NDArray[np.float64],
        shards: int = 1,
        seed: int = 0,
        queue: Callable[[int, CostModel], FairScheduler[Item]] = FairScheduler,
    ) -> None:
        """sessions: the number of the replica's sessions.
        away: the number of these sessions that are new to the replica.
        rate: the steps per second of each session.
        capacity: the largest number of states in the replica's memory.
        held: the number of last tokens that the service keeps of each session.
        trips_s: durations of trips to one shard, in seconds. The simulation draws from them.
        shards: the number of shards. A trip takes as long as its slowest shard."""
        self.env = simpy.Environment()
        self.random = np.random.default_rng(seed)
        self.record = Record()
        self.rate = rate
        self.states = Population(sessions, capacity, self.random, away=away)
        self.replica = Replica(self.env, costs, self.states, self._store, held=held, queue=queue)
        self.cold: list[tuple[float, int]] = []
        self._costs = costs
        self._trips_s = trips_s
        self._shards = shards

    def _store(self, commands: int, then: Then) -> None:
        parts = commands if self._shards == 1 else len(set(self.random.integers(0, self._shards, commands).tolist()))
        draws = 1 if self._shards == 1 else parts
        drawn = self._trips_s[self.random.integers(0, len(self._trips_s), draws)]
        after(self.env, self._costs.wire_s + float(drawn.max()), then)

    def run(self, until_s: float, events: Iterable[tuple[float, Callable[[], None]]] = ()) -> Record:
        """Sends steps until `until_s`, then continues until all steps are answered. events: pairs of a time in seconds
        and a function to call at that time."""
        for at_s, event in events:
            after(self.env, at_s, event)
        self.env.process(self._arrivals(until_s))
        self.env.run()
        return self.record

    def _arrivals(self, until_s: float) -> simpy.events.ProcessGenerator:
        """Sends steps as a Poisson process with the population's total rate, which changes with the number of
        sessions."""
        number = 0
        while True:
            rate = self.rate * self.states.sessions
            yield self.env.timeout(float(self.random.exponential(1 / rate)))
            due_s = self.env.now
            if due_s >= until_s:
                return
            if number % 1000 == 0:
                self.cold.append((due_s, self.states.away))
            number += 1
            self.record.ask()
            after(self.env, self._costs.front_s, lambda due_s=due_s: self._step(due_s))  # type: ignore[misc]

    def _step(self, due_s: float) -> None:
        self.replica.step(0, lambda refused, rebuilt: self.record.answer(due_s, self.env.now, refused, rebuilt))
