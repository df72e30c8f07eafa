"""A client that hangs up stops the work done for it."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.requests import Request

from service.alarms import alarms
from service.errors import Abandoned

PATIENCE_S = 0.05
"""Time that an answer has before its client is watched: most are there sooner, and need no task that watches."""


class until_hangup:  # noqa: N801  (read as `async with until_hangup(request)`)
    """Cancels the body of the `async with` when the client goes away, and raises Abandoned in its place.

        async with until_hangup(request):
            answer = await engine.step(...)

    The request's body must have been read: after it the server has but one message to give, `http.disconnect`.
    What had entered a batch when the client left is finished by the engine, and can be replayed.
    """

    __slots__ = ("_alarm", "_cancelled_before", "_gone", "_request", "_task", "_watcher")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "this is a bug: a request is always served by a task"
        self._task = task
        self._cancelled_before = task.cancelling()
        self._alarm = alarms().at(asyncio.get_running_loop().time() + PATIENCE_S, self._watch)

    def _watch(self) -> None:
        self._watcher = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone and self._task.uncancel() <= self._cancelled_before and kind is asyncio.CancelledError:
            raise Abandoned("the client hung up before the answer") from error
