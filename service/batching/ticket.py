"""A request's ticket, which holds its deadline and its latency by stage, and the work items that a request queues."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from wane.service.batching.batch import Row, Work
from wane.service.observability.tracing import CURRENT, Traced
from wane.service.types.request import Latency


@dataclass(slots=True, eq=False)
class Ticket:
    """Tracks one request through the batcher.

    `admitted`: whether the queue has accepted work of the request. The queue rejects no later work of an admitted
    request. `entered`: whether work of the request with `Work.binding` is or was in a batch. Such a request will be
    completed. `abandoned`: whether the caller has left. `answering`: whether only the answer remains to be made,
    because the request has committed, or commits nothing. `conflicts`: how often the request's commit failed because
    another writer had changed the session. `batch_items`: the size of the request's largest batch. `traced`: the trace
    of the request, or None if it is not traced.
    """

    deadline: float | None = None
    admitted: bool = False
    entered: bool = False
    abandoned: bool = False
    answering: bool = False
    conflicts: int = 0
    started_s: float = field(default_factory=time.perf_counter)
    queue_s: float = 0.0
    compute_s: float = 0.0
    batch_items: int = 0
    traced: Traced | None = field(default_factory=CURRENT.get)

    def latency(self, since: Ticket | None = None) -> Latency:
        """Returns the latency from the ticket's creation until now. `since`: a result of `mark`; if given, the latency
        is measured from the call of `mark`."""
        started_s = self.started_s if since is None else since.started_s
        return Latency(
            queue_ms=1e3 * (self.queue_s - (since.queue_s if since else 0.0)),
            compute_ms=1e3 * (self.compute_s - (since.compute_s if since else 0.0)),
            total_ms=1e3 * (time.perf_counter() - started_s),
        ).with_batch(self.batch_items)

    def beside(self) -> Ticket:
        """Returns a ticket for concurrent work of the same request. The work is admitted and traced, but its time is
        not part of the request's latency."""
        return Ticket(admitted=True, traced=self.traced)

    def mark(self) -> Ticket:
        """Returns a copy of the ticket's current times. A later call of `latency` takes this copy as `since`."""
        return Ticket(queue_s=self.queue_s, compute_s=self.compute_s)


class WorkItem(asyncio.Future[Row]):
    """Queued work. Awaiting the item returns its row of the outputs, or raises the error of its run."""

    def __init__(self, work: Work, ticket: Ticket) -> None:
        super().__init__()
        self.work = work
        self.ticket = ticket
        self.queued_s = 0.0
        """When the work was queued, by `time.perf_counter`."""

    def fail(self, error: BaseException) -> None:
        """Sets the error, unless the item was cancelled."""
        if not self.done():
            self.set_exception(error)
