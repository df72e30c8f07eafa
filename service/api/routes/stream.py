"""A session as a WebSocket: one message a step, one prediction a message, in order.

    -> {"tokens": [5]}              <- {"predictions": [...], "position": 1, ...}    as POST .../tokens answers
    -> {"rewind": 0}                <- {"predictions": [...], "position": 0, ...}    what is predicted there
    -> {"tokens": []}               <- {"error": {"status": 422, ...}}               a problem document

One message is answered at a time; others may be sent meanwhile and wait their turn. A failure that leaves the session
as the client knows it leaves the socket open; else the document is the last message (but where
a * stands, where there is none), and the socket is closed:

    1002 * a frame is none
    1007 * a text is not UTF-8
    1008   there is no key, or it is not good, or no more; * a message takes too long to come in, or has too many frames
    1009 * the message is longer than a body may be
    1011   nobody expected this
    1012   the server is loading or stopping: come again
    1013   over the key's rate when it came; * too much is being received from everybody: come again
    4404   there is no such session, or no more
    4409   the session is not where the client says, or the last step's key comes with another step: what follows in
           the client's order would be wrong too
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus

from fastapi import APIRouter
from starlette.websockets import WebSocket

from wane.service.api import encode
from wane.service.api.body import Decoder, tokens_of
from wane.service.api.channel import AsgiLine, Line, wire_of
from wane.service.api.deps import catalog, named, settings
from wane.service.api.encode import json_bytes
from wane.service.api.middleware import begin_trace, context, end_trace
from wane.service.api.problem import described
from wane.service.api.schemas.common import StreamBody
from wane.service.api.schemas.predict import AnswerDocument
from wane.service.api.websocket_step import AtOnce, Begun
from wane.service.auth.guard import chosen
from wane.service.engine.deadline import until
from wane.service.engine.engine import Engine
from wane.service.errors import (
    Abandoned,
    Conflict,
    DeadlineExceeded,
    Unauthorized,
    Unavailable,
    UnknownSession,
    WaneError,
)
from wane.service.net.websocket_protocol import Left, Message
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import CURRENT, Traced, Tracing
from wane.service.types import PredictRequest, StepRequest

NORMAL = 1000
GONE = 1006
INTERNAL = 1011
POLICY = 1008
RESTART = 1012
NO_SESSION = 4404
CONFLICT = 4409
CLOSES: tuple[tuple[type[WaneError], int], ...] = (
    (Unauthorized, POLICY),
    (UnknownSession, NO_SESSION),
    (Conflict, CONFLICT),
    (Unavailable, RESTART),
)

router = APIRouter()


@router.websocket("/v1/sessions/{session}/stream")
async def stream(socket: WebSocket, session: str) -> None:
    """See the module's text."""
    metrics: Metrics = socket.app.state.metrics
    await socket.accept(chosen(socket.scope))
    with metrics.websockets.track_inprogress():
        try:
            name = named(socket, session)
            engine = await catalog(socket).engine_for(name)
        except WaneError as error:
            await _refuse(socket, error, _close_code(error) or NO_SESSION)  # what is no id is no session
            return
        # In a task of its own: what wakes it up need not pass the framework's layers.
        await asyncio.create_task(Stream(socket, engine, name, metrics).run())


