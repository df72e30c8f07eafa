"""ASGI's way into and out of an exchange: the one piece of middleware, around every route.

It limits a body (413, declared or counted), and answers what a route raises. A WebSocket has its id and its key looked
at before its route runs. One that is refused, or that no route takes, is accepted, told why in a message, and closed
with 1008: a browser tells its page nothing of a handshake that fails.
"""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wane.service.api.exchange import HUNG_UP, HttpExchange, RequestContext, RequestPolicy, context, log_line
from wane.service.auth.guard import chosen
from wane.service.errors import Overloaded, TooLarge, WaneError
from wane.service.observability.logs import log_access
from wane.service.observability.tracing import CURRENT

POLICY = 1008
TRY_AGAIN = 1013


class RequestMiddleware:
    """Wraps an application.

    After the first byte of a response no other is possible: then what was raised goes on, and the server cuts the
    connection. A request that the server cancels, because it waits no longer, is answered too, with 503.
    """

    def __init__(self, app: ASGIApp, *, policy: RequestPolicy) -> None:
        self.app = app
        self.policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self.of_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = HttpExchange(self.policy, scope)
        token = CURRENT.set(exchange.traced)  # also where it is None: a pipelined request begins where another one ends
        status: int | None = None
        sent_bytes = 0

        async def send_out(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *exchange.headers]
            else:
                sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            exchange.admit()
            await self.app(scope, self.bounded(exchange.context, receive), send_out)
        except (Exception, asyncio.CancelledError) as error:
            if status is not None:
                raise
            await exchange.failed(error)(scope, receive, send_out)
        finally:
            exchange.finish(status or HUNG_UP, sent_bytes)
            CURRENT.reset(token)

    async def of_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket has one line in the log, when it is over. What fails in it its route tells in a message, so that
        what is raised here was raised before it was accepted."""
        started_s = time.perf_counter()
        here = scope["wane.context"] = RequestContext.of(scope)
        here.timeout_s = self.policy.request_timeout_ms / 1000
        try:
            try:
                self.policy.authenticate(scope, here)
                await self.app(scope, receive, send)
            except WaneError as error:
                await self.turn_away(scope, receive, send, error)
        finally:
            log_access("socket", log_line(scope, here, time.perf_counter() - started_s) | here.fields)

    async def turn_away(self, scope: Scope, receive: Receive, send: Send, error: WaneError) -> None:
        """Tells a WebSocket why it is refused."""
        document = self.policy.envelope(scope, error).body
        code = TRY_AGAIN if isinstance(error, Overloaded) else POLICY
        context(scope).fields["code"] = code
        await receive()  # that it connects
        await send({"type": "websocket.accept", "subprotocol": chosen(scope)})
        await send({"type": "websocket.send", "text": f'{{"error": {bytes(document).decode()}}}'})
        await send({"type": "websocket.close", "code": code, "reason": error.code})

    def bounded(self, here: RequestContext, receive: Receive) -> Receive:
        """`receive`, which raises TooLarge where the body goes on over the limit; at once where it says that it will.

        A body of declared length is not counted again: the server reads no more of it than that.
        """
        declared = here.headers.get(b"content-length", b"")
        if declared.isdigit():
            if int(declared) > self.policy.max_body_bytes:
                raise self.too_large(f"is {declared.decode()} bytes")
            return receive
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.policy.max_body_bytes:
                raise self.too_large("goes on")
            return message

        return counted_receive

    def too_large(self, what: str) -> TooLarge:
        return TooLarge(f"the body {what}; at most {self.policy.max_body_bytes} bytes are taken")
