"""Cancels a request when its client disconnects."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

from starlette.requests import Request
from starlette.types import Message
from starlette.websockets import WebSocket

from wane.service.aio.interrupt import Interrupt
from wane.service.aio.timers import Timer, timers
from wane.service.api.exchange import WHOLE_BODY
from wane.service.errors import Abandoned
from wane.service.net.receive_queue import DISCONNECT_GRACE_S, MOST_EARLY


class until_hangup:  # noqa: N801  (read as `with until_hangup(request)`)
    """Cancels the body of the `with` when the client disconnects, and raises Abandoned.

        with until_hangup(request):
            answer = await engine.step(...)

    Call this after the request's body was read. For an HTTP request, the only ASGI message after the body is
    `http.disconnect`. A WebSocket client may send more messages while it waits for an answer. These messages are
    appended to `early`. No more messages are read while `early` is full. The engine finishes work that entered a batch
    before the disconnection. If the client then repeats the request, the engine can replay the answer. Does nothing if
    the dispatcher called the endpoint, because the HTTP protocol or the dispatcher then detects the disconnection.
    """

    __slots__ = ("_client", "_early", "_interrupt", "_timer", "_watcher")

    def __init__(self, client: Request | WebSocket, early: deque[Message] | None = None) -> None:
        self._client = client
        self._early = early
        self._watcher: asyncio.Task[None] | None = None
        self._timer: Timer | None = None

    def __enter__(self) -> None:
        if WHOLE_BODY in self._client.scope:
            return
        self._interrupt = Interrupt()
        self._timer = timers().at(asyncio.get_running_loop().time() + DISCONNECT_GRACE_S, self._watch)

    def _watch(self) -> None:
        self._watcher = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        early = self._early
        while early is None or len(early) < MOST_EARLY:
            message = await self._client.receive()
            if message["type"] in ("http.disconnect", "websocket.disconnect"):
                self._interrupt.fire()
                return
            if early is not None:
                early.append(message)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # breaks a reference cycle
        if self._interrupt.ended(kind):
            raise Abandoned("the client hung up before the answer") from error