class Stream:
    """One WebSocket, until it is closed by either side."""

    def __init__(self, socket: WebSocket, engine: Engine, session: str, metrics: Metrics) -> None:
        """`session` is its name within."""
        self.scope = socket.scope
        self.catalog = catalog(socket)
        self.engine = engine
        self.session = session
        self.metrics = metrics
        self.tracing: Tracing | None = socket.app.state.tracing
        self.decoder: Decoder = socket.app.state.decoder
        self.traced: Traced | None = None
        self.idle_s = settings(socket).stream_idle_s
        self.loop = asyncio.get_running_loop()
        self.heard_s = self.loop.time()  # when something was last heard, or said
        self.here = context(socket.scope)
        self.log = self.here.fields
        self.log["model"] = engine.name
        self.answered = 0
        wire = wire_of(socket)
        self.line: Line = wire or AsgiLine(socket)
        self.begun: Begun | None = None  # of the message that is taken next
        self.at_once = None if wire is None or self.tracing is not None else AtOnce(self, wire)

    async def run(self) -> None:
        """Answers messages until there are no more."""
        try:
            while (message := await self.take()) is not None:
                begun, self.begun = self.begun, None
                started_s = time.perf_counter() if begun is None else begun.started_s
                self.begin_trace(started_s)
                wave = self.catalog.presence.enter() if begun is None else begun.wave
                try:
                    await self.line.say(json_bytes(await self.answer(message, begun)))
                except Abandoned:
                    self.log["error"] = Abandoned.code
                    return
                except Left:
                    raise
                except Exception as error:
                    if await self.fail(error, started_s):
                        return
                else:
                    self.count(HTTPStatus.OK, started_s)
                finally:
                    wave.leave()
        except Left:  # while its answer was sent
            self.log["code"] = GONE
        finally:
            self.log["messages"] = self.answered
            if self.at_once is not None:
                self.at_once.close()
                self.at_once = None  # it holds this, and both would wait for the garbage collector

    async def take(self) -> str | bytes | None:
        """The next message; None when the client has left, or was idle for too long and is told so."""
        self.heard_s = self.loop.time()
        message: Message | None = None
        while message is None:
            try:
                with until(self.heard_s + self.idle_s):
                    message = await self.line.receive()
            except DeadlineExceeded:
                if not self.is_idle():
                    continue
                await self.close(NORMAL, f"idle for {self.idle_s:g} s")
                return None
        if message["type"] == "websocket.disconnect":
            self.log["code"] = message["code"]
            return None
        text: str | bytes | None = message.get("text")
        return message["bytes"] if text is None else text

    def is_idle(self) -> bool:
        """Whether nothing was heard for too long, by anybody."""
        if self.at_once is not None and self.at_once.is_busy:
            self.heard_s = self.loop.time()
        return self.loop.time() >= self.heard_s + self.idle_s

    async def answer(self, message: str | bytes, begun: Begun | None) -> AnswerDocument:
        """The prediction after one message."""
        if begun is None:
            self.charge()
        elif isinstance(begun.outcome, Exception):
            raise begun.outcome
        elif begun.outcome is not None:
            with self.line.until_hangup():
                return encode.answer(self.engine, await self.engine.end(begun.outcome))
        deadline = self.loop.time() + self.here.timeout_s
        body = await self.decoder.decode(message, StreamBody, deadline)
        if self.engine.retired:
            self.engine = await self.catalog.engine_for(self.session)
        session, engine = self.session, self.engine
        with self.line.until_hangup():
            if body.rewind is not None:
                await engine.rewind(session, body.rewind, deadline)
                return encode.answer(engine, await engine.predict(PredictRequest(session=session, deadline=deadline)))
            step = self.step(body, await tokens_of(engine, body.sequence, deadline), deadline)
            return encode.answer(engine, await engine.step(step))

    def step(self, body: StreamBody, tokens: tuple[int, ...], deadline: float) -> StepRequest:
        """The step that a message asks for. Raises InvalidRequest."""
        return StepRequest(
            session=self.session,
            tokens=tokens,
            mode=body.mode,
            expected_position=body.expected_position,
            idempotency_key=body.idempotency_key,
            top_k=body.top_k,
            deadline=deadline,
        )

    def charge(self) -> None:
        """Counts a message as a request. Raises RateLimited, Unauthorized."""
        if self.here.holder is not None:
            self.here.holder.charge(1)

    async def fail(self, error: Exception, started_s: float) -> bool:
        """Tells a failure, and whether it was the end."""
        failure, code = described(self.scope, error), _close_code(error)
        await self.line.say(json_bytes({"error": failure.body(self.here.request_id)}))
        self.count(failure.status, started_s, failure.code)
        if code is not None:
            self.log["error"] = failure.code
            await self.close(code, failure.code)
        return code is not None

    def count(self, status: int, started_s: float, error: str | None = None) -> None:
        """One message was answered."""
        self.answered += 1
        if error is not None:
            self.metrics.failures.labels(error, self.here.owner.name or "").inc()
        ended_s = time.perf_counter()
        traced = self.traced
        self.metrics.count_message(status, ended_s - started_s, None if traced is None else traced.trace_id)
        if traced is not None:
            end_trace(traced, self.scope, self.here, status, ended_s, error)

    def begin_trace(self, started_s: float) -> None:
        """One message has come: each is traced for itself."""
        if self.tracing is not None:
            self.traced = begin_trace(self.tracing, self.scope, self.here, started_s)
            CURRENT.set(self.traced)

    async def close(self, code: int, reason: str) -> None:
        self.log["code"] = code
        await self.line.hang_up(code, reason)


async def _refuse(socket: WebSocket, error: WaneError, code: int) -> None:
    """The first message is the last."""
    failure, here = described(socket.scope, error), context(socket.scope)
    here.fields.update(error=failure.code, code=code)
    await socket.send_text(json_bytes({"error": failure.body(here.request_id)}).decode())
    await socket.close(code, failure.code)


def _close_code(error: Exception) -> int | None:
    """How a socket is closed after a failure; None where it goes on."""
    if not isinstance(error, WaneError):
        return INTERNAL
    return next((code for kind, code in CLOSES if isinstance(error, kind)), None)
