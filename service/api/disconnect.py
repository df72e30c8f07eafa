"""Cancels a request when its client disconnects."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Scope

from wane.service.errors import Abandoned
from wane.service.net.connection import CONNECTION, Connection

WHOLE_BODY = "wane.body"
"""The key under which a scope holds the request's body, if the body was read before the endpoint was called."""

DISCONNECT_GRACE_S = 0.05
"""The time in seconds from the disconnection to the cancellation. Most answers are ready before, so the step of a
client that does not wait for its answer commits."""


def connection_of(scope: Scope) -> Connection | None:
    """Returns the request's connection. Under another server than Wane's own, there is none."""
    connection: Connection | None = scope.get("state", {}).get(CONNECTION)
    return connection


def has_left(scope: Scope) -> bool:
    """Returns whether the request's connection has ended. Under another server than Wane's own, this is not known."""
    connection = connection_of(scope)
    return connection is not None and connection.has_ended


class until_hangup:  # noqa: N801  (read as `with until_hangup(request)`)
    """Cancels the body of the `with` when the client disconnects, and raises Abandoned.

        with until_hangup(request):
            answer = await engine.step(...)

    The engine finishes work that entered a batch before the disconnection. If the client then repeats the request, the
    engine can replay the answer. Does nothing within an endpoint whose caller already watches (`HotRoutes`).
    """

    _task: asyncio.Task[Any] | None = None
    _timer: asyncio.TimerHandle | None = None
    _has_left = False

    def __init__(self, client: HTTPConnection) -> None:
        scope = client.scope
        self.connection: Connection | None = None
        if WHOLE_BODY not in scope and "state" in scope:
            self.connection = scope["state"].get(CONNECTION)

    def __enter__(self) -> None:
        connection = self.connection
        if connection is not None:
            self._task = task = asyncio.current_task(connection.loop)
            assert task is not None, "the request has no task: this is a bug"
            self._cancelled_before = task.cancelling()
            if connection.has_ended:
                self._leave()
            else:
                connection.on_lost = self._leave

    def _leave(self) -> None:
        if self._task is not None:
            self._timer = self._task.get_loop().call_later(DISCONNECT_GRACE_S, self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._has_left = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if task is None or self.connection is None:
            return
        self.connection.on_lost = None
        if self._timer is not None:
            self._timer.cancel()
        if self._has_left and task.uncancel() <= self._cancelled_before and kind is asyncio.CancelledError:
            raise Abandoned("the client hung up before the answer") from error
