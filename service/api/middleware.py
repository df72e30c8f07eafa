"""The only ASGI middleware, around every route, and the routes that are called before the framework's routing.

It rejects a body whose declared or received length exceeds the limit (413), and converts the exceptions of routes to
responses. It answers preflight requests, with which a browser asks whether a page of another origin may send a request
(`cors.py`).

The middleware checks a WebSocket's origin and API key before the WebSocket's route runs. If the origin, the key or the
path is invalid, the middleware still accepts the WebSocket, sends the reason in a message, and closes the WebSocket
with 1008. The handshake is not rejected, because browsers do not show a page the reason for a rejected handshake.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wane.service.api.body import ENCODING, read, uncompressed
from wane.service.api.disconnect import WHOLE_BODY, until_hangup
from wane.service.api.encode import Reply
from wane.service.api.exchange import HttpExchange, RequestContext, RequestPolicy, context, log_line
from wane.service.auth.guard import chosen
from wane.service.errors import Overloaded, TooLarge, WaneError
from wane.service.observability.logs import log_access
from wane.service.observability.tracing import CURRENT

Endpoint = Callable[..., Awaitable[Response]]

ENCODING_BYTES = ENCODING.encode()
POLICY = 1008
TRY_AGAIN = 1013


class RequestMiddleware:
    """Wraps an application.

    Once a response has started, no other response is possible. If the application then raises an exception, the
    middleware raises it again, and the server closes the connection. The response to a request that the server cancels
    during shutdown is a 503.
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
        exchange = HttpExchange(self.policy, scope, send)
        # CURRENT is set even for a request without a span, because the context may be a copy of an earlier request's.
        token = CURRENT.set(exchange.traced)
        cross_origin = self.policy.cross_origin
        try:
            preflight = None if cross_origin is None else cross_origin.preflight(scope)
            if preflight is not None:
                await preflight(scope, receive, exchange.send)
                return
            exchange.admit()
            await self.answer(scope, receive, exchange)
        except (Exception, asyncio.CancelledError) as error:
            if exchange.status is not None:
                raise
            await exchange.failed(error)(scope, receive, exchange.send)
        finally:
            exchange.finish()
            CURRENT.reset(token)

    def answer(self, scope: Scope, receive: Receive, exchange: HttpExchange) -> Awaitable[None]:
        """Passes an admitted request to the application."""
        return self.app(scope, self.bounded(exchange.context, receive), exchange.send)

    async def of_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a WebSocket, and logs one line when the WebSocket is closed. The route sends failures as messages.
        Therefore, an exception that arrives here was raised before the WebSocket was accepted."""
        started_s = time.perf_counter()
        request_context = scope["wane.context"] = RequestContext.of(scope)
        request_context.timeout_s = self.policy.request_timeout_ms / 1000
        try:
            try:
                if self.policy.cross_origin is not None:
                    self.policy.cross_origin.check_socket(request_context.headers)
                self.policy.authenticate(scope, request_context)
                await self.app(scope, receive, send)
            except WaneError as error:
                await self.turn_away(scope, receive, send, error)
        finally:
            log_access(
                "socket", log_line(scope, request_context, time.perf_counter() - started_s) | request_context.fields
            )

    async def turn_away(self, scope: Scope, receive: Receive, send: Send, error: WaneError) -> None:
        """Accepts a WebSocket, sends the error, and closes the WebSocket."""
        document = self.policy.envelope(scope, error).body
        code = TRY_AGAIN if isinstance(error, Overloaded) else POLICY
        context(scope).fields["code"] = code
        await receive()  # receives `websocket.connect`
        await send({"type": "websocket.accept", "subprotocol": chosen(scope)})
        await send({"type": "websocket.send", "text": f'{{"error": {bytes(document).decode()}}}'})
        await send({"type": "websocket.close", "code": code, "reason": error.code})

    def bounded(self, request_context: RequestContext, receive: Receive) -> Receive:
        """Returns a `receive` that raises TooLarge if the body exceeds the limit. Raises TooLarge immediately if the
        declared length exceeds the limit. The bytes of a body with a declared length are not counted, because the
        server reads at most the declared length.
        """
        declared = request_context.headers.get(b"content-length", b"")
        if declared.isdigit():
            declared = declared.lstrip(b"0") or b"0"
            if int(declared) > self.policy.max_body_bytes:
                raise self.too_large(f"is {declared.decode()} bytes")
            return receive
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.policy.max_body_bytes:
                raise self.too_large("is too long")
            return message

        return counted_receive

    def too_large(self, what: str) -> TooLarge:
        return TooLarge(f"the body {what}; at most {self.policy.max_body_bytes} bytes are accepted")


class HotRoutes(RequestMiddleware):
    """Calls the endpoints of the most frequent routes, with the request and the parameters of its path. The framework's
    routing takes several times as long as such an endpoint."""

    def __init__(
        self, app: ASGIApp, routes: Iterable[BaseRoute], endpoints: frozenset[Endpoint], *, policy: RequestPolicy
    ) -> None:
        """`app` is the application that contains the `routes`."""
        super().__init__(app, policy=policy)
        hot = [route for route in routes if isinstance(route, Route) and route.endpoint in endpoints]
        assert len(hot) == len(endpoints), "an endpoint has no route: this is a bug"
        self._by_path = {route.path: route for route in hot if not route.param_convertors}
        self._by_pattern = [route for route in hot if route.param_convertors]

    def matches(self, scope: Scope) -> bool:
        """Returns whether a request matches one of the routes. Stores the route in the request's scope."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return False
        path = scope["path"]
        route = self._by_path.get(path)
        if route is not None:
            scope["route"], scope["path_params"] = route, {}
            return True
        for route in self._by_pattern:
            match = route.path_regex.fullmatch(path)
            if match is not None:
                scope["route"], scope["path_params"] = route, match.groupdict()
                return True
        return False

    async def answer(self, scope: Scope, receive: Receive, exchange: HttpExchange) -> None:
        """Calls the endpoint of an admitted request."""
        scope["app"] = self.app
        request = Request(scope, receive)
        watch = until_hangup(request)
        # the body, if it was received together with the head
        body = None if watch.connection is None else watch.connection.content
        if body is None:
            body = await read(Request(scope, self.bounded(exchange.context, receive)))
        elif len(body) > self.policy.max_body_bytes:
            raise self.too_large(f"is {len(body)} bytes")
        elif ENCODING_BYTES in exchange.context.headers:
            body = await uncompressed(request, body)
        with watch:
            scope[WHOLE_BODY] = body
            response = await scope["route"].endpoint(request, **scope["path_params"])
        if type(response) is Reply:
            await exchange.reply(response)
        else:
            await response(scope, receive, exchange.send)
