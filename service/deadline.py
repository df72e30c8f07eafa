"""Deadlines of requests."""

from __future__ import annotations

import asyncio
from types import TracebackType

from wane.service.errors import DeadlineExceeded

TOO_LATE = "the deadline passed before the answer was ready"


class until:  # noqa: N801  (read as `async with until(deadline)`)
    """Cancels the body of the `async with` at `deadline`, and then raises DeadlineExceeded with the message `why`.
    `deadline` is in seconds on the event loop's clock, or None for no deadline."""

    __slots__ = ("_timeout", "_why")

    def __init__(self, deadline: float | None, why: str = TOO_LATE) -> None:
        self._timeout = None if deadline is None else asyncio.timeout_at(deadline)
        self._why = why

    async def __aenter__(self) -> None:
        if self._timeout is not None:
            await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout, self._timeout = self._timeout, None
        if timeout is None:
            return
        is_late = False
        try:
            await timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            is_late = True
        finally:
            del timeout  # it holds the task, whose error will hold this frame
        if is_late:
            raise DeadlineExceeded(self._why) from error
