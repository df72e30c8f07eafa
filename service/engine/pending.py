"""An answer on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from wane.service.aio.deadline import TOO_LATE
from wane.service.aio.eager import EagerTask
from wane.service.aio.timers import Timer, timers
from wane.service.batching.ticket import Ticket
from wane.service.errors import DeadlineExceeded, Unavailable

T = TypeVar("T")


class Pending(EagerTask[T]):
    """The result of a request that was submitted, with its deadline.

    Once work of the request that cannot be taken back has entered a batch, the request is carried through, whether or
    not anybody waits for it. Before that, `cancel()` and the deadline take it back and leave no trace.

    It calls back in the event loop's next turn. So the steps of one batch are all committed before the first of them is
    encoded: 64 steps that do the same at the same time take a quarter less than 64 steps one after the other.
    """

    __slots__ = ("_timer", "ticket")

    def __init__(self, coroutine: Coroutine[Any, Any, T], ticket: Ticket) -> None:
        """`ticket`: that of all of the coroutine's work, with the deadline."""
        self.ticket = ticket
        self._timer: Timer | None = None
        super().__init__(coroutine)
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
        has_entered = self.ticket.entered
        self._abandon()
        self._callback, self.done = callback, False
        self.fail(
            DeadlineExceeded(
                "the deadline passed while the step ran; it still commits: repeat it, with its position or its key, "
                "for the answer"
                if has_entered
                else TOO_LATE
            )
        )

    def _abandon(self) -> None:
        self.done = self.ticket.abandoned = True
        self._stop_timer()
        if not self.ticket.entered:
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
