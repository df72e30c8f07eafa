"""Simulates every session of a whole fleet: clients, HAProxy's ring, replicas and Redis.

Replicas may be killed and restarted. HAProxy detects a killed replica by its broken connections, and sends the requests
in flight to another replica. After the restart and a successful health check, HAProxy returns the sessions to the
replica during a slow start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import simpy

from research.scaling.costs import Costs
from research.scaling.memory import StateCache
from research.scaling.record import Record
from research.scaling.replica import Replica
from research.scaling.ring import Places, Ring, full, spread, starting
from research.scaling.shard import Shard
from research.scaling.worker import Cores, Then, Worker, after

CHECKED_S = 0.5
SLOWSTART_S = 10.0


@dataclass
class Shape:
    """The parameters of a fleet.

    replicas, shards, sessions: the numbers of replicas, of Redis servers, and of sessions.
    rate: the steps per second of each session.
    tokens: the number of tokens of every session.
    capacity: the largest number of states in a replica's memory.
    cores: the number of processors that all processes and clients share. If it is None, each thread has its own
        processor.
    client: whether the simulation includes the clients' processor time.
    fsync: Redis's setting `appendfsync`.
    slowstart_s: the duration of HAProxy's slow start, in seconds.
    warm: whether the states of all sessions are in memory at the start.
    """

    replicas: int = 3
    shards: int = 1
    sessions: int = 200
    rate: float = 1.25
    tokens: int = 40
    capacity: int = 28_000
    cores: int | None = None
    client: bool = False
    fsync: str = "always"
    closed: int | None = None
    """The number of connections of a closed loop. Each connection sends the steps of its own sessions one after
    another. If None, each session steps independently."""

    slowstart_s: float = SLOWSTART_S
    warm: bool = True


@dataclass(slots=True, eq=False)
class Step:
    """A step that is due and is not answered yet."""

    session: int
    due_s: float
    then: Then | None
    replica: int = 0
    over: bool = False


@dataclass
class Fleet:
    """A simulated fleet that runs in `env`. `record` contains the results of its steps."""

    costs: Costs
    shape: Shape
    seed: int
    env: simpy.Environment = field(default_factory=simpy.Environment)
    record: Record = field(default_factory=Record)

    def __post_init__(self) -> None:
        shape, env = self.shape, self.env
        self.random = np.random.default_rng(self.seed)
        self.cores = Cores(env, shape.cores) if shape.cores else None
        self.front, self.client = Worker(env, self.cores), Worker(env, self.cores)
        self.shards = [
            Shard(env, self.costs, np.random.default_rng((self.seed, 1, number)), fsync=shape.fsync, cores=self.cores)
            for number in range(shape.shards)
        ]
        self.places: Places = spread(self.random.integers(0, 2**32, shape.sessions, dtype=np.uint32))
        # the time at which each replica started, by replica number
        self.up: dict[int, float] = dict.fromkeys(range(1, shape.replicas + 1), -1e9)
        self.lost = 0  # the number of steps that were sent again because their replica was killed
        self.on_way: dict[int, set[Step]] = {number: set() for number in self.up}
        self.replicas = {number: self._replica() for number in self.up}
        self.on_return: Callable[[float], None] = lambda _: None
        self._deal()
        if shape.warm:
            for session, owner in enumerate(self.owners):
                self.replicas[int(owner)].states.use(session)

    def _replica(self) -> Replica:
        shape = self.shape
        cache = StateCache(shape.capacity)
        return Replica(self.env, self.costs, cache, self._store, held=shape.tokens, cores=self.cores, turns=True)

    def _deal(self) -> None:
        """Assigns every session to a replica by the ring, with the current weight of each replica."""
        points = {}
        for number, since_s in self.up.items():
            age_s = self.env.now - since_s
            points[number] = starting(age_s, self.shape.slowstart_s) if age_s < self.shape.slowstart_s else None
        whole = full(self.up)
        self.owners = Ring({number: points[number] or whole[number] for number in self.up}).owners(self.places)

    def _store(self, commands: int, then: Then) -> None:
        """Sends a trip of several commands to the store. Each command goes to a random shard (one of several Redis
        servers). Calls `then` after the last shard's answer."""
        count = len(self.shards)
        if count == 1:
            parts = [(self.shards[0], commands)]
        else:
            drawn = np.bincount(self.random.integers(0, count, commands), minlength=count)
            parts = [(self.shards[index], int(some)) for index, some in enumerate(drawn) if some]
        left = len(parts)

        def part() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for shard, some in parts:
            after(self.env, self.costs.wire_s, partial(shard.submit, some, part))

    def send(self, session: int, due_s: float, then: Then | None = None) -> None:
        """Sends a step. due_s: the time at which the step is due."""
        self.record.ask()
        step = Step(session, due_s, then)
        if self.shape.client:
            self.client.do(self.costs.client_s / 2, lambda: self._pass(step))
        else:
            self._pass(step)

    def _pass(self, step: Step) -> None:
        self.front.do(self.costs.front_s, lambda: self._hand(step))

    def _hand(self, step: Step) -> None:
        number = step.replica = int(self.owners[step.session])
        self.on_way[number].add(step)
        replica = self.replicas[number]

        def answered(refused: bool, rebuilt: bool) -> None:
            if step.replica == number and self.replicas[number] is replica and not step.over:
                step.over = True
                self.on_way[number].discard(step)
                if self.shape.client:
                    self.client.do(self.costs.client_s / 2, lambda: self._done(step, refused, rebuilt))
                else:
                    self._done(step, refused, rebuilt)

        replica.step(step.session, answered)

    def _done(self, step: Step, refused: bool, rebuilt: bool) -> None:
        self.record.answer(step.due_s, self.env.now, refused, rebuilt)
        if step.then is not None:
            step.then()

    def kill(self, number: int, back: bool = True) -> None:
        """Kills a replica, and restarts it immediately if `back` is True."""
        self.replicas[number] = self._replica()
        del self.up[number]
        self._deal()
        again, self.on_way[number] = self.on_way[number], set()
        self.lost += len(again)
        for step in sorted(again, key=lambda one: one.due_s):
            self._pass(step)
        if back:
            self.env.process(self._return(number))

    def _return(self, number: int) -> simpy.events.ProcessGenerator:
        """Restarts a replica. The replica loads its model, on the shared processors if there are any, and passes a
        health check. HAProxy then returns the sessions to it during the slow start."""
        loaded = self.env.event()
        if self.cores is not None:
            self.cores.take(self.costs.load_cpu_s, lambda: loaded.succeed())
            yield loaded
        else:
            yield self.env.timeout(self.costs.ready_s)
        yield self.env.timeout(CHECKED_S * float(self.random.random()))
        self.up[number] = self.env.now
        self.on_return(self.env.now)
        for _ in range(int(self.shape.slowstart_s) + 1):
            self._deal()
            yield self.env.timeout(1.0)

    def load(self, until_s: float) -> None:
        """Starts the clients. They send steps until `until_s`."""
        shape = self.shape
        if shape.closed is not None:
            each = shape.sessions // shape.closed
            for connection in range(shape.closed):
                self.env.process(self._connection(range(connection * each, (connection + 1) * each), until_s))
        else:
            for session in range(shape.sessions):
                self.env.process(self._session(session, until_s))

    def _connection(self, sessions: Iterable[int], until_s: float) -> simpy.events.ProcessGenerator:
        own = list(sessions)
        index = 0
        while self.env.now < until_s:
            answered = self.env.event()
            self.send(own[index % len(own)], self.env.now, answered.succeed)
            yield answered
            index += 1

    def _session(self, session: int, until_s: float) -> simpy.events.ProcessGenerator:
        random = np.random.default_rng((self.seed, 2, session))
        due = self.env.now
        while True:
            due += float(random.exponential(1 / self.shape.rate))
            if due >= until_s:
                return
            yield self.env.timeout(max(due - self.env.now, 0))
            answered = self.env.event()
            self.send(session, due, answered.succeed)
            yield answered

    def run(self, until_s: float, events: Iterable[tuple[float, Callable[[], None]]] = ()) -> Record:
        """Runs the clients until `until_s`, then continues until all steps are answered. events: pairs of a time in
        seconds and a function to call at that time."""
        for at_s, event in events:
            after(self.env, at_s - self.env.now, event)
        self.load(until_s)
        self.env.run()
        return self.record
