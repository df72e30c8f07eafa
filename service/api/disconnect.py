"""Cancels a request when its client disconnects."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

from starlette.requests import Request
from starlette.types import Message, Receive, Scope
from starlette.websockets import WebSocket

from wane.service.errors import Abandoned

WHOLE_BODY = "wane.body"
"""The key under which a scope holds the request's body, if the body was read before the endpoint was called."""

DISCONNECT_GRACE_S = 0.05
"""The time in seconds after which the server begins to watch for the client's disconnection. Most answers are ready
before."""

MOST_EARLY = 16  # the largest number of a WebSocket's messages that are read while an earlier message is answered


class until_hangup:  # noqa: N801  (read as `async with until_hangup(request)`)
    """Cancels the body of the `async with` when the client disconnects, and raises Abandoned.

        async with until_hangup(request):
            answer = await engine.step(...)

    Call this after the request's body was read. For an HTTP request, the only ASGI message after the body is
    `http.disconnect`. A WebSocket client may send more messages while it waits for an answer. These messages are
    appended to `early`. No more messages are read while `early` is full. The engine finishes work that entered a batch
    before the disconnection. If the client then repeats the request, the engine can replay the answer. Does nothing
    within an endpoint whose caller already watches (`HotRoutes`).
    """

    __slots__ = ("_early", "_receive", "_scope", "_timeout", "_timer", "_watcher")

    def __init__(self, client: Request | WebSocket, early: deque[Message] | None = None) -> None:
        self._scope: Scope = client.scope
        self._receive: Receive = client.receive
        self._early = early
        self._timeout: asyncio.Timeout | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if WHOLE_BODY not in self._scope:
            self._timeout = asyncio.timeout(None)
            await self._timeout.__aenter__()
            self._timer = asyncio.get_running_loop().call_later(DISCONNECT_GRACE_S, self._watch)

    def _watch(self) -> None:
        self._watcher = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        early = self._early
        while early is None or len(early) < MOST_EARLY:
            message = await self._receive()
            if message["type"] in ("http.disconnect", "websocket.disconnect"):
                if self._timeout is not None:
                    self._timeout.reschedule(asyncio.get_running_loop().time())
                return
            if early is not None:
                early.append(message)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout, self._timeout = self._timeout, None
        if timeout is None:
            return
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # breaks a reference cycle
        try:
            await timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise Abandoned("the client hung up before the answer") from error
