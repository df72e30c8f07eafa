"""The door: the one piece of middleware, pure ASGI, that every HTTP request passes once, in and out.

In:   its id (x-request-id, traceparent), its path (404), its key (401, 403, 429), its deadline
      (x-request-timeout-ms), the limit of its body (413, declared or counted).
Out:  x-request-id and what tells browsers to be careful, an answer for whatever was raised, the metrics, and one line
      in the access log, whatever became of it.

A WebSocket has its id and its key looked at too, before any route knows of it. One that is refused, or for which there
is no route, is accepted, told why in a message, and closed with 1008, for of a handshake that fails a browser tells its
page nothing.

It is one class, because every layer costs every message of every request a call.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import getrandbits

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wane.service.auth.guard import Authenticator, chosen
from wane.service.auth.keyring import Principal
from wane.service.errors import InvalidRequest, NotFound, Overloaded, TooLarge, Unavailable, WaneError, truncate_repr
from wane.service.observability.logs import log_access, logs_access
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import CURRENT, Parent, Traced, Tracing
from wane.service.registry.swap import Epochs
from wane.service.types import ANYBODY, Owner

Envelope = Callable[[Scope, Exception], Response]
"""Turns a failure into the answer of the protocol that the request's path speaks."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})  # others are one label
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
TIMEOUT_HEADER = "x-request-timeout-ms"
TIMEOUT = "(?=0*[1-9])[0-9]{1,9}"
ADMITTED = "wane.admitted"
"""In the scope of a request whose key was looked at, and which was counted, before it came to the door: its holder."""

HUNG_UP = 499  # the status of a request whose client left before an answer began
LOGGED_CHARACTERS = 256  # of a path: those of our routes are shorter
# Of what is not POSTed: the answer to a POST no browser stores, nor takes for a script, a style or an image.
SECURITY_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
POLICY = 1008
TRY_AGAIN = 1013


