"""An answer on its way; and how many of an engine's are."""

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
    "the deadline passed while the step ran; it still commits: repeat it, with its position or its key, for the answer"
)


class Pending(EagerTask[T]):
    """The result of a request that was submitted, with its deadline.

    Once work of the request that cannot be taken back has entered a batch, the request is carried through, whether or
    not anybody waits for it. Before that, `cancel()` and the deadline take it back and leave no trace. They end the
    search for a proof, too: it comes after the commit.

    A coroutine comes to the result (`start`), or somebody else resolves it.
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
        """The result of a coroutine, which begins at once: see `start`."""
        pending = cls()
        pending.start(coroutine, ticket)
        return pending

    def start(self, coroutine: Coroutine[Any, Any, T], ticket: Ticket) -> None:
        """Runs a coroutine to the result; `ticket`: that of all of its work, with the deadline.

        The result calls back in the event loop's next turn. So the requests of one batch are all committed before the
        first of them is encoded: 64 steps that do the same at the same time take a quarter less than one by one.
        """
        self._coroutine, self.ticket = coroutine, ticket
        self._run(coroutine.send, None)
        if not self.done and ticket.deadline is not None:
            self._timer = timers().at(ticket.deadline, self._ring)

    def cancel(self) -> None:
        """The caller has left: takes the request back, unless it has entered a batch."""
        if self.done:
            return
        self._callback = None
        self._abandon()

    def fail(self, error: BaseException) -> None:
        """As a `Waiter`'s. An engine that is closed cancels what its threads have not begun."""
        super().fail(Unavailable("the server is stopping") if isinstance(error, asyncio.CancelledError) else error)

    def _ring(self) -> None:
        """The deadline has passed."""
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
    """Counts one engine's requests; all methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self.asked = 0
        """Requests, ever."""
        self.active = 0
        """Those that are not over."""
        self.closed = False
        """Whether no more are taken."""
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Counts a request, until it leaves. Raises Unavailable when no more are taken."""
        if self.closed:
            raise Unavailable("the server is stopping")
        if not self.active:
            self._idle.clear()
        self.asked += 1
        self.active += 1

    def leave(self, requests: int = 1) -> None:
        """One request has ended, or several."""
        self.active -= requests
        if not self.active:
            self._idle.set()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts a request while it lasts. Raises Unavailable when no more are taken."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def close(self) -> None:
        """No more are taken."""
        self.closed = True

    async def idle(self) -> None:
        """Waits until all are over."""
        await self._idle.wait()
