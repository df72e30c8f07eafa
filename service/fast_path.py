"""Steps over HTTP without ASGI: what a session's next token costs most is the way to the engine and back.

Most requests are steps of one session that come whole, in one read of the network, and need one run and nothing else.
Such a request is decoded, admitted and begun where it is read, and answered, in one write, where its run is over: no
task, no messages, no middleware. All others, and all that there is something wrong with, are left to the application
before anything was done for them: what a request means, and what is said of a bad one, is written there only, and what
is the same on both ways is called by both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from service.alarms import Alarm, alarms
from service.engine.answers import Answer
from service.engine.engine import Engine, late
from service.engine.quick import QuickStep
from service.errors import Abandoned, WaneError
from service.middleware import ADMITTED, Context, Door
from service.routes import answers, sessions
from service.routes.context import catalog, named, note_answer
from service.routes.decode import parse
from service.schemas import StepBody

MOST_BYTES = 1 << 12  # of a body: longer ones are not one step of a few tokens


class Exchange(Protocol):
    """Where an answer goes to."""

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Writes it, whole. Once; nothing is written where the client has gone."""
        ...


class FastPath:
    """Begins the steps of one session each; under the protocol, beside the application."""

    def __init__(self, app: ASGIApp, door: Door, route: Route) -> None:
        """`route`: that of a session's step, of the application `app`, which is behind `door`."""
        self._app = app
        self._route = route
        self.door = door

    def leads_to(self, scope: Scope) -> bool:
        """Whether a request may be for here, by its method and path; it is then marked with its route."""
        if scope["method"] != "POST" or self.door.tracing is not None:
            return False
        path: str = scope["path"]
        match = self._route.path_regex.fullmatch(path) if path.isprintable() else None
        if match is None:
            return False
        scope["route"], scope["path_params"] = self._route, match.groupdict()
        return True

    def begin(self, scope: Scope, body: bytes, exchange: Exchange) -> FastStep | None:
        """The step that a request asks for, on its way to be answered; None, and nothing done, where it is none for
        here."""
        if len(body) > MOST_BYTES:
            return None
        started_s = time.perf_counter()
        door = self.door
        here = scope["wane.context"] = Context.of(scope)
        scope["app"] = self._app
        request = Request(scope)
        try:
            given = parse(body, StepBody)
            if given.tokens is None:
                return None
            position = sessions.position(request, given)
            door.set_deadline(here)
            if door.guard is not None:
                door.admit(door.guard, scope, here)
                scope[ADMITTED] = here.holder
            session = named(request, scope["path_params"]["session"])
            engine = catalog(request).engine_at_once(session)
            if engine is None:
                return None
            step = FastStep(scope, here, exchange, door, engine, started_s)
        except WaneError:
            return None
        try:
            quick = engine.begin(sessions.step(request, session, tuple(given.tokens), position, given))
        except Exception as error:
            step.fail(error)
            return step
        if quick is None:
            step.leave()
            return None
        here.fields["model"] = engine.name
        step.goes_on(quick)
        return step


class FastStep:
    """One step on its way, and its answer's."""

    __slots__ = (
        "_alarm",
        "_door",
        "_engine",
        "_exchange",
        "_here",
        "_quick",
        "_retry",
        "_scope",
        "_started_s",
        "_wave",
        "over",
    )

    def __init__(
        self, scope: Scope, here: Context, exchange: Exchange, door: Door, engine: Engine, started_s: float
    ) -> None:
        self._scope = scope
        self._here = here
        self._exchange = exchange
        self._door = door
        self._engine = engine
        self._started_s = started_s
        self._wave = door.presence.enter()
        self._alarm: Alarm | None = None
        self._retry: asyncio.Task[Answer] | None = None
        self.over = False

    def leave(self) -> None:
        """It is none for here after all."""
        self._wave.leave()

    def goes_on(self, quick: QuickStep) -> None:
        """Its run is waited for."""
        assert self._here.deadline is not None, "a request without a deadline: this is a bug"
        self._quick = quick
        self._alarm = alarms().at(self._here.deadline, self._ring)
        quick.answer.add_done_callback(self._answered)

    def hang_up(self) -> None:
        """The client has gone: the step is taken back if it has not entered a batch."""
        if self.over:
            return
        if self._retry is None:
            self._quick.leave()
        else:
            self._retry.cancel()
        self.fail(Abandoned("the client hung up before the answer"))

    def _ring(self) -> None:
        self.fail(late(self._quick, self._quick.ticket))

    def _answered(self, answer: asyncio.Future[Answer | None]) -> None:
        error = answer.exception()
        if self.over:
            return
        if isinstance(error, Exception):
            self.fail(error)
        elif (given := answer.result()) is None:  # another writer was first: it is tried again, as any other step
            self._at_ease()
            self._retry = asyncio.get_running_loop().create_task(self._engine.end(self._quick))
            self._retry.add_done_callback(self._retried)
        else:
            self._engine.count_step(given)
            self._succeed(given)

    def _retried(self, task: asyncio.Task[Answer]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Exception):
            self.fail(error)
        else:
            self._succeed(task.result())

    def _succeed(self, given: Answer) -> None:
        note_answer(self._scope, given)
        self._finish(answers.reply(answers.answer(self._engine, given)))

    def fail(self, error: Exception) -> None:
        """The request is answered with what went wrong."""
        self._finish(self._door.envelope(self._scope, error))

    def _finish(self, response: Response) -> None:
        self.over = True
        self._at_ease()
        status, body = response.status_code, bytes(response.body)
        self._exchange.answer(status, [*response.raw_headers, self._here.named()], body)
        self._wave.leave()
        self._door.record(self._scope, self._here, status, len(body), time.perf_counter() - self._started_s, None)

    def _at_ease(self) -> None:
        """No deadline is waited for."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
