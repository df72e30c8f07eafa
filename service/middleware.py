"""Pure ASGI middleware: each class wraps the next application and sees every HTTP request once.

`stack` builds them in their order, outermost first:

    Identity     names the request: x-request-id in and out, traceparent
    AccessLog    one JSON line a request, whatever became of it
    Failures     turns what was raised below into an answer; nothing escapes but after the first byte
    Deadline     x-request-timeout-ms
    BodyLimit    413, declared or counted
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import InvalidRequest, TooLarge, Unavailable, shown
from service.logs import ACCESS
from service.metrics import Metrics

Envelope = Callable[[Scope, Exception], Response]
"""Turns a failure into the answer of the protocol that the request's path speaks."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})  # others are one label
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
TIMEOUT_HEADER = "x-request-timeout-ms"
LOGGED_CHARACTERS = 256  # of a path: those of our routes are shorter


@dataclass(slots=True)
class Context:
    """What the server knows of one request beside its body.

    `deadline` is in seconds on the event loop's clock; `fields` is what a route adds to the access log.
    """

    request_id: str
    trace_id: str | None
    deadline: float | None = None
    fields: dict[str, object] = field(default_factory=dict)


def context(scope: Scope) -> Context:
    """The context that `Identity` gave to this request."""
    found = scope["wane.context"]
    assert isinstance(found, Context), "this is a bug: Identity is outermost"
    return found


def stack(*, max_body_bytes: int, request_timeout_ms: float, envelope: Envelope, metrics: Metrics) -> list[Middleware]:
    """The whole of the middleware, outermost first."""
    return [
        Middleware(Identity),
        Middleware(AccessLog, metrics=metrics),
        Middleware(Failures, envelope=envelope),
        Middleware(Deadline, default_ms=request_timeout_ms),
        Middleware(BodyLimit, max_bytes=max_body_bytes),
    ]


class Identity:
    """Gives the request its id: the client's `x-request-id`, else its trace's id, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trace = TRACEPARENT.fullmatch(headers.get("traceparent", ""))
        trace_id = trace[1] if trace else None
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = trace_id or uuid.uuid4().hex
        scope["wane.context"] = Context(request_id, trace_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class AccessLog:
    """Logs and counts a request when it is over; its status is 499 where the client left before an answer began."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 499
        sent_bytes = 0

        async def counted_send(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, counted_send)
        finally:
            self.record(scope, status, sent_bytes, time.perf_counter() - started)

    def record(self, scope: Scope, status: int, sent_bytes: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.metrics.http_requests.labels(route, method, str(status)).inc()
        self.metrics.http_request_seconds.labels(route).observe(seconds)
        here = context(scope)
        client = scope.get("client")
        fields: dict[str, object] = {
            "request_id": here.request_id,
            "trace_id": here.trace_id,
            "client": client[0] if client else None,
            "method": scope["method"][:LOGGED_CHARACTERS],
            "path": scope["path"][:LOGGED_CHARACTERS],
            "status": status,
            "bytes": sent_bytes,
            "duration_ms": round(seconds * 1000, 3),
            **here.fields,
        }
        ACCESS.info("request", extra={"fields": fields})


class Failures:
    """Answers for whatever was raised below, through the envelope of the path's protocol; a request that is cancelled
    is answered too, with 503.

    After the first byte no answer is possible: the exception goes on, and the server cuts the connection.
    """

    def __init__(self, app: ASGIApp, envelope: Envelope) -> None:
        self.app = app
        self.envelope = envelope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except (Exception, asyncio.CancelledError) as error:
            if started:
                raise
            if isinstance(error, asyncio.CancelledError):  # by the server, which waits for nobody any more
                error = Unavailable("the server is stopping")
            await self.envelope(scope, error)(scope, receive, send)


class Deadline:
    """Sets the request's deadline from `x-request-timeout-ms`; a client may shorten the default, not lengthen it."""

    def __init__(self, app: ASGIApp, default_ms: float) -> None:
        self.app = app
        self.default_ms = default_ms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            asked = Headers(scope=scope).get(TIMEOUT_HEADER)
            timeout_ms = self.default_ms if asked is None else min(self.parse(asked), self.default_ms)
            context(scope).deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
        await self.app(scope, receive, send)

    @staticmethod
    def parse(text: str) -> float:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
            raise InvalidRequest(
                f"{TIMEOUT_HEADER} must be a whole number of milliseconds from 1, not {shown(text)}",
                TIMEOUT_HEADER,
            )
        return float(text)


class BodyLimit:
    """Refuses a body over `max_bytes`: at once where its length is declared, else when the count passes it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self.max_bytes:
            raise self.refusal(f"is {declared} bytes")
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise self.refusal("goes on")
            return message

        await self.app(scope, counted_receive, send)

    def refusal(self, what: str) -> TooLarge:
        return TooLarge(f"the body {what}; at most {self.max_bytes} bytes are taken")
