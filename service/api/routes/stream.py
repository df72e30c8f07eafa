"""Serves a session over a WebSocket. `openapi.SOCKET` describes the protocol."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from wane.service.api.body import ONE_TOKEN, Decoder, only_token
from wane.service.api.deps import session_key, settings
from wane.service.api.disconnect import until_hangup
from wane.service.api.encode import json_bytes
from wane.service.api.exchange import MessageExchange, RequestPolicy, context, registry
from wane.service.api.problem import described
from wane.service.api.routes.sessions import TOP_K, engine_to_step, step_request
from wane.service.api.schemas.sessions import StreamBody
from wane.service.auth.guard import chosen
from wane.service.engine.engine import Engine
from wane.service.errors import (
    Abandoned,
    Conflict,
    DeadlineExceeded,
    RateLimited,
    Unauthorized,
    Unavailable,
    UnknownSession,
    WaneError,
)
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import CURRENT
from wane.service.types.answer import Answer
from wane.service.types.request import PredictRequest

NORMAL = 1000
DISCONNECTED = 1006
INTERNAL = 1011
POLICY = 1008
RESTART = 1012
NO_SESSION = 4404
RATE_WAIT_S = 1.0  # the longest time for which a message waits for its key's rate
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
    """Serves the WebSocket of a session. The module's docstring describes the protocol."""
    metrics: Metrics = socket.app.state.metrics
    await socket.accept(chosen(socket.scope))
    with metrics.websockets.track_inprogress():
        try:
            name = session_key(socket, session)
            deadline = asyncio.get_running_loop().time() + context(socket.scope).timeout_s
            engine = await registry(socket).engine_for(name, deadline=deadline)
        except UnknownSession:
            engine = None
        except DeadlineExceeded as error:
            await _refuse(socket, error, RESTART)
            return
        except WaneError as error:
            await _refuse(socket, error, _close_code(error) or NO_SESSION)  # a session with an invalid id cannot exist
            return
        await Stream(socket, engine, name).run()


class Stream:
    """An open WebSocket of a session."""

    def __init__(self, socket: WebSocket, engine: Engine | None, session: str) -> None:
        """`session` is the session's key. `engine` is None if the session does not exist."""
        self.socket = socket
        self.scope = socket.scope
        self.registry = registry(socket)
        self.engine = engine
        self.session = session
        self.policy: RequestPolicy = socket.app.state.policy
        self.decoder: Decoder = socket.app.state.decoder
        self.idle_s = settings(socket).stream_idle_s
        self.request_context = context(socket.scope)
        self.log = self.request_context.fields
        if engine is not None:
            self.log["model"] = engine.name
        self.answered = 0

    async def run(self) -> None:
        """Answers messages until the WebSocket is closed."""
        try:
            while (message := await self.take()) is not None:
                if await self.respond(message):
                    return
        except WebSocketDisconnect:  # the client disconnected while an answer was being sent
            self.log["code"] = DISCONNECTED
        finally:
            self.log["messages"] = self.answered

    async def take(self) -> str | bytes | None:
        """Returns the next message, or None if the client has disconnected or was idle for too long."""
        try:
            async with asyncio.timeout(self.idle_s):
                message = await self.socket.receive()
        except TimeoutError:
            await self.close(NORMAL, f"idle for {self.idle_s:g} s")
            return None
        if message["type"] == "websocket.disconnect":
            self.log["code"] = message["code"]
            return None
        text: str | bytes | None = message.get("text")
        return message["bytes"] if text is None else text

    async def respond(self, message: str | bytes) -> bool:
        """Answers, traces and counts one message. Returns True if the socket is closed.

        Raises WebSocketDisconnect.
        """
        exchange = MessageExchange(self.policy, self.scope, self.request_context)
        if self.policy.tracing is not None:
            CURRENT.set(exchange.traced)
        status: int | None = None
        failed: str | None = None
        try:
            deadline = exchange.admit()
            with until_hangup(self.socket):
                answer = await self.answer(message, deadline)
            await self.send(json_bytes(answer))
            status = HTTPStatus.OK
        except Abandoned:
            self.log["error"] = Abandoned.code
            return True
        except WebSocketDisconnect:
            raise
        except Exception as error:
            failure, code = described(self.scope, error), _close_code(error)
            await self.send(json_bytes({"error": failure.body(self.request_context.request_id)}))
            status, failed = failure.status, failure.code
            if code is not None:
                self.log["error"] = failure.code
                await self.close(code, failure.code)
            # A failure may wait for nothing, so it gives other connections a turn.
            await asyncio.sleep(min(error.retry_after_s, RATE_WAIT_S) if isinstance(error, RateLimited) else 0)
            return code is not None
        else:
            return False
        finally:
            self.answered += status is not None
            exchange.finish(status, failed)

    async def answer(self, message: str | bytes, deadline: float) -> Answer:
        """Runs the step or the rewind of one message. Returns the prediction."""
        token = only_token(message)
        body = ONE_TOKEN if token is not None else await self.decoder.decode(message, StreamBody, deadline)
        engine, creator = self.engine, None
        if body.create or body.model is not None:
            engine, creator = await engine_to_step(self.socket, self.session, body, body.expected_position, deadline)
        elif engine is None or engine.retired:
            engine = await self.registry.engine_for(self.session, deadline=deadline)
        if engine is not self.engine:
            self.engine, self.log["model"] = engine, engine.name
        if body.rewind is not None:
            await engine.rewind(self.session, body.rewind, deadline)
            return await engine.submit(PredictRequest(session=self.session, deadline=deadline))
        if token is not None:
            return await engine.step_one(self.session, token, None, TOP_K, deadline)
        step = await step_request(
            engine, self.session, body, deadline, creator, body.expected_position, body.idempotency_key
        )
        return await engine.submit(step)

    async def send(self, text: bytes) -> None:
        """Raises WebSocketDisconnect if the client has disconnected."""
        try:
            await self.socket.send({"type": "websocket.send", "text": text.decode()})
        except RuntimeError as error:  # uvicorn has closed the WebSocket meanwhile
            raise WebSocketDisconnect(DISCONNECTED) from error

    async def close(self, code: int, reason: str) -> None:
        self.log["code"] = code
        with suppress(WebSocketDisconnect):
            await self.socket.close(code, reason)


async def _refuse(socket: WebSocket, error: WaneError, code: int) -> None:
    """Sends a problem document as the socket's only message. Then closes the socket."""
    failure, request_context = described(socket.scope, error), context(socket.scope)
    request_context.fields.update(error=failure.code, code=code)
    try:
        await socket.send_text(json_bytes({"error": failure.body(request_context.request_id)}).decode())
        await socket.close(code, failure.code)
    except WebSocketDisconnect:  # the client disconnected while its model was being loaded
        request_context.fields["code"] = DISCONNECTED


def _close_code(error: Exception) -> int | None:
    """Returns the close code for a failure, or None if the socket stays open after this failure."""
    if not isinstance(error, WaneError):
        return INTERNAL
    return next((code for kind, code in CLOSES if isinstance(error, kind)), None)
