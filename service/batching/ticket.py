"""One piece of work for the runner: who waits for it, its deadline, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Sequence

from wane.service.aio.eager import Waiter
from wane.service.batching.batch import Row, Work
from wane.service.observability.tracing import CURRENT, Traced
from wane.service.types import Latency


class Ticket:
    """One request's way through the batcher.

    `admitted`: some work of it was let into the queue; what follows is not refused half-way.
    `entered`: binding work of it is or was in a batch: the request will be carried through. `abandoned`: nobody waits
    for the answer any more. `proving`: all that is left to do is the search for a proof.
    `batch_items`: of the largest batch that it was in. `traced`: the request, if it is one that is traced.
    """

    __slots__ = (
        "abandoned",
        "admitted",
        "batch_items",
        "compute_s",
        "deadline",
        "entered",
        "proving",
        "queue_s",
        "started_s",
        "traced",
    )

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.admitted = False
        self.entered = False
        self.abandoned = False
        self.proving = False
        self.started_s = time.perf_counter()
        self.queue_s = self.compute_s = 0.0
        self.batch_items = 0
        self.traced: Traced | None = CURRENT.get()

    def latency(self, since: Ticket | None = None) -> Latency:
        """Where the time went until now, since the ticket was made or `since` was copied from it."""
        started_s = self.started_s if since is None else since.started_s
        return Latency(
            queue_ms=1e3 * (self.queue_s - (since.queue_s if since else 0.0)),
            compute_ms=1e3 * (self.compute_s - (since.compute_s if since else 0.0)),
            total_ms=1e3 * (time.perf_counter() - started_s),
            batch_items=self.batch_items,
        )

    def beside(self) -> Ticket:
        """For work of the same request that runs beside this one's: admitted and traced with it, and not timed."""
        other = Ticket()
        other.admitted, other.traced = True, self.traced
        return other

    def mark(self) -> Ticket:
        """A copy to measure from."""
        copy = Ticket()
        copy.queue_s, copy.compute_s = self.queue_s, self.compute_s
        return copy


class WorkItem(Waiter[Row]):
    """Work that waits for its row, or for the error that it failed with."""

    __slots__ = ("queued_s", "ticket", "work")

    def __init__(self, work: Work, ticket: Ticket) -> None:
        self._callback = self._error = self._result = None
        self.done = False
        self.work = work
        self.ticket = ticket
        self.queued_s = 0.0
        """When it entered the queue, by `time.perf_counter`."""


def enter(items: Sequence[WorkItem]) -> None:
    """They are in a batch that begins."""
    for item in items:
        if item.work.binding:
            item.ticket.entered = True
