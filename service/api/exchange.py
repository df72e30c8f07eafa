"""One HTTP request, from its head to its response, for every way that it may arrive.

In:   its id (x-request-id, traceparent), its path (404), its key (401, 403, 429), its deadline (x-request-timeout-ms).
Out:  x-request-id and security headers, a problem document for an exception, the metrics, the trace, and one line in
      the access log.

A response is written by one of three sinks: ASGI's `send` (`middleware.py`), the HTTP protocol in one write
(`dispatch.py`), or a frame of a WebSocket (`routes/stream.py`).
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from logging import INFO
from random import getrandbits
from typing import Protocol

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from wane.service.aio.eager import EagerTask
from wane.service.auth.guard import Authenticator
from wane.service.auth.keyring import Principal
from wane.service.errors import Abandoned, InvalidRequest, NotFound, Unavailable, truncate_repr
from wane.service.observability.logs import ACCESS, log_access
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import CURRENT, Parent, Traced, Tracing
from wane.service.registry.registry import ModelRegistry
from wane.service.registry.swap import Epochs
from wane.service.types import ANYBODY, Answer, Finish, Owner

Envelope = Callable[[Scope, Exception], Response]
"""Turns an exception into a response of the protocol of the request's path."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})  # all others share one label
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
TIMEOUT_HEADER = "x-request-timeout-ms"
TIMEOUT_HEADER_BYTES = TIMEOUT_HEADER.encode()
TIMEOUT = "(?=0*[1-9])[0-9]{1,9}"
WHOLE_BODY = "wane.body"
"""The key of a scope that holds the body, if the body was read before the endpoint was called."""

HUNG_UP = 499  # the status of a request whose client disconnected before a response began
LOGGED_CHARACTERS = 256  # of a path: our routes' paths are shorter
# Not for POST: browsers do not store the response to a POST, nor load it as a script, a style or an image.
SECURITY_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))


@dataclass(slots=True)
class RequestContext:
    """The server's data about one request, except its body.

    `parent` is the client's span, `trace_id` names the trace. `headers`: the first of each lower-case name.
    `timeout_s` limits the time to an answer, of a WebSocket to each answer. `body_timeout_s` limits the time to receive
    a body. `deadline` is in seconds on the event loop's clock. `fields` is what a route adds to the access log.
    `principal` has the request's key, if keys are set. `owner` owns the request's sessions.
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
        """Reads the headers. The request id is the client's `x-request-id`, else the trace's id, else a new one."""
        headers = dict(reversed(scope["headers"]))
        parent: Parent | None = None
        trace_id: str | None = None
        if b"traceparent" in headers and (parent := Parent.of(headers[b"traceparent"])) is not None:
            trace_id = f"{parent.trace_id:032x}"
        given = headers.get(b"x-request-id")
        if given is not None and REQUEST_ID.fullmatch(given):
            request_id = given.decode()
        else:
            request_id = trace_id or f"{getrandbits(128):032x}"
        return cls(request_id, trace_id, parent, headers)

    def request_id_header(self) -> tuple[bytes, bytes]:
        """Returns the response header with the request id."""
        return b"x-request-id", self.request_id.encode()

    def header(self, name: str) -> str | None:
        """Returns the value of the first header of this lower-case name."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")


def context(scope: Scope) -> RequestContext:
    """Returns the context of this request."""
    found: RequestContext = scope["wane.context"]
    return found


def registry(request: HTTPConnection) -> ModelRegistry:
    """Returns the models that this process serves."""
    found: ModelRegistry = request.app.state.registry
    return found


