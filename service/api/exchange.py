"""Handles one HTTP request, or one message of a WebSocket, from its arrival to its answer.

For an HTTP request, the exchange does the following. Before the endpoint runs, the exchange reads the request id
(x-request-id, traceparent), checks the path (404) and the API key (401, 403, 429), and sets the deadline
(x-request-timeout-ms). After the endpoint has ended, the exchange adds x-request-id and security headers, converts an
exception to a response, updates the metrics, ends the span, and writes one line to the access log.

The answer to a message of a WebSocket is sent by `routes/stream.py`.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import INFO
from random import getrandbits

from msgspec import Struct
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from wane.service.api.cors import CrossOrigin
from wane.service.auth.guard import FREE, Authenticator
from wane.service.auth.keyring import Principal
from wane.service.errors import InvalidRequest, NotFound, Unavailable, truncate_repr
from wane.service.observability.logs import ACCESS, log_access
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import CURRENT, Parent, Traced, Tracing
from wane.service.registry.registry import ModelRegistry
from wane.service.registry.swap import Epochs
from wane.service.types.answer import Answer
from wane.service.types.cost import Cost
from wane.service.types.request import ANYBODY, Owner
from wane.service.types.text import Finish

Envelope = Callable[[Scope, Exception], Response]
"""Converts an exception to a response in the format of the request path's protocol."""

# The methods that have their own metric label. All other methods share one label.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
MOST_PARAMETERS = 64  # of a query
TIMEOUT_HEADER = "x-request-timeout-ms"
TIMEOUT_HEADER_BYTES = TIMEOUT_HEADER.encode()
TIMEOUT = "(?=0*[1-9])[0-9]{1,9}"
PART = "wane.part"
"""The key of a scope whose request is one worker's part of a request, which another worker counts and logs."""
HISTORY = "wane.history"
"""The key of a scope whose request is one half of a fork between two workers. A request for a fork is answered with a
`CopiedSession`. A request for a new session gets that answer's body, and an inference that starts a sequence its status
and its body."""
NEW_ID = "wane.new_id"
"""The key of a scope with the id of the session that the request creates if its body has none. One of several workers
chooses an id of its own sessions."""
HUNG_UP = 499  # the status of a request whose client disconnected before a response began
LOGGED_CHARACTERS = 256  # the largest number of characters of a path in a log line; every route's path is shorter
# The response to a POST does not have these headers. Browsers do not cache such a response, and do not load it as a
# script, a style or an image.
SECURITY_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))


