"""One request, from its head to its response, whichever way it came.

In:   its id (x-request-id, traceparent), its path (404), its key (401, 403, 429), its deadline (x-request-timeout-ms).
Out:  x-request-id and what tells browsers to be careful, a problem document for whatever was raised, the metrics, the
      trace, and one line in the access log.

A response goes out by one of three sinks: ASGI's `send` (`middleware.py`), the HTTP protocol in one write
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
"""Turns a failure into the answer of the protocol that the request's path speaks."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})  # others are one label
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
TIMEOUT_HEADER = "x-request-timeout-ms"
TIMEOUT_HEADER_BYTES = TIMEOUT_HEADER.encode()
TIMEOUT = "(?=0*[1-9])[0-9]{1,9}"
WHOLE_BODY = "wane.body"
"""In the scope of a request whose body was read before its endpoint was called: the body."""

HUNG_UP = 499  # the status of a request whose client left before an answer began
LOGGED_CHARACTERS = 256  # of a path: those of our routes are shorter
# Of what is not POSTed: the answer to a POST no browser stores, nor takes for a script, a style or an image.
SECURITY_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))


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
        """The header of the answer that tells the id."""
        return b"x-request-id", self.request_id.encode()

    def header(self, name: str) -> str | None:
        """The value of the first header of this lower-case name."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")


def context(scope: Scope) -> RequestContext:
    """The context of this request."""
    found: RequestContext = scope["wane.context"]
    return found


def registry(request: HTTPConnection) -> ModelRegistry:
    """The models that this process serves."""
    found: ModelRegistry = request.app.state.registry
    return found


def note_answer(scope: Scope, given: Answer | Finish) -> None:
    """Adds how the answer came about to the request's line in the access log, and to its span."""
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
    """What holds for every request of an application.

    `request_timeout_ms` is the deadline of requests that name none: a client may shorten it, not lengthen it.
    `epochs` count requests, and a WebSocket's messages, while they last. `max_body_bytes` is the longest body.
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
        """How long an answer is wanted. Raises InvalidRequest for a timeout that is not a number."""
        given = here.headers.get(TIMEOUT_HEADER_BYTES)
        if given is None:  # as nearly always
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
        """Writes all of it, once. Writes nothing where the client has gone."""
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
        """The headers that every response has."""
        careful = () if self.scope["method"] == "POST" else SECURITY_HEADERS
        return self.context.request_id_header(), *careful

    def failed(self, error: BaseException) -> Response:
        """The response to a failure. A cancellation is the server's: it waits no longer."""
        if isinstance(error, asyncio.CancelledError):
            error = (
                Abandoned("the client hung up before the answer")
                if self._has_hung_up
                else Unavailable("the server is stopping")
            )
        assert isinstance(error, Exception), "nothing else is caught: this is a bug"
        return self.policy.envelope(self.scope, error)

    def start(self, respond: Callable[[], Awaitable[Response]], sink: ResponseSink) -> None:
        """Runs a request that came whole to its response."""
        own: Context | None = None
        if self.policy.tracing is not None:  # who reads from the connection may be at another request
            own = copy_context()
            own.run(CURRENT.set, self.traced)
        self._task = EagerTask(self._run(respond, sink), own)
        self._task.on_done(EagerTask.result)  # raises, for the event loop to log, what failed while it was answered

    def hang_up(self) -> None:
        """The client has gone: what has not entered a batch is taken back."""
        if not self.over and self._task is not None:
            self._has_hung_up = True
            self._task.interrupt()

    def stop(self) -> None:
        """The server stops, and waits no longer."""
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
        """Counts and logs the request, which is over."""
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
    """What the access log says of every request."""
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