def note_answer(scope: Scope, given: Answer | Finish) -> None:
    """Adds an answer's mode, state and latency to the request's access log line and span."""
    if not ACCESS.isEnabledFor(INFO) and CURRENT.get() is None:
        return
    context(scope).fields.update(
        mode=given.mode.value,
        state=given.state.value,
        queue_ms=round(given.latency.queue_ms, 3),
        compute_ms=round(given.latency.compute_ms, 3),
        batch_items=given.latency.batch_items,
    )


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """Settings and services that every request of an application shares.

    `request_timeout_ms` is the default timeout. A client may shorten it, but not lengthen it.
    `epochs` count HTTP requests and WebSocket messages in flight. `max_body_bytes` is the longest body.
    """

    envelope: Envelope
    metrics: Metrics
    epochs: Epochs
    max_body_bytes: int
    request_timeout_ms: float
    body_timeout_s: float = math.inf
    guard: Authenticator | None = None
    tracing: Tracing | None = None

    def timeout_s(self, here: RequestContext) -> float:
        """Returns the request's timeout. Raises InvalidRequest for a timeout that is not a number."""
        given = here.headers.get(TIMEOUT_HEADER_BYTES)
        if given is None:  # the usual case
            return self.request_timeout_ms / 1000
        asked = given.decode("latin-1")
        if not re.fullmatch(TIMEOUT, asked):
            raise InvalidRequest(
                f"{TIMEOUT_HEADER} must be a whole number of milliseconds from 1, not {truncate_repr(asked)}",
                TIMEOUT_HEADER,
            )
        return min(int(asked), self.request_timeout_ms) / 1000

    def authenticate(self, scope: Scope, here: RequestContext) -> None:
        """Checks the path and the key. Raises NotFound, Unauthorized, Forbidden, RateLimited."""
        if not scope["path"].isprintable():
            refuse_control(scope["path"])
        principal = None if self.guard is None else self.guard.identify(scope, here.headers)
        if self.guard is not None and principal is not None:
            here.principal = principal
            here.owner = principal.owner
            here.fields["key"] = principal.key.name
            self.guard.admit(scope, principal)