class RequestContext(Struct):
    """The server's data about one request, except its body.

    `parent` is the client's span. `headers` has the first value of each header, by lower-case name. `timeout_s` limits
    the time from the request to its answer, or from each WebSocket message to its answer. `body_timeout_s` limits the
    time to receive a body. `deadline` is in seconds on the event loop's clock. `fields` are the fields that a route
    adds to the access log line. If `cacheable`, the route sets the response's cache headers itself. `principal` has the
    request's API key, if the server has keys. `owner` owns the request's sessions.
    """

    request_id: str
    trace_id: str | None = None
    parent: Parent | None = None
    headers: dict[bytes, bytes] = {}
    timeout_s: float = math.inf
    deadline: float | None = None
    body_timeout_s: float = math.inf
    fields: dict[str, object] = {}
    owner: Owner = ANYBODY
    principal: Principal | None = None
    cacheable: bool = False

    @classmethod
    def of(cls, scope: Scope) -> RequestContext:
        """Returns the context of a request. The request id is the client's `x-request-id`, else the trace id, else a
        new id."""
        headers = dict(reversed(scope["headers"]))
        parent: Parent | None = None
        trace_id: str | None = None
        if b"traceparent" in headers and (parent := Parent.of(headers[b"traceparent"])) is not None:
            trace_id = f"{parent.trace_id:032x}"
        client_id = headers.get(b"x-request-id")
        if client_id is not None and REQUEST_ID.fullmatch(client_id):
            request_id = client_id.decode()
        else:
            request_id = trace_id or getrandbits(128).to_bytes(16).hex()
        return cls(request_id, trace_id, parent, headers)

    def header(self, name: str) -> str | None:
        """Returns the value of the first header with this lower-case name."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")


def context(scope: Scope) -> RequestContext:
    """Returns the context of this request."""
    request_context: RequestContext = scope["wane.context"]
    return request_context


def admit(request: HTTPConnection, cost: Cost) -> None:
    """Refuses a request whose cost is over a limit, and charges its API key. One row was charged before the endpoint
    was called. Raises InvalidRequest, TooLarge, RateLimited, Unauthorized."""
    cost.check(request.app.state.settings)
    principal = context(request.scope).principal
    count = cost.rows + cost.compared
    if principal is not None and count > 1 and FREE not in request.scope:
        principal.charge(count - 1, before=1)


def registry(request: HTTPConnection) -> ModelRegistry:
    """Returns the models that this process serves."""
    registered: ModelRegistry = request.scope["app"].state.registry
    return registered


def note_answer(scope: Scope, answer: Answer | Finish) -> None:
    """Adds an answer's mode, state and latency to the fields of the request's access log line and span."""
    if not ACCESS.isEnabledFor(INFO) and CURRENT.get() is None:
        return
    context(scope).fields |= fields_of(answer)


def fields_of(answer: Answer | Finish) -> dict[str, object]:
    """Returns an answer's mode, state and latency."""
    return {
        "mode": answer.mode.value,
        "state": answer.state.value,
        "queue_ms": round(answer.latency.queue_ms, 3),
        "compute_ms": round(answer.latency.compute_ms, 3),
        "batch_items": answer.latency.batch_items,
    }


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """Settings and services that every request of an application shares.

    `request_timeout_ms` is the default timeout. A client may request a shorter timeout, but not a longer one. `epochs`
    counts the HTTP requests and WebSocket messages in flight. `max_body_bytes` is the largest accepted size of a body.
    `cross_origin` allows pages of other origins; if it is None, no response has a CORS header.
    """

    envelope: Envelope
    metrics: Metrics
    epochs: Epochs
    max_body_bytes: int
    request_timeout_ms: float
    body_timeout_s: float = math.inf
    guard: Authenticator | None = None
    tracing: Tracing | None = None
    cross_origin: CrossOrigin | None = None

    def timeout_s(self, request_context: RequestContext) -> float:
        """Returns the timeout of a request with the header `x-request-timeout-ms`. Raises InvalidRequest if the
        header's value is not a positive integer."""
        asked = request_context.headers[TIMEOUT_HEADER_BYTES].decode("latin-1")
        if not re.fullmatch(TIMEOUT, asked):
            raise InvalidRequest(
                f"{TIMEOUT_HEADER} must be a whole number of milliseconds, at least 1, not {truncate_repr(asked)}",
                TIMEOUT_HEADER,
            )
        return min(int(asked), self.request_timeout_ms) / 1000

    def authenticate(self, scope: Scope, request_context: RequestContext) -> None:
        """Checks the API key, the path and the length of the query. Raises Unauthorized, Forbidden, RateLimited,
        NotFound, InvalidRequest."""
        if self.guard is not None and (principal := self.guard.identify(scope, request_context.headers)) is not None:
            request_context.principal = principal
            request_context.owner = principal.owner
            request_context.fields["key"] = principal.key.name
            self.guard.admit(scope, principal)
        # In a regular expression, `$` also matches before a newline at the end of the text. A path with such a newline
        # would therefore match a route, but differ from the path that other checks compare.
        if not scope["path"].isprintable() and CONTROL.search(scope["path"]):
            raise NotFound("not found: the path has a control character")
        if scope["query_string"].count(b"&") >= MOST_PARAMETERS:  # the framework would read all of them
            raise InvalidRequest(f"the query has more than {MOST_PARAMETERS} parameters")


class Exchange:
    """One HTTP request, or one message of a WebSocket. It counts as in flight until `finish` is called.

    `context` belongs to the request, or to the request that opened the WebSocket. `traced` is the span, or None if the
    trace is not sampled.
    """

    __slots__ = ("_epoch", "_started_s", "context", "policy", "scope", "traced")

    def __init__(self, policy: RequestPolicy, scope: Scope, request_context: RequestContext) -> None:
        self._started_s = time.perf_counter()
        self.policy = policy
        self.scope = scope
        self.context = request_context
        self._epoch = policy.epochs.enter()
        self.traced: Traced | None = None
        if policy.tracing is not None:
            states = [value for name, value in scope["headers"] if name == b"tracestate"]
            self.traced = policy.tracing.begin(request_context.parent, states, self._started_s)

    def _end(self, status: int, error: object | None) -> float:
        """Counts the request as no longer in flight, counts its error, and ends its span. `error` is the code of the
        failure, or None. Returns the request's duration in seconds."""
        self._epoch.leave()
        ended_s = time.perf_counter()
        if error is not None:
            self.policy.metrics.request_errors.labels(error, self.context.owner.name or "").inc()
        if self.traced is not None:
            self._end_span(self.traced, status, error, ended_s)
        return ended_s - self._started_s

    def _end_span(self, traced: Traced, status: int, error: object | None, ended_s: float) -> None:
        """Ends the span with the fields of the access log line as its attributes."""
        scope, request_context = self.scope, self.context
        method = scope.get("method", "WS")  # a WebSocket message has no method
        attributes = {
            "http.request.method": scope.get("method"),
            "http.route": route(scope),
            "http.response.status_code": status,
            "url.path": scope["path"][:LOGGED_CHARACTERS],
            "wane.request_id": request_context.request_id,
            **{f"wane.{name}": value for name, value in request_context.fields.items()},
        }
        known = method if method in METHODS or method == "WS" else "HTTP"
        traced.end(f"{known} {route(scope)}", status, attributes, None if error is None else str(error), ended_s)


