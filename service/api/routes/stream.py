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
from typing import NamedTuple

from fastapi import APIRouter
from pydantic_core import from_json
from starlette.websockets import WebSocket, WebSocketDisconnect

from wane.service.api import encode
from wane.service.api.body import LARGE_BYTES, Decoder, parse, tokens_of
from wane.service.api.channel import AsgiChannel, Channel, NativeChannel, wire_of
from wane.service.api.deps import registry, session_key, settings
from wane.service.api.encode import json_bytes
from wane.service.api.middleware import begin_trace, context, end_trace
from wane.service.api.problem import described
from wane.service.api.schemas.predict import AnswerDocument
from wane.service.api.schemas.sessions import StreamBody
from wane.service.auth.guard import chosen
from wane.service.engine.deadline import until
from wane.service.engine.engine import Engine, deadline_error
from wane.service.engine.inline_step import InlineStep
from wane.service.errors import (
    Abandoned,
    Conflict,
    DeadlineExceeded,
    Unauthorized,
    Unavailable,
    UnknownSession,
    WaneError,
)
from wane.service.net.timers import Timer, timers
from wane.service.net.websocket_protocol import ClientDisconnected, Message
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import CURRENT, Traced, Tracing
from wane.service.registry.swap import Epoch
from wane.service.types import Answer, PredictRequest, StepRequest

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
            name = session_key(socket, session)
            deadline = asyncio.get_running_loop().time() + context(socket.scope).timeout_s
            engine = await registry(socket).engine_for(name, deadline=deadline)
        except DeadlineExceeded as error:
            await _refuse(socket, error, RESTART)
            return
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
        self.registry = registry(socket)
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
        self.line: Channel = wire or AsgiChannel(socket)
        self.begun: PendingMessage | None = None  # of the message that is taken next
        self.at_once = None if wire is None or self.tracing is not None else InlineSteps(self, wire)

    async def run(self) -> None:
        """Answers messages until there are no more."""
        try:
            while (message := await self.take()) is not None:
                begun, self.begun = self.begun, None
                started_s = time.perf_counter() if begun is None else begun.started_s
                self.begin_trace(started_s)
                epoch = self.registry.epochs.enter() if begun is None else begun.epoch
                try:
                    await self.line.say(json_bytes(await self.answer(message, begun)))
                except Abandoned:
                    self.log["error"] = Abandoned.code
                    return
                except ClientDisconnected:
                    raise
                except Exception as error:
                    if await self.fail(error, started_s):
                        return
                else:
                    self.count(HTTPStatus.OK, started_s)
                finally:
                    epoch.leave()
        except ClientDisconnected:  # while its answer was sent
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

    async def answer(self, message: str | bytes, begun: PendingMessage | None) -> AnswerDocument:
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
            self.engine = await self.registry.engine_for(self.session, deadline=deadline)
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
        if self.here.principal is not None:
            self.here.principal.charge(1)

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
            self.metrics.request_errors.labels(error, self.here.owner.name or "").inc()
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
    try:
        await socket.send_text(json_bytes({"error": failure.body(here.request_id)}).decode())
        await socket.close(code, failure.code)
    except WebSocketDisconnect:  # the client left while its model was being loaded
        here.fields["code"] = GONE


def _close_code(error: Exception) -> int | None:
    """How a socket is closed after a failure; None where it goes on."""
    if not isinstance(error, WaneError):
        return INTERNAL
    return next((code for kind, code in CLOSES if isinstance(error, kind)), None)


class PendingMessage(NamedTuple):
    """What was done for a message before the stream's task took it: it was charged for, and then nothing (None), or
    failed, or made a step that is over. `epoch` is the one that it entered, `started_s` by `time.perf_counter`."""

    outcome: InlineStep | Exception | None
    started_s: float
    epoch: Epoch


