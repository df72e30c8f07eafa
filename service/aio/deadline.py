"""Deadlines of requests."""

from __future__ import annotations

from types import TracebackType

from wane.service.aio.interrupt import Interrupt
from wane.service.aio.timers import Timer, timers
from wane.service.errors import DeadlineExceeded

TOO_LATE = "the deadline passed before the answer was ready"


class until:  # noqa: N801  (read as `with until(deadline)`)
    """Cancels the body of the `with` at `deadline`, and then raises DeadlineExceeded with the message `why`.

    `deadline` is in seconds on the event loop's clock, or None for no deadline. Unlike `asyncio.timeout_at`, this
    function also works in an `EagerTask`, and uses coarse timers, which are cheaper.
    """

    __slots__ = ("_deadline", "_interrupt", "_timer", "_why")

    def __init__(self, deadline: float | None, why: str = TOO_LATE) -> None:
        self._deadline = deadline
        self._why = why
        self._timer: Timer | None = None

    def __enter__(self) -> None:
        if self._deadline is not None:
            self._interrupt = Interrupt()
            self._timer = timers().at(self._deadline, self._interrupt.fire)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        if self._interrupt.ended(kind):
            raise DeadlineExceeded(self._why) from error
