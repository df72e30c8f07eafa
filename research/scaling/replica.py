"""Simulates one replica: an event loop, a runner's thread with the service's queue, and trips to the store. A trip
sends several commands to Redis at once.

The simulation executes the service's `service/batching/scheduler.py`. Therefore the queue, the choice of the next batch
and the limit of rebuilds are not models: they are the service's own code. The durations of the model's runs are
measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import simpy

from research.scaling.costs import Costs
from research.scaling.memory import Found, States
from research.scaling.shard import Store
from research.scaling.worker import Cores, Then, Worker
from wane.models.manifest import Role
from wane.service.batching.batch import Work
from wane.service.batching.cost_model import CostModel
from wane.service.batching.scheduler import FairScheduler
from wane.service.engine.routing import COST_TOLERANCE
from wane.service.engine.step import MOST_USES, REBUILD_EMA_ALPHA

PIECE = 512
WINDOW = 64
"""A state that will be used for few steps only is rebuilt from this number of last tokens. Any other state is rebuilt
from all tokens that the service keeps (see `_rebuilt_from`)."""

DEADLINE_S = 30.0
"""The timeout of a request (WANE_REQUEST_TIMEOUT_MS), counted from its arrival at the event loop."""


@cache
def work(tokens: int) -> Work:
    """Returns the scheduler's work item: a step if `tokens` is 1, otherwise a window of `tokens` tokens."""
    return Work("step") if tokens == 1 else Work("window", np.zeros(tokens, np.int64))


@dataclass(slots=True, eq=False)
class Item:
    """A step that waits for the runner."""

    work: Work
    found: Found
    session: int
    then: Callable[[bool, bool], None]
    begun_s: float


class Replica:
    """Simulates the steps at one replica. Calls `then(refused, rebuilt)` at the end of each step."""

    def __init__(
        self,
        env: simpy.Environment,
        costs: Costs,
        states: States,
        store: Store,
        *,
        held: int,
        queue: Callable[[int, CostModel], FairScheduler[Item]] = FairScheduler,
        cores: Cores | None = None,
        turns: bool = False,
    ) -> None:
        """held: the number of last tokens that the service keeps of each session. turns: whether a session's step waits
        until the session's earlier steps are answered. If it is True, `states` must distinguish individual sessions
        (`StateCache`).
        """
        self._env = env
        self._costs = costs
        self.states = states
        self._store = store
        self._held = held
        self.loop, self.runner = Worker(env, cores), Worker(env, cores)
        self._runs = CostModel(PIECE)
        for tokens, seconds in costs.windows:
            self._runs.observe("window", 1, int(tokens), seconds)
        self._queue = queue(costs.max_batch_size, self._runs)
        self._running = False
        self._found = 1.0
        self._line: deque[Item] = deque()
        self._under_way = 0
        self._locks: dict[int, deque[Then]] | None = {} if turns else None
        self.steps = self.rebuilt = self.refused = self.reads = self.trips = 0

    def step(self, session: int, then: Callable[[bool, bool], None]) -> None:
        """Starts a step that arrives at the replica."""
        self.loop.do(self._costs.loop_step_s / 2, lambda: self._turn(session, then))

    def _turn(self, session: int, then: Callable[[bool, bool], None]) -> None:
        if self._locks is None:
            self._check_out(session, then)
        elif session in self._locks:
            self._locks[session].append(lambda: self._check_out(session, then))
        else:
            self._locks[session] = deque()
            self._check_out(session, then)

    def _over(self, session: int) -> None:
        if self._locks is not None:
            line = self._locks[session]
            if line:
                line.popleft()()
            else:
                del self._locks[session]

    def _check_out(self, session: int, then: Callable[[bool, bool], None]) -> None:
        self.steps += 1
        found = self.states.use(session)
        self._found += REBUILD_EMA_ALPHA * ((found is Found.RESIDENT) - self._found)
        item = Item(work(1), found, session, then, self._env.now)
        if found is Found.RESIDENT:
            self._enqueue(item)
            return
        if self._costs.policy == "tail":
            item.work = work(self._rebuilt_from())
        more_s = self._costs.loop_rebuilt_s
        if found is Found.AWAY:
            self.reads += 1
            self.loop.do(more_s, lambda: self._store(1, lambda: self._enqueue(item)))
        else:
            self.loop.do(more_s, lambda: self._enqueue(item))

    def _rebuilt_from(self) -> int:
        """Returns the number of tokens from which a state is rebuilt. Follows `service/engine/routing.py`, for a model
        whose certificate allows windows of WINDOW tokens."""
        used = min(self._found / max(1 - self._found, 1 / MOST_USES), MOST_USES)
        if self._held <= WINDOW or self._runs.full(self._held) <= max(1 + used, COST_TOLERANCE) * self._runs.window(
            WINDOW
        ):
            return self._held
        return WINDOW

    def _enqueue(self, item: Item) -> None:
        if self._queue.before(item.work.role) >= self._costs.max_queue:
            self._refuse(item)
            return
        self._queue.put(item)
        if not self._running:
            self._running = True
            self.loop.do(0.0, self._start)

    def _refuse(self, item: Item) -> None:
        """Refuses a step because of overload (429) or a timeout (504)."""
        self.refused += 1
        if item.found is not Found.RESIDENT:
            self.states.drop(item.session)
        self._over(item.session)
        item.then(True, False)

    def _in_time(self, item: Item) -> bool:
        if self._env.now - item.begun_s <= DEADLINE_S:
            return True
        self._refuse(item)
        return False

    def _start(self) -> None:
        items = self._queue.take(self._in_time)
        if not items:
            self._running = False
            return
        role = items[0].work.role
        seconds = self._run_s(role, items)
        self.runner.do(
            seconds, lambda: self.loop.do(self._costs.loop_batch_s, lambda: self._finish(role, items, seconds))
        )

    def _run_s(self, role: Role, items: list[Item]) -> float:
        if role == "step":
            restored = sum(item.found is not Found.RESIDENT for item in items)
            each_s = self._costs.run_batch_s + len(items) * self._costs.run_step_s
            return each_s + restored * self._costs.restored_s
        return sum(self._costs.window_s(item.work.length) for item in items)

    def _finish(self, role: Role, items: list[Item], seconds: float) -> None:
        self._queue.ran(role, seconds)
        self._runs.observe(role, len(items), sum(item.work.length for item in items), seconds)
        self._start()
        self._line.extend(items)
        self._leave()

    def _leave(self) -> None:
        """Starts the next trip to the store with the commands of all waiting steps, unless too many trips are in
        flight."""
        if not self._line or self._under_way >= self._costs.trips:
            return
        items, self._line = list(self._line), deque()
        self._under_way += 1
        self.trips += 1
        self._store(len(items), lambda: self._arrive(items))

    def _arrive(self, items: list[Item]) -> None:
        self._under_way -= 1
        self._leave()
        for item in items:
            self.loop.do(self._costs.loop_step_s / 2, lambda item=item: self._answer(item))  # type: ignore[misc]

    def _answer(self, item: Item) -> None:
        rebuilt = item.found is not Found.RESIDENT
        self.rebuilt += rebuilt
        self._over(item.session)
        item.then(False, rebuilt)
