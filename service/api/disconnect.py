"""Cancels a request when its client disconnects."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Any

from starlette.requests import Request
from starlette.types import Message
from starlette.websockets import WebSocket

from wane.service.errors import Abandoned

WHOLE_BODY = "wane.body"
"""The key under which a scope holds the request's body, if the body was read before the endpoint was called."""

DISCONNECT_GRACE_S = 0.05
"""The time in seconds after which the server begins to watch for the client's disconnection. Most answers are ready
before."""

MOST_EARLY = 16  # the largest number of a WebSocket's messages that are read while an earlier message is answered


class until_hangup:  # noqa: N801  (read as `with until_hangup(request)`)
    """Cancels the body of the `with` when the client disconnects, and raises Abandoned.

        with until_hangup(request):
            answer = await engine.step(...)

    Call this after the request's body was read. For an HTTP request, the only ASGI message after the body is
    `http.disconnect`. A WebSocket client may send more messages while it waits for an answer. These messages are
    appended to `early`. No more messages are read while `early` is full. The engine finishes work that entered a batch
    before the disconnection. If the client then repeats the request, the engine can replay the answer. Does nothing
    within an endpoint whose caller already watches (`HotRoutes`).
    """

    __slots__ = ("_cancelled_before", "_client", "_early", "_has_left", "_task", "_timer", "_watcher")

    def __init__(self, client: Request | WebSocket, early: deque[Message] | None = None) -> None:
        self._client = client
        self._early = early
        self._has_left = False
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        if WHOLE_BODY not in self._client.scope:
            self._task = task = asyncio.current_task()
            assert task is not None, "the request has no task: this is a bug"
            self._cancelled_before = task.cancelling()
            self._timer = task.get_loop().call_later(DISCONNECT_GRACE_S, self._watch)

    def _watch(self) -> None:
        self._watcher = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        early = self._early
        while early is None or len(early) < MOST_EARLY:
            message = await self._client.receive()
            if message["type"] in ("http.disconnect", "websocket.disconnect"):
                if self._task is not None:
                    self._has_left = True
                    self._task.cancel()
                return
            if early is not None:
                early.append(message)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # breaks a reference cycle
        if self._has_left and task.uncancel() <= self._cancelled_before and kind is asyncio.CancelledError:
            raise Abandoned("the client hung up before the answer") from error
