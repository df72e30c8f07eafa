"""Simulates threads that run jobs one after another, and processors that threads share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import simpy

Then = Callable[[], object]
SLICE_S = 0.003
"""The seconds for which a thread runs while other threads wait (its time slice). The value is close to that of Linux's
scheduler."""


def after(env: simpy.Environment, seconds: float, then: Then) -> None:
    """Calls `then` after `seconds` of simulated time."""

    def at_last(_: object) -> None:
        then()

    env.timeout(seconds).callbacks.append(at_last)


class Cores:
    """Processors that threads share in time slices. All waiting threads are in one first-in, first-out queue."""

    def __init__(self, env: simpy.Environment, count: int) -> None:
        self._env = env
        self._free = count
        self._line: deque[tuple[float, Then]] = deque()

    def take(self, seconds: float, then: Then) -> None:
        """Queues a thread that needs `seconds` of processor time. Calls `then` when the thread has used this time."""
        self._line.append((seconds, then))
        self._next()

    def _next(self) -> None:
        while self._free and self._line:
            self._free -= 1
            left, then = self._line.popleft()
            taken = min(left, SLICE_S)
            after(self._env, taken, lambda left=left - taken, then=then: self._ended(left, then))  # type: ignore[misc]

    def _ended(self, left: float, then: Then) -> None:
        self._free += 1
        if left > 1e-12:
            self._line.append((left, then))
        else:
            then()
        self._next()


class Worker:
    """One thread with a first-in, first-out queue of jobs. The thread shares the processors `cores`, or has its own
    processor if `cores` is None."""

    def __init__(self, env: simpy.Environment, cores: Cores | None = None) -> None:
        self._env = env
        self._cores = cores
        self._line: deque[tuple[float, Then]] = deque()
        self._busy = False
        self.busy_s = 0.0
        """The total seconds of all started jobs."""

    @property
    def idle(self) -> bool:
        """Whether no job runs."""
        return not self._busy

    def do(self, seconds: float, then: Then) -> None:
        """Queues a job that takes `seconds` of processor time. Calls `then` after the job."""
        self._line.append((seconds, then))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if not self._line:
            self._busy = False
            return
        self._busy = True
        seconds, then = self._line.popleft()
        self.busy_s += seconds
        if self._cores is None:
            after(self._env, seconds, lambda: self._ended(then))
        else:
            self._cores.take(seconds, lambda: self._ended(then))

    def _ended(self, then: Then) -> None:
        then()
        self._next()
