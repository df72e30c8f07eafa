"""A request of the fast path on its way: from where it was admitted to where it is answered, once, however it goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Scope
from wane.service.engine.inline_step import InlineStep
from wane.service.engine.inline_window import InlineWindow

from wane.service.aio.timers import Timer, timers
from wane.service.api import encode
from wane.service.api.deps import note_answer
from wane.service.api.middleware import RequestContext, RequestMiddleware
from wane.service.engine.engine import Engine, Operation, deadline_error
from wane.service.errors import Abandoned, Unavailable
from wane.service.types import Answer


class ResponseSink(Protocol):
    """Where an answer goes to."""

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Writes it, whole. Once; nothing is written where the client has gone."""
        ...


class InFlight:
    """One request, whose answer a task brings."""

    __slots__ = ("_engine", "_epoch", "_exchange", "_here", "_middleware", "_scope", "_started_s", "_task", "over")

    def __init__(
        self,
        scope: Scope,
        here: RequestContext,
        exchange: ResponseSink,
        middleware: RequestMiddleware,
        engine: Engine,
        started_s: float,
    ) -> None:
        """It is here from now on, until it is answered or left. `started_s`: by `time.perf_counter`."""
        self._scope = scope
        self._here = here
        self._exchange = exchange
        self._middleware = middleware
        self._engine = engine
        self._started_s = started_s
        self._epoch = middleware.epochs.enter()
        self._task: asyncio.Task[Answer] | None = None
        self.over = False

    def wait_for(self, answer: Coroutine[Any, Any, Answer]) -> None:
        """Runs what brings the answer, or raises why there is none, in time."""
        self._task = asyncio.get_running_loop().create_task(answer)
        self._task.add_done_callback(self._done)

    def leave(self) -> None:
        """It is answered elsewhere."""
        self._epoch.leave()

    def hang_up(self) -> None:
        """The client has gone: what has not entered a batch is taken back."""
        if not self.over:
            self.take_back()
            self.fail(Abandoned("the client hung up before the answer"))

    def take_back(self) -> None:
        """Nobody waits any more."""
        if self._task is not None:
            self._task.cancel()

    def _done(self, task: asyncio.Task[Answer]) -> None:
        error = Unavailable("the server is stopping") if task.cancelled() else task.exception()
        if self.over:
            return
        if isinstance(error, Exception):
            self.fail(error)
        else:
            self.succeed(task.result())

    def succeed(self, given: Answer) -> None:
        """The request is answered."""
        try:
            note_answer(self._scope, given)
            response = encode.reply(encode.answer(self._engine, given))
        except Exception as error:  # nobody expected it, and nobody else would tell
            self.fail(error)
        else:
            self._finish(response)

    def fail(self, error: Exception) -> None:
        """The request is answered with what went wrong."""
        self._finish(self._middleware.envelope(self._scope, error))

    def _finish(self, response: Response) -> None:
        self.over = True
        status, body = response.status_code, bytes(response.body)
        try:
            self._exchange.answer(status, [*response.raw_headers, self._here.request_id_header()], body)
        finally:
            self._epoch.leave()
            self._middleware.record(
                self._scope, self._here, status, len(body), time.perf_counter() - self._started_s, None
            )


class InlineInFlight(InFlight):
    """A step or a window that needs one run and nothing else: its answer is called for, and no task is needed."""

    __slots__ = ("_operation", "_quick", "_timer")

    def goes_on(self, quick: InlineStep | InlineWindow, operation: Operation) -> None:
        """Its run is waited for."""
        assert self._here.deadline is not None, "a request without a deadline: this is a bug"
        self._quick = quick
        self._operation: Operation = operation
        self._timer: Timer | None = timers().at(self._here.deadline, self._ring)
        quick.answer.add_done_callback(self._answered)

    def take_back(self) -> None:
        if self._task is not None:
            super().take_back()
            return
        self._at_ease()
        self._quick.leave()

    def _ring(self) -> None:
        self._timer = None
        self.fail(deadline_error(self._quick, self._quick.ticket))

    def _answered(self, answer: asyncio.Future[Answer] | asyncio.Future[Answer | None]) -> None:
        error = answer.exception()
        if self.over:
            return
        self._at_ease()
        if isinstance(error, Exception):
            self.fail(error)
        elif (given := answer.result()) is not None:
            self._engine.count(self._operation, given)
            self.succeed(given)
        elif isinstance(self._quick, InlineStep):  # another writer was first: it is tried again, as any other step
            self.wait_for(self._engine.end(self._quick))

    def _at_ease(self) -> None:
        """No deadline is waited for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
