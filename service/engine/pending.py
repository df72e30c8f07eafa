"""The pending result of a submitted request, and the count of an engine's requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from wane.service.aio.deadline import TOO_LATE
from wane.service.aio.eager import EagerTask
from wane.service.aio.timers import Timer, timers
from wane.service.batching.ticket import Ticket
from wane.service.errors import DeadlineExceeded, Unavailable

T = TypeVar("T")


STILL_COMMITS = (
    "the deadline passed while the step ran, and the step still commits: retry it with the same position or key to get "
    "its answer"
)


class Pending(EagerTask[T]):
    """The pending result of a submitted request, with its deadline.

    If work that the request will commit has entered a batch, the request is completed even if its caller is cancelled.
    Before that, `cancel()` and the deadline withdraw the request without side effects. Cancellation and the deadline
    also end the search for a proof, which runs after the commit.

    The result is computed by a coroutine (`start`), or set by another object (`resolve`).
    """

    __slots__ = ("_timer", "ticket")

    def __init__(self) -> None:
        self._callback = self._error = self._result = None
        self._coroutine = self._context = self._waits_for = None
        self.done = False
        self.ticket: Ticket | None = None
        self._timer: Timer | None = None

    @classmethod
    def of(cls, coroutine: Coroutine[Any, Any, T], ticket: Ticket) -> Self:
        """Starts a coroutine and returns its pending result: see `start`."""
        pending = cls()
        pending.start(coroutine, ticket)
        return pending

    def start(self, coroutine: Coroutine[Any, Any, T], ticket: Ticket) -> None:
        """Starts the coroutine that computes the result. The coroutine submits all its work with `ticket`, which holds
        the deadline.

        The callback for the result runs in the event loop's next iteration. Therefore all requests of a batch are
        committed before the first answer is encoded. For 64 steps, this order takes a quarter less time than committing
        and encoding one step after the other.
        """
        self._coroutine, self.ticket = coroutine, ticket
        self._run(coroutine.send, None)
        if not self.done and ticket.deadline is not None:
            self._timer = timers().at(ticket.deadline, self._ring)

    def cancel(self) -> None:
        """Withdraws the request, unless its work has entered a batch."""
        if self.done:
            return
        self._callback = None
        self._abandon()

    def fail(self, error: BaseException) -> None:
        """Like `Waiter.fail`, but converts CancelledError to Unavailable, because closing an engine cancels the work of
        its threads."""
        super().fail(Unavailable("the server is stopping") if isinstance(error, asyncio.CancelledError) else error)

    def _ring(self) -> None:
        """Fails the request, because its deadline has passed."""
        self._timer = None
        callback, self._callback = self._callback, None
        has_entered = self.ticket is not None and self.ticket.entered
        self._abandon()
        self._callback, self.done = callback, False
        self.fail(DeadlineExceeded(STILL_COMMITS if has_entered else TOO_LATE))

    def _abandon(self) -> None:
        self.done = True
        self._stop_timer()
        if self.ticket is not None:
            self.ticket.abandoned = True
            if self.ticket.proving or not self.ticket.entered:
                self.interrupt()

    def _finish(self) -> None:
        self._stop_timer()
        self.done = True
        callback, self._callback = self._callback, None
        if callback is not None:
            asyncio.get_running_loop().call_soon(callback, self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Admission:
    """Counts the requests of one engine, and refuses them after `close`. All methods must be called on the event loop's
    thread."""

    def __init__(self) -> None:
        self.asked = 0
        """Number of requests since the start."""
        self.active = 0
        """Number of requests in flight."""
        self.closed = False
        """Whether new requests are refused."""
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Counts a request as active until `leave`. Raises Unavailable after `close`."""
        if self.closed:
            raise Unavailable("the server is stopping")
        if not self.active:
            self._idle.clear()
        self.asked += 1
        self.active += 1

    def leave(self, requests: int = 1) -> None:
        """Counts one or several requests as ended."""
        self.active -= requests
        if not self.active:
            self._idle.set()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts a request as active within the `with` block. Raises Unavailable after `close`."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def close(self) -> None:
        """Refuses new requests from now on."""
        self.closed = True

    async def idle(self) -> None:
        """Waits until no request is in flight."""
        await self._idle.wait()
