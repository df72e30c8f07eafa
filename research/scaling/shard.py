"""Simulates one Redis that stores the sessions. In each round, Redis's thread takes all waiting commands, runs them,
writes to the disk once, and answers.

With `appendfsync always` all answers of one round wait for the same write, whatever the number of commands. The disk
then limits the rounds per second, and the processor limits the commands per second. With `everysec` another thread
writes to the disk, and no answer waits for the write.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import simpy

from research.scaling.costs import Costs
from research.scaling.worker import Cores, Then, Worker, after


class Shard:
    """A simulated Redis. A trip is a group of commands that a replica sends at once."""

    def __init__(
        self,
        env: simpy.Environment,
        costs: Costs,
        random: np.random.Generator,
        *,
        fsync: str = "always",
        cores: Cores | None = None,
    ) -> None:
        self._env = env
        self._costs = costs
        self._thread = Worker(env, cores)
        self._write_s = np.array(costs.write_s[fsync]) if fsync == "always" else np.zeros(1)
        self._random = random
        self._waiting: list[tuple[int, Then]] = []
        self._round = False
        self.commands = 0
        self.busy_s = 0.0

    def submit(self, commands: int, then: Then) -> None:
        """Queues a trip. Calls `then` when the trip's answers have arrived at the replica."""
        self._waiting.append((commands, then))
        if not self._round:
            self._begin()

    def _begin(self) -> None:
        trips, self._waiting = self._waiting, []
        self._round = True
        count = sum(commands for commands, _ in trips)
        self.commands += count
        seconds = len(trips) * self._costs.store_trip_s + count * self._costs.store_command_s
        written_s = float(self._write_s[self._random.integers(len(self._write_s))])
        self.busy_s += seconds + written_s
        self._thread.do(seconds, lambda: after(self._env, written_s, lambda: self._answer(trips)))

    def _answer(self, trips: list[tuple[int, Then]]) -> None:
        for _, then in trips:
            after(self._env, self._costs.wire_s, then)
        self._round = False
        if self._waiting:
            self._begin()


def response_times(
    costs: Costs, trips_per_s: float, commands: float, count: int, seed: int, *, fsync: str = "always"
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Simulates the trips of many replicas to one of many shards (Redis servers), as a Poisson process. A trip has
    `commands` commands on average. Returns the seconds of each trip, without the first tenth of all trips.
    """
    env, random = simpy.Environment(), np.random.default_rng(seed)
    shard = Shard(env, costs, random, fsync=fsync)
    taken: list[float] = []

    def arrivals() -> simpy.events.ProcessGenerator:
        for gap in random.exponential(1 / trips_per_s, count):
            yield env.timeout(float(gap))
            begun = env.now
            size = 1 + int(random.poisson(max(commands - 1, 0)))
            shard.submit(size, lambda begun=begun: taken.append(env.now - begun))  # type: ignore[misc]

    env.process(arrivals())
    env.run()
    return np.array(taken[count // 10 :])


Store = Callable[[int, Then], None]
"""A function that sends a replica's trip. Its arguments are the number of commands, and a function that it calls when
the answers have arrived."""