@dataclass(slots=True)
class RequestContext:
    """What the server knows of one request beside its body.

    `parent` is the client's span, `trace_id` names the trace. `headers`: by lower-case name, the first of each.
    `timeout_s` is what one answer may take, of a WebSocket each, and `body_timeout_s` what a body may take to
    come in; a request's `deadline` is in seconds on the event loop's clock. `fields` is what a route adds to the access
    log. `principal` has the key that the request came with, where there are keys, and is the `owner` of its sessions.
    """

    request_id: str
    trace_id: str | None = None
    parent: Parent | None = None
    headers: dict[bytes, bytes] = field(default_factory=dict)
    timeout_s: float = math.inf
    deadline: float | None = None
    body_timeout_s: float = math.inf
    fields: dict[str, object] = field(default_factory=dict)
    owner: Owner = ANYBODY
    principal: Principal | None = None

    @classmethod
    def of(cls, scope: Scope) -> RequestContext:
        """A request's id is the client's `x-request-id`, else its trace's id, else a new one."""
        headers = dict(reversed(scope["headers"]))
        parent = Parent.of(headers.get(b"traceparent"))
        trace_id = None if parent is None else f"{parent.trace_id:032x}"
        given = headers.get(b"x-request-id")
        if given is not None and REQUEST_ID.fullmatch(given):
            request_id = given.decode()
        else:
            request_id = trace_id or f"{getrandbits(128):032x}"
        return cls(request_id, trace_id, parent, headers)

    def request_id_header(self) -> tuple[bytes, bytes]:
        """The header of the answer that tells the id."""
        return b"x-request-id", self.request_id.encode()

    def header(self, name: str) -> str | None:
        """The value of the first header of this lower-case name."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")


def context(scope: Scope) -> RequestContext:
    """The context that the door gave to this request."""
    found = scope["wane.context"]
    assert isinstance(found, RequestContext), "this is a bug: every request comes through the door"
    return found


class RequestMiddleware:
    """Wraps an application; see the module's text.

    `max_body_bytes` is the longest body; `request_timeout_ms` the deadline of requests that name none: a client may
    shorten it, not lengthen it. After the first byte of an answer no other is possible: then what was raised goes on,
    and the server cuts the connection. A request that the server cancels, because it waits for nobody any more, is
    answered too, with 503. Whoever is to wait until requests are over asks the `epochs`; of WebSockets, which last,
    their messages count.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        request_timeout_ms: float,
        envelope: Envelope,
        metrics: Metrics,
        epochs: Epochs,
        guard: Authenticator | None = None,
        body_timeout_s: float = math.inf,
        tracing: Tracing | None = None,
    ) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.request_timeout_ms = request_timeout_ms
        self.envelope = envelope
        self.metrics = metrics
        self.epochs = epochs
        self.guard = guard
        self.body_timeout_s = body_timeout_s
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self.of_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_s = time.perf_counter()
        epoch = self.epochs.enter()
        here = scope["wane.context"] = RequestContext.of(scope)
        traced = None if self.tracing is None else begin_trace(self.tracing, scope, here, started_s)
        if traced is not None:
            here.trace_id = traced.trace_id
        token = None if traced is None else CURRENT.set(traced)
        status: int | None = None
        sent_bytes = 0

        async def send_out(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                careful = () if scope["method"] == "POST" else SECURITY_HEADERS
                message["headers"] = [*message["headers"], here.request_id_header(), *careful]
            else:
                sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            if not scope["path"].isprintable():
                refuse_control(scope["path"])
            if self.guard is not None:
                self.admit(self.guard, scope, here)
            self.set_deadline(here)
            await self.app(scope, self.bounded(here, receive), send_out)
        except (Exception, asyncio.CancelledError) as error:
            if status is not None:
                raise
            if isinstance(error, asyncio.CancelledError):
                error = Unavailable("the server is stopping")
            await self.envelope(scope, error)(scope, receive, send_out)
        finally:
            epoch.leave()
            ended_s = time.perf_counter()
            self.record(scope, here, status or HUNG_UP, sent_bytes, ended_s - started_s, traced)
            if traced is not None and token is not None:
                CURRENT.reset(token)
                end_trace(traced, scope, here, status or HUNG_UP, ended_s)

    async def of_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket has one line in the log, when it is over. What fails in it its route tells in a message, so that
        what is raised here was raised before it was accepted."""
        started_s = time.perf_counter()
        here = scope["wane.context"] = RequestContext.of(scope)
        here.timeout_s = self.request_timeout_ms / 1000
        try:
            try:
                if not scope["path"].isprintable():
                    refuse_control(scope["path"])
                if self.guard is not None:
                    self.admit(self.guard, scope, here)
                await self.app(scope, receive, send)
            except WaneError as error:
                await self.turn_away(scope, receive, send, error)
        finally:
            log_access("socket", self.line(scope, here, time.perf_counter() - started_s) | here.fields)

    def admit(self, guard: Authenticator, scope: Scope, here: RequestContext) -> None:
        """Notes who asks. Raises Unauthorized, Forbidden, RateLimited."""
        principal = scope[ADMITTED] if ADMITTED in scope else guard.identify(scope, here.headers)
        if principal is not None:
            here.principal = principal
            here.owner = principal.owner
            here.fields["key"] = principal.key.name
            if ADMITTED not in scope:
                guard.admit(scope, principal)

    async def turn_away(self, scope: Scope, receive: Receive, send: Send, error: WaneError) -> None:
        """Tells a WebSocket why it is refused."""
        document = self.envelope(scope, error).body
        code = TRY_AGAIN if isinstance(error, Overloaded) else POLICY
        context(scope).fields["code"] = code
        await receive()  # that it connects
        await send({"type": "websocket.accept", "subprotocol": chosen(scope)})
        await send({"type": "websocket.send", "text": f'{{"error": {bytes(document).decode()}}}'})
        await send({"type": "websocket.close", "code": code, "reason": error.code})

    def set_deadline(self, here: RequestContext) -> None:
        """Notes by when an answer is wanted. Raises InvalidRequest for a timeout that is none."""
        here.timeout_s = self.timeout_s(here)
        here.body_timeout_s = self.body_timeout_s
        here.deadline = asyncio.get_running_loop().time() + here.timeout_s

    def timeout_s(self, here: RequestContext) -> float:
        """How long an answer is wanted. Raises InvalidRequest for a timeout that is none."""
        asked = here.header(TIMEOUT_HEADER)
        if asked is None:
            return self.request_timeout_ms / 1000
        if not re.fullmatch(TIMEOUT, asked):
            raise InvalidRequest(
                f"{TIMEOUT_HEADER} must be a whole number of milliseconds from 1, not {truncate_repr(asked)}",
                TIMEOUT_HEADER,
            )
        return min(int(asked), self.request_timeout_ms) / 1000

    def bounded(self, here: RequestContext, receive: Receive) -> Receive:
        """`receive`, which raises TooLarge where the body goes on over the limit; at once where it says that it will.

        A body of declared length is not counted again: the server reads no more of it than that.
        """
        declared = here.headers.get(b"content-length", b"")
        if declared.isdigit():
            if int(declared) > self.max_body_bytes:
                raise self.too_large(f"is {declared.decode()} bytes")
            return receive
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise self.too_large("goes on")
            return message

        return counted_receive

    def too_large(self, what: str) -> TooLarge:
        return TooLarge(f"the body {what}; at most {self.max_body_bytes} bytes are taken")

    def record(
        self, scope: Scope, here: RequestContext, status: int, sent_bytes: int, seconds: float, traced: Traced | None
    ) -> None:
        """Counts and logs a request that is over."""
        method = scope["method"]
        known = method if method in METHODS else "other"
        self.metrics.count_request(
            route(scope), known, status, seconds, traced.trace_id if traced is not None else None
        )
        if "error" in here.fields:
            self.metrics.request_errors.labels(here.fields["error"], here.owner.name or "").inc()
        if not logs_access():
            return
        line = self.line(scope, here, seconds)
        line["method"] = method[:LOGGED_CHARACTERS]
        line["status"] = status
        line["bytes"] = sent_bytes
        log_access("request", line | here.fields)

    def line(self, scope: Scope, here: RequestContext, seconds: float) -> dict[str, object]:
        """What the log says of every request."""
        client = scope.get("client")
        return {
            "request_id": here.request_id,
            "trace_id": here.trace_id,
            "client": client[0] if client else None,
            "path": scope["path"][:LOGGED_CHARACTERS],
            "duration_ms": round(seconds * 1000, 3),
        }


def refuse_control(path: str) -> None:
    """Raises NotFound for a path with a control character: the expressions that routes are found by take one for the
    end of a line, and then the path is not what it is compared with elsewhere."""
    if CONTROL.search(path):
        raise NotFound("there is nothing at this path: it has a control character")


def route(scope: Scope) -> str:
    """The template of the request's path; for one that there is nothing at, `unmatched`."""
    found: str = getattr(scope.get("route"), "path", "unmatched")
    return found


def begin_trace(tracing: Tracing, scope: Scope, here: RequestContext, started_s: float) -> Traced | None:
    """A request, or a WebSocket's message, if it is sampled; one without a parent begins a trace of its own."""
    states = [value for name, value in scope["headers"] if name == b"tracestate"]
    return tracing.begin(here.parent, states, started_s)


def end_trace(
    traced: Traced, scope: Scope, here: RequestContext, status: int, ended_s: float, error: object | None = None
) -> None:
    """Says of it what the access log says, and the `error` that a message was answered with."""
    method = scope.get("method", "WS")  # of a message
    attributes = {
        "http.request.method": scope.get("method"),
        "http.route": route(scope),
        "http.response.status_code": status,
        "url.path": scope["path"][:LOGGED_CHARACTERS],
        "wane.request_id": here.request_id,
        **{f"wane.{name}": value for name, value in here.fields.items()},
    }
    error = error or here.fields.get("error")
    known = method if method in METHODS or method == "WS" else "HTTP"
    traced.end(f"{known} {route(scope)}", status, attributes, None if error is None else str(error), ended_s)