class MessageExchange(Exchange):
    """One message of a WebSocket. Its answer is one frame (`routes/stream.py`)."""

    __slots__ = ()

    def admit(self) -> float:
        """Charges the API key for the message. Returns the deadline for the answer, in seconds on the event loop's
        clock. Raises RateLimited, Unauthorized."""
        request_context = self.context
        if request_context.principal is not None:
            request_context.principal.charge(1)
        return asyncio.get_running_loop().time() + request_context.timeout_s

    def finish(self, status: int | None, error: str | None = None) -> None:
        """Counts the finished message. If `status` is None, the client disconnected before the answer, and the message
        is not counted."""
        if status is None:
            self._epoch.leave()
            return
        seconds = self._end(status, error)
        self.policy.metrics.count_message(status, seconds, None if self.traced is None else self.traced.trace_id)


class HttpExchange(Exchange):
    """One HTTP request. `status` is None until the response begins."""

    __slots__ = ("_send", "_sent_bytes", "status")

    def __init__(self, policy: RequestPolicy, scope: Scope, send: Send) -> None:
        request_context = scope["wane.context"] = RequestContext.of(scope)
        super().__init__(policy, scope, request_context)
        self._send = send
        self._sent_bytes = 0
        self.status: int | None = None
        if self.traced is not None:
            request_context.trace_id = self.traced.trace_id

    def admit(self) -> None:
        """Checks the path and the API key, and sets the deadline. Raises NotFound, Unauthorized, Forbidden,
        RateLimited, InvalidRequest."""
        request_context, policy = self.context, self.policy
        policy.authenticate(self.scope, request_context)
        asks = TIMEOUT_HEADER_BYTES in request_context.headers
        request_context.timeout_s = policy.timeout_s(request_context) if asks else policy.request_timeout_ms / 1000
        request_context.body_timeout_s = policy.body_timeout_s
        request_context.deadline = asyncio.get_running_loop().time() + request_context.timeout_s

    async def send(self, message: Message) -> None:
        """The ASGI function `send` of the request. Adds the headers of every response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = self.headers(message["headers"])
        else:
            self._sent_bytes += len(message.get("body", b""))
        await self._send(message)

    async def reply(self, reply: Response) -> None:
        """Sends a whole response, in less time than the response would send itself."""
        status = self.status = reply.status_code
        body = reply.body
        self._sent_bytes = len(body)
        headers = self.headers(reply.raw_headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def headers(self, own: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Returns the headers of a response: its own, and those of every response."""
        request_context, method, cross_origin = self.context, self.scope["method"], self.policy.cross_origin
        headers = [*own, (b"x-request-id", request_context.request_id.encode())]
        if method != "POST" and not request_context.cacheable:
            headers += SECURITY_HEADERS
        # The response of `CrossOrigin.preflight` to OPTIONS already has CORS headers.
        if cross_origin is not None and method != "OPTIONS":
            headers += cross_origin.headers(request_context.headers.get(b"origin"))
        return headers

    def failed(self, error: BaseException) -> Response:
        """Returns the response to an exception. A CancelledError means that the server is stopping."""
        if isinstance(error, asyncio.CancelledError):
            error = Unavailable("the server is stopping")
        assert isinstance(error, Exception), (
            "an exchange handles only CancelledError and subclasses of Exception: this is a bug"
        )
        return self.policy.envelope(self.scope, error)

    def finish(self) -> None:
        """Counts and logs the finished request."""
        scope, request_context, status = self.scope, self.context, self.status or HUNG_UP
        is_part = PART in scope
        seconds = self._end(status, None if is_part else request_context.fields.get("error"))
        if is_part:
            return
        method = scope["method"]
        known = method if method in METHODS else "other"
        trace_id = None if self.traced is None else self.traced.trace_id
        self.policy.metrics.count_request(route(scope), known, status, seconds, trace_id)
        if ACCESS.isEnabledFor(INFO):
            line = log_line(scope, request_context, seconds)
            line |= {"method": method[:LOGGED_CHARACTERS], "status": status, "bytes": self._sent_bytes}
            log_access("request", line | request_context.fields)


def log_line(scope: Scope, request_context: RequestContext, seconds: float) -> dict[str, object]:
    """Returns the access log fields that every request has."""
    client = scope.get("client")
    return {
        "request_id": request_context.request_id,
        "trace_id": request_context.trace_id,
        "client": client[0] if client else None,
        "path": scope["path"][:LOGGED_CHARACTERS],
        "duration_ms": round(seconds * 1000, 3),
    }


def route(scope: Scope) -> str:
    """Returns the path template of the request's route, or `unmatched` if no route matches."""
    path: str = getattr(scope.get("route"), "path", "unmatched")
    return path
