"""One request's way through the batcher: what it may still expect, and where its time went."""

from __future__ import annotations

import time
from dataclasses import dataclass

from service.engine.answers import Latency
from service.tracing import CURRENT, Traced


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's way through the batcher.

    `admitted`: some work of it was let into the queue; what follows is not refused half-way.
    `entered`: binding work of it is or was in a batch: the request will be carried through.
    `batch_items`: of the largest batch that it was in. `traced`: the request, if it is one that is traced.
    """

    deadline: float | None = None
    admitted: bool = False
    entered: bool = False
    started_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    batch_items: int = 0
    traced: Traced | None = None

    def __post_init__(self) -> None:
        self.started_s = time.perf_counter()
        self.traced = CURRENT.get()

    def latency(self, since: Ticket | None = None) -> Latency:
        """Where the time went until now, since the ticket was made or `since` was copied from it."""
        started_s = self.started_s if since is None else since.started_s
        return Latency(
            queue_ms=1e3 * (self.queue_s - (since.queue_s if since else 0.0)),
            compute_ms=1e3 * (self.compute_s - (since.compute_s if since else 0.0)),
            total_ms=1e3 * (time.perf_counter() - started_s),
            batch_items=self.batch_items,
        )

    def mark(self) -> Ticket:
        """A copy to measure from."""
        return Ticket(queue_s=self.queue_s, compute_s=self.compute_s)