class InlineSteps:
    """Begins the steps of one stream, one at a time: while there is one, its task is given nothing."""

    def __init__(self, stream: Stream, wire: NativeChannel) -> None:
        self._stream = stream
        self._wire = wire
        self._receive_queue = wire.receive_queue
        self._message = ""
        self._started_s = 0.0
        self._epoch = Epoch()
        self._timer: Timer | None = None
        self._quick: InlineStep | None = None
        self._receive_queue.beginner = self

    def begin(self, message: str) -> bool:
        """Whether the message is taken; else it is the task's."""
        stream = self._stream
        if stream.engine.retired or len(message) > LARGE_BYTES or not self._wire.may_say():
            return False
        started_s = time.perf_counter()
        stream.heard_s = stream.loop.time()
        deadline = stream.heard_s + stream.here.timeout_s
        try:
            token = only_token(message)
            if token is not None:
                step = StepRequest(stream.session, (token,), deadline=deadline)
            else:
                body = parse(message, StreamBody)
                if body.tokens is None:
                    return False
                step = stream.step(body, tuple(body.tokens), deadline)
        except Exception:  # the task will say so
            return False
        epoch = stream.registry.epochs.enter()
        try:
            stream.charge()
            quick = stream.engine.begin(step)
        except Exception as error:
            stream.begun = PendingMessage(error, started_s, epoch)
            return False
        if quick is None:
            stream.begun = PendingMessage(None, started_s, epoch)
            return False
        self._message, self._started_s, self._epoch, self._quick = message, started_s, epoch, quick
        self._timer = timers().at(deadline, self._ring)
        quick.answer.add_done_callback(self._answered)
        return True

    def give_up(self) -> None:
        """The client has left. What is in a batch is carried through, and then told to nobody."""
        quick = self._quick
        if quick is not None and not quick.ticket.entered:
            self._stream.log["error"] = Abandoned.code
            self.leave()
            self._receive_queue.go_on()

    @property
    def is_busy(self) -> bool:
        """Whether a step is on its way."""
        return self._quick is not None

    def close(self) -> None:
        """There is no task any more."""
        self._receive_queue.beginner = None
        self.leave()

    def leave(self) -> None:
        """Nobody waits for the step any more, if there is one."""
        quick, self._quick = self._quick, None
        if quick is not None:
            self._at_ease()
            quick.leave()
            self._epoch.leave()

    def _answered(self, answer: asyncio.Future[Answer | None]) -> None:
        error = answer.exception()
        quick, stream = self._quick, self._stream
        if quick is None or quick.answer is not answer:
            return
        if error is not None or (given := answer.result()) is None:  # another writer was first: it is tried again
            self._hand_over(quick)
            return
        try:
            stream.engine.count("step", given)
            text = json_bytes(encode.answer(stream.engine, given))
        except Exception as unexpected:
            self._hand_over(unexpected)
            return
        self._quick = None
        self._at_ease()
        if self._wire.say_now(text):
            stream.count(200, self._started_s)
        stream.heard_s = stream.loop.time()
        self._epoch.leave()
        self._receive_queue.go_on()

    def _ring(self) -> None:
        self._timer = None
        if self._quick is not None:
            self._hand_over(deadline_error(self._quick, self._quick.ticket))

    def _hand_over(self, outcome: InlineStep | Exception) -> None:
        """The task has the message, and what became of it."""
        self._quick = None
        self._at_ease()
        self._stream.begun = PendingMessage(outcome, self._started_s, self._epoch)
        self._receive_queue.put_back({"type": "websocket.receive", "text": self._message})
        self._receive_queue.go_on()

    def _at_ease(self) -> None:
        """No deadline is waited for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def only_token(message: str) -> int | None:
    """The token of a message that has one and says nothing else: most are such, and need no model to be read by. None
    of any other, good or bad."""
    try:
        document = from_json(message)
    except ValueError:
        return None
    if type(document) is not dict or len(document) != 1:
        return None
    tokens = document.get("tokens")
    return tokens[0] if type(tokens) is list and len(tokens) == 1 and type(tokens[0]) is int else None