class ResponseSink(Protocol):
    """Writes the response to one request."""

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Writes the whole response, once. Writes nothing if the client has disconnected."""
        ...


class Exchange:
    """One HTTP request, or one message of a WebSocket. It counts as in flight until `finish`.

    `context`: of the request, or of the request that opened the WebSocket. `traced`: its span, if it is sampled.
    """

    __slots__ = ("_epoch", "_started_s", "context", "policy", "scope", "traced")

    def __init__(self, policy: RequestPolicy, scope: Scope, here: RequestContext) -> None:
        self._started_s = time.perf_counter()
        self.policy = policy
        self.scope = scope
        self.context = here
        self._epoch = policy.epochs.enter()
        self.traced: Traced | None = None
        if policy.tracing is not None:
            states = [value for name, value in scope["headers"] if name == b"tracestate"]
            self.traced = policy.tracing.begin(here.parent, states, self._started_s)

    def _end(self, status: int, error: object | None) -> float:
        """Ends the span and the time in flight; `error`: the code of the failure. Returns the seconds that it took."""
        self._epoch.leave()
        ended_s = time.perf_counter()
        if error is not None:
            self.policy.metrics.request_errors.labels(error, self.context.owner.name or "").inc()
        if self.traced is not None:
            self._end_span(self.traced, status, error, ended_s)
        return ended_s - self._started_s

    def _end_span(self, traced: Traced, status: int, error: object | None, ended_s: float) -> None:
        """Gives the span the fields of the access log."""
        scope, here = self.scope, self.context
        method = scope.get("method", "WS")  # of a message
        attributes = {
            "http.request.method": scope.get("method"),
            "http.route": route(scope),
            "http.response.status_code": status,
            "url.path": scope["path"][:LOGGED_CHARACTERS],
            "wane.request_id": here.request_id,
            **{f"wane.{name}": value for name, value in here.fields.items()},
        }
        known = method if method in METHODS or method == "WS" else "HTTP"
        traced.end(f"{known} {route(scope)}", status, attributes, None if error is None else str(error), ended_s)

    @property
    def _trace_id(self) -> str | None:
        return None if self.traced is None else self.traced.trace_id


class MessageExchange(Exchange):
    """One message of a WebSocket; its sink is a frame (`routes/stream.py`)."""

    __slots__ = ("deadline",)

    def __init__(self, policy: RequestPolicy, scope: Scope) -> None:
        super().__init__(policy, scope, context(scope))
        self.deadline = math.inf

    def admit(self) -> None:
        """Charges the key, and sets the deadline. Raises RateLimited, Unauthorized."""
        here = self.context
        if here.principal is not None:
            here.principal.charge(1)
        self.deadline = asyncio.get_running_loop().time() + here.timeout_s

    def finish(self, status: int | None, error: str | None = None) -> None:
        """Counts the message, which is over; one without a status was not answered, because the client left."""
        if status is None:
            self._epoch.leave()
            return
        seconds = self._end(status, error)
        self.policy.metrics.count_message(status, seconds, self._trace_id)


class HttpExchange(Exchange):
    """One HTTP request; its sink is the HTTP protocol, in one write, or ASGI's `send`."""

    __slots__ = ("_has_hung_up", "_task", "over")

    def __init__(self, policy: RequestPolicy, scope: Scope) -> None:
        here = scope["wane.context"] = RequestContext.of(scope)
        super().__init__(policy, scope, here)
        if self.traced is not None:
            here.trace_id = self.traced.trace_id
        self._task: EagerTask[None] | None = None
        self._has_hung_up = False
        self.over = False

    def admit(self) -> None:
        """Checks the path and the key, and sets the deadline. Raises NotFound, Unauthorized, Forbidden, RateLimited,
        InvalidRequest."""
        here, policy = self.context, self.policy
        policy.authenticate(self.scope, here)
        here.timeout_s = policy.timeout_s(here)
        here.body_timeout_s = policy.body_timeout_s
        here.deadline = asyncio.get_running_loop().time() + here.timeout_s

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Headers of every response."""
        careful = () if self.scope["method"] == "POST" else SECURITY_HEADERS
        return self.context.request_id_header(), *careful

    def failed(self, error: BaseException) -> Response:
        """Returns the response to an exception. A CancelledError means that the client or the server gave up."""
        if isinstance(error, asyncio.CancelledError):
            error = (
                Abandoned("the client hung up before the answer")
                if self._has_hung_up
                else Unavailable("the server is stopping")
            )
        assert isinstance(error, Exception), "nothing else is caught: this is a bug"
        return self.policy.envelope(self.scope, error)

    def start(self, respond: Callable[[], Awaitable[Response]], sink: ResponseSink) -> None:
        """Answers a request that arrived whole."""
        own: Context | None = None
        if self.policy.tracing is not None:  # the connection's reader may be in another request's context
            own = copy_context()
            own.run(CURRENT.set, self.traced)
        self._task = EagerTask(self._run(respond, sink), own)
        self._task.on_done(EagerTask.result)  # raises the error of a failed response, which the event loop logs

    def hang_up(self) -> None:
        """Handles the client's disconnection. Cancels work that has not entered a batch."""
        if not self.over and self._task is not None:
            self._has_hung_up = True
            self._task.interrupt()

    def stop(self) -> None:
        """Cancels the request, because the server waits no longer."""
        if not self.over and self._task is not None:
            self._task.interrupt()

    async def _run(self, respond: Callable[[], Awaitable[Response]], sink: ResponseSink) -> None:
        try:
            self.admit()
            response = await respond()
        except (Exception, asyncio.CancelledError) as error:
            response = self.failed(error)
        status, body = response.status_code, bytes(response.body)
        self.over = True
        try:
            sink.answer(status, [*response.raw_headers, *self.headers], body)
        finally:
            self.finish(status, len(body))

    def finish(self, status: int, sent_bytes: int) -> None:
        """Counts and logs the finished request."""
        scope, here = self.scope, self.context
        seconds = self._end(status, here.fields.get("error"))
        method = scope["method"]
        known = method if method in METHODS else "other"
        self.policy.metrics.count_request(route(scope), known, status, seconds, self._trace_id)
        if ACCESS.isEnabledFor(INFO):
            line = log_line(scope, here, seconds)
            line |= {"method": method[:LOGGED_CHARACTERS], "status": status, "bytes": sent_bytes}
            log_access("request", line | here.fields)


def log_line(scope: Scope, here: RequestContext, seconds: float) -> dict[str, object]:
    """Returns the access log's fields of every request."""
    client = scope.get("client")
    return {
        "request_id": here.request_id,
        "trace_id": here.trace_id,
        "client": client[0] if client else None,
        "path": scope["path"][:LOGGED_CHARACTERS],
        "duration_ms": round(seconds * 1000, 3),
    }


def refuse_control(path: str) -> None:
    """Raises NotFound for a path with a control character. The routes' regular expressions take a newline for the end
    of the path, so that the matched path would differ from the one that other checks compare."""
    if CONTROL.search(path):
        raise NotFound("there is nothing at this path: it has a control character")


def route(scope: Scope) -> str:
    """Returns the template of the request's path, or `unmatched`."""
    found: str = getattr(scope.get("route"), "path", "unmatched")
    return found
