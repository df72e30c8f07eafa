"""HTTP with limits and timeouts. Each response is sent with one write.

Slow clients, oversized requests and excess connections receive 408, 429, 431 or 503. The protocol writes these
responses itself, without a route.

A request that arrives completely in one read may be passed to a `RequestDispatcher`. The dispatcher answers such a
request without ASGI messages and without an `asyncio.Task`. All other requests are passed to the ASGI application.

uvicorn writes the head and the body of a response separately, and uvloop makes a system call for each write. The second
system call takes a large part of the CPU time of a response. `BufferedTransport` joins all writes of one iteration of
the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from wane.service.net.connection import DEAF_S, SMALL_BYTES, RejectReason, TimeoutProtocol, abort_unread, bare_answer

LINGER_S = 30  # the time after `close` in which the client can read the rest of a response


def _never() -> bool:
    return False


class BufferedTransport:
    """A transport that buffers writes until the event loop's next iteration, or until the buffer holds MOST_BYTES."""

    MOST_BYTES = 1 << 16

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._bytes = 0
        self._has_ended = False
        # returns True if the protocol will close the connection later
        self.delays_closing: Callable[[], bool] = _never

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._bytes += len(data)
        if self._bytes >= self.MOST_BYTES:
            self.flush()

    def write_whole(self, data: bytes) -> None:
        """Writes a complete response. Writes it immediately if nothing is buffered, and otherwise buffers it like
        `write`."""
        if self._held:
            self.write(data)
        else:
            self._write(data)

    def flush(self) -> None:
        """Writes the buffer."""
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            self._bytes = 0
            self._write(data)

    def _write(self, data: bytes) -> None:
        if not self._has_ended and not self._transport.is_closing():
            self._transport.write(data)

    def write_eof(self) -> None:
        """Writes the buffer, then closes the sending direction of the connection. Later writes are dropped."""
        self.flush()
        self._has_ended = True
        self._transport.write_eof()

    def close(self) -> None:
        """Writes the buffer, then closes the connection. If `delays_closing` returns True, the protocol closes the
        connection later."""
        self.flush()
        if self.delays_closing():
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(LINGER_S, self._transport.abort)

    def let_go(self) -> None:
        """Drops the callback to the protocol, so that protocol and transport form no reference cycle."""
        self.delays_closing = _never

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class InFlight(Protocol):
    """A request that a dispatcher answers, from its start to its response. `over`: whether the response is ready."""

    over: bool

    def hang_up(self) -> None:
        """Handles the client's disconnection."""

    def stop(self) -> None:
        """Stops the request, because the shutdown timeout has passed."""


class RequestDispatcher(Protocol):
    """Answers requests that arrived completely in one read and whose bodies have at most `max_body_bytes`."""

    max_body_bytes: int

    def matches(self, scope: Any) -> bool:
        """Whether this dispatcher answers requests with the method and path of `scope`."""

    def dispatch(self, scope: Any, body: bytes, sink: HttpResponder) -> InFlight:
        """Starts a request for which `matches` returned True."""


class ProxyHeaders(ProxyHeadersMiddleware):
    """uvicorn's middleware for trusted proxies, used without an application."""

    def __init__(self, trusted: str) -> None:
        """`trusted` has the addresses of the trusted proxies, in uvicorn's format."""
        super().__init__(_no_app, trusted)

    def apply(self, scope: Any) -> None:
        """Applies the forwarding headers of trusted proxies to a request's scope."""
        unused: Any = None
        # the middleware awaits only `_no_app`, so one `send` runs the coroutine to its end
        with suppress(StopIteration):
            self(scope, unused, unused).send(None)


async def _no_app(*_: Any) -> None:
    """The application that `ProxyHeaders` passes to the middleware. It does nothing."""


CLOSE = (b"connection", b"close")
# used in place of a connection's list of trailer fields; it drops every field that is appended
TRAILERS: Any = deque(maxlen=0)

HEAD_END = b"\r\n\r\n"
PARSER_REASONS = {"Pause on PRI/Upgrade": "this is HTTP/2, and the server speaks HTTP/1.1"}
"""Texts for the client, by the parser's message that each text replaces."""


def malformed(error: HttpParserError) -> bytes:
    """Returns the text of the response to a request that the parser refused."""
    reason = str(error)
    if isinstance(error, HttpParserCallbackError):
        # the only parser callback that can fail is the one that parses the target
        reason = "the request target cannot be read"
    return f"malformed HTTP request: {PARSER_REASONS.get(reason, reason)}".encode()


class HttpProtocol(TimeoutProtocol, HttpToolsProtocol):
    """HTTP with limits and timeouts."""

    def __init__(
        self,
        *given: Any,
        dispatcher: RequestDispatcher | None = None,
        trusted_headers: ProxyHeaders | None = None,
        **named: Any,
    ) -> None:
        """`dispatcher` is the application's dispatcher. `trusted_headers` applies the forwarding headers of trusted
        proxies, and is None if there are no trusted proxies."""
        super().__init__(*given, **named)
        self.dispatcher = dispatcher
        self.trusted_headers = trusted_headers
        self.is_reading = False  # whether received bytes are being parsed
        # a request to start once all received bytes are parsed
        self.held: tuple[RequestResponseCycle, ASGI3Application] | None = None
        self.in_flight: InFlight | None = None  # the request that the dispatcher is answering
        self.last_whole: object = None  # the scope of the last request that was received whole
        self.completed = False  # whether the latest bytes completed a request
        # number of received bytes of an incomplete head, without the bytes of a read that also completed the previous
        # request
        self.head_bytes = 0
        self.head_end = b""  # the last bytes of the incomplete head
        self.framing_bytes = 0  # number of bytes received since the last byte of an incomplete body's content
        # a request with a chunked body; its connection is kept alive only if the body is complete before the response
        # starts
        self.keepalive_hold: RequestResponseCycle | None = None
        self.grace_used = False  # whether the timer has fired once while the current body was incomplete
        self.running: RequestResponseCycle | None = None  # the request that is being answered, or was answered last
        self.discarding = False  # whether further received bytes are dropped
        self.lingers = False  # whether the last response is written and the connection is closed soon
        self.at_last: Callable[[], None] | None = None  # a function to call when all earlier requests are answered
        self.upgrades = False  # whether a WebSocket's handshake waits until the earlier requests are answered
        # number of received bytes of unanswered requests; small requests that arrived in one read are not counted
        self.unanswered_bytes = 0
        self.is_unread = False  # whether the last received bytes were dropped without being parsed
        self.measured: object = None  # the scope of the last request whose length `has_room` checked

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        is_full = len(self.connections) >= self.settings.max_connections
        buffered = BufferedTransport(transport, self.loop)
        buffered.delays_closing = self.delays_closing
        super().connection_made(cast(asyncio.Transport, buffered))
        if is_full:
            self.refuse(RejectReason.TOO_MANY, HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            abort_unread(transport, self.settings.send_timeout_s)
            self.timer = self.loop.call_later(self.settings.header_timeout_s, self.too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        cast(BufferedTransport, self.transport).let_go()
        self.share.is_now(0)
        self.drop_requests()
        # if the connection failed, uvicorn does not stop the keep-alive timer, which would keep this protocol in memory
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None:
            in_flight.hang_up()

    def data_received(self, data: bytes) -> None:
        self.is_reading = True
        try:
            self.take_in(data)
        finally:
            self.is_reading = False
            if self.held is not None:
                self.begin(*self.held)
            if self.in_flight is not None and len(self.pipeline) <= 1:
                # uvicorn pauses reading while a pipelined request waits. While reading is paused, the server would
                # notice neither a disconnection nor further bytes of the waiting request's body.
                self.flow.resume_reading()

    def take_in(self, data: bytes) -> None:
        """Checks received bytes against the limits, and parses them."""
        if self.discarding:
            self.came_late()
            return
        most = self.settings.max_header_bytes
        if self.scope is not self.last_whole and self.in_body():
            self.go_on(data)
        elif len(data) > most - self.head_bytes and self.is_long_head(data):
            self.refuse(RejectReason.LONG_HEAD, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        elif len(data) > SMALL_BYTES and not self.takes(len(data)):
            self.is_unread = True
            self.refuse(RejectReason.FULL, HTTPStatus.TOO_MANY_REQUESTS)
            return
        else:
            self.feed(data)
        if self.scope is self.last_whole:
            if self.completed:
                self.completed, self.head_bytes, self.head_end = False, 0, b""
                if self.timer is not None:
                    self.at_ease()
            elif self.timer is None and (self.cycle is None or self.cycle.response_complete):
                # starts the timer for bytes that do not start a request, such as an empty line before the request line
                self.begin_timer()
            return
        if self.discarding:
            return
        is_behind, self.completed = self.completed, False
        if self.timer is None:
            self.begin_timer()
        if not self.in_body():
            if not is_behind:
                self.head_bytes += len(data)
            self.head_end = (self.head_end + data)[1 - len(HEAD_END) :]
            return
        self.head_bytes, self.head_end = 0, b""
        if self.measured is not self.scope and not self.has_room():
            self.refuse(RejectReason.FULL, HTTPStatus.TOO_MANY_REQUESTS)
        elif self.framing_bytes > most:
            self.refuse(RejectReason.LONG_TRAILERS, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self.cycle.keep_alive and any(name == b"transfer-encoding" for name, _ in self.scope["headers"]):
            self.cycle.keep_alive = False
            self.keepalive_hold = self.cycle

    def feed(self, data: bytes) -> None:
        """Parses received bytes. Replaces uvicorn's `data_received`. That method answers a malformed request before the
        earlier requests are answered, and drops the bytes after an upgrade request."""
        self._unset_keepalive_if_required()
        rest: bytes | memoryview = data
        behind: bytes | memoryview = b""  # bytes to parse after `rest`
        while rest:
            try:
                self.parser.feed_data(rest)
                rest, behind = behind, b""
            except HttpParserError as error:
                self.refuse(RejectReason.MALFORMED, HTTPStatus.BAD_REQUEST, malformed(error))
                return
            except HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
                if self.scope["method"] == "CONNECT":
                    if self.declares_body():
                        text = b"malformed HTTP request: CONNECT takes no body"
                        self.refuse(RejectReason.MALFORMED, HTTPStatus.BAD_REQUEST, text)
                        return
                elif super()._should_upgrade():
                    self.handle_websocket_upgrade()
                    if rest and self.upgrades:
                        self.came_late()
                    return
                else:
                    rest, behind = self.head_without_upgrade(), rest
                    # A new parser reads the head without Upgrade. The old parser would reject this head if it has read
                    # `Connection: close`.
                    self.parser = HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _should_upgrade(self) -> bool:
        """Returns True if `feed` must handle a head before the request with this head starts. uvicorn calls this for a
        CONNECT request and for a head that asks for another protocol. If the result is True, uvicorn does not start the
        request.

        The parser, httptools, reads no body after such a head. It would parse the declared body of such a request as
        the next request.
        """
        return self.scope["method"] != "CONNECT" or self.declares_body()

    def declares_body(self) -> bool:
        """Whether the head declares a body."""
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        )

    def head_without_upgrade(self) -> bytes:
        """Returns the last parsed head without its Upgrade fields. The server ignores protocols that it does not speak
        (RFC 9110, 7.8). If the returned head is parsed, the parser reads the body that the head declares."""
        lines = [f"{self.scope['method']} ".encode() + self.url + f" HTTP/{self.scope['http_version']}".encode()]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + HEAD_END

    def came_late(self) -> None:
        """Drops bytes that arrive after the last accepted request. If a WebSocket's handshake waits for its answer,
        rejects the handshake, because the client must send nothing before the answer (RFC 6455, 4.1)."""
        self.is_unread = True
        if self.upgrades:
            self.discarding = self.upgrades = False
            text = b"the client sent data before the handshake was answered"
            self.refuse(RejectReason.HANDSHAKE, HTTPStatus.BAD_REQUEST, text)

    def is_long_head(self, data: bytes) -> bool:
        """Whether `data` makes the head longer than the limit."""
        before = self.head_end  # the bytes that end the head may be split between two reads
        found = (before + data).find(HEAD_END)
        return found < 0 or found - len(before) > self.settings.max_header_bytes - self.head_bytes

    def begin_timer(self) -> None:
        """Starts the timer for an incomplete head or body."""
        self.grace_used = False
        self.timer = self.loop.call_later(self.settings.header_timeout_s, self.too_slow)

    def go_on(self, data: bytes) -> None:
        """Parses bytes that continue a body. Counts the bytes of chunk lengths and trailers."""
        cycle, before = self.cycle, len(self.cycle.body)
        if not cycle.response_complete and not self.takes(len(data)):
            self.refuse(RejectReason.FULL, HTTPStatus.TOO_MANY_REQUESTS)
            return
        self.feed(data)
        is_bare = self.cycle is cycle and self.in_body() and len(cycle.body) == before
        self.framing_bytes = self.framing_bytes + len(data) if is_bare else 0

    def takes(self, count: int) -> bool:
        """Reserves `count` bytes of the receive budget. Returns False, without a reservation, if the budget has no room
        for them."""
        if self.share.is_now(self.unanswered_bytes + count):
            self.unanswered_bytes += count
            return True
        return False

    def has_room(self) -> bool:
        """Whether the budget has room for the declared length of a body. Returns True for a chunked body, whose bytes
        are counted when they are received. Returns True for a body that is longer than the whole budget, because the
        middleware rejects such a body."""
        self.measured = self.scope
        most, taken = self.share.receive_budget.most, self.share.receive_budget.taken
        if 2 * taken <= most:  # any body fits, because the largest allowed body is at most half of the budget
            return True
        declared = next((value for name, value in self.scope["headers"] if name == b"content-length"), b"")
        length = int(declared) if declared.isdigit() else 0
        return length <= SMALL_BYTES or length > most or self.share.receive_budget.has_room(length - self.share.counted)

    def on_response_complete(self) -> None:
        if self.unanswered_bytes:
            self.unanswered_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
            self.share.is_now(self.unanswered_bytes)
        super().on_response_complete()
        if self.at_last is not None and self.is_answered() and not self.transport.is_closing():
            at_last, self.at_last = self.at_last, None
            at_last()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Replaces uvicorn's `on_header`, which keeps the white space around a value. RFC 9110, 5.5 excludes this white
        space from the value."""
        name = name.lower()
        value = value.strip(b" \t")
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.running = cycle
        if self.is_reading and self.dispatcher is not None and self.dispatcher.matches(cycle.scope):
            self.held = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def begin(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Passes a request that arrived completely to the dispatcher, and any other request to the application."""
        self.held = None
        dispatcher = self.dispatcher
        if dispatcher is None or not self.came_whole(cycle) or len(cycle.body) > dispatcher.max_body_bytes:
            super()._start_asgi_task(cycle, app)
            return
        if self.trusted_headers is not None:
            self.trusted_headers.apply(cycle.scope)
        in_flight = dispatcher.dispatch(cycle.scope, bytes(cycle.body), HttpResponder(self, cycle))
        if not in_flight.over:
            self.in_flight = in_flight

    def came_whole(self, cycle: RequestResponseCycle) -> bool:
        """Whether the whole request was received, and the client reads its responses."""
        return not (cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue or self.flow.write_paused)

    def on_chunk_header(self) -> None:
        """Called when the length of a chunk was received. Later header fields are trailers, which are dropped."""
        if self.in_body():
            self.headers = TRAILERS

    def on_message_complete(self) -> None:
        self.last_whole = self.scope
        self.completed = True
        if self.keepalive_hold is not None:
            self.keepalive_hold.keep_alive = not self.keepalive_hold.response_started
            self.keepalive_hold = None
        super().on_message_complete()

    def shutdown(self) -> None:
        """uvicorn calls this when it starts to shut down. Schedules the stop of a dispatched request at the shutdown
        timeout, because uvicorn can only cancel tasks, and a dispatched request has no task."""
        self.keepalive_hold = None
        if self.in_flight is not None and self.config.timeout_graceful_shutdown is not None:
            self.loop.call_later(self.config.timeout_graceful_shutdown, self.in_flight.stop)
        super().shutdown()

    def in_body(self) -> bool:
        """Whether the head of the current request is complete and its body is incomplete."""
        return self.scope is not self.last_whole and self.cycle is not None and self.cycle.scope is self.scope

    def too_slow(self) -> None:
        """Closes a connection whose client sends too slowly. If the head is complete, first waits for `body_timeout_s`,
        because the middleware may answer the request within this time."""
        self.timer = None
        if self.in_body() and not self.grace_used:
            self.grace_used = True
            self.timer = self.loop.call_later(self.settings.body_timeout_s, self.too_slow)
        elif self.scope is None:  # the client has not begun a request
            self.transport.close()
        else:
            reason = RejectReason.SLOW_BODY if self.in_body() else RejectReason.SLOW_HEAD
            self.refuse(reason, HTTPStatus.REQUEST_TIMEOUT)

    def refuse(self, reason: RejectReason, status: HTTPStatus, text: bytes = b"") -> None:
        """Rejects the connection. After the earlier requests are answered, writes a last response with `status` and
        closes the connection. Later calls have no effect. Writes no last response if the response to the rejected
        request has already started, or if an earlier, unanswered request asked to close the connection."""
        if self.discarding or self.transport.is_closing():
            return
        self.at_ease()
        self.discarding = True
        running, waits = self.running, not self.is_answered()
        if self.in_body() and self.cycle is running:
            is_silent, waits = running.response_started, False
        else:
            is_silent = waits and running is not None and not running.keep_alive
            if self.in_body():
                self.pipeline.popleft()  # the rejected request has not started
        self.tell(reason, None if is_silent else status)
        last = partial(self.say_last, b"" if is_silent else bare_answer(status, text))
        if waits:
            self.at_last = last
        else:
            last()

    def say_last(self, answer: bytes) -> None:
        """Writes the last response, unless `answer` is empty, and closes the connection."""
        if answer:
            self.transport.write(answer)
        self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        """Passes the connection to a WebSocket protocol once the earlier requests are answered."""
        if not self.is_answered():
            self.discarding = self.upgrades = True
            self.at_last = self.handle_websocket_upgrade
            return
        self._unset_keepalive_if_required()
        super().handle_websocket_upgrade()
        cast(BufferedTransport, self.transport).let_go()
        self.parser = None  # type: ignore[assignment]  # breaks a reference cycle
        self.share.is_now(0)

    def delays_closing(self) -> bool:
        """Returns whether a request is still being received, or received bytes were dropped without being parsed. If
        so, closes the connection after DEAF_S seconds, and drops received bytes until then. Without this delay, the
        connection might be closed with unread bytes. The kernel would then reset it, and the client would not receive
        the response."""
        if (self.scope is self.last_whole and not self.is_unread) or self.lingers or self.transport.is_closing():
            return False
        self.discarding = self.lingers = True
        self.at_ease()
        self.drop_requests()
        self.flow.resume_reading()
        self.transport.write_eof()
        self.timer = self.loop.call_later(DEAF_S, self.transport.close)
        return True

    def drop_requests(self) -> None:
        """Drops the waiting requests, and marks the running request as disconnected."""
        self.pipeline.clear()
        self.at_last = None
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True  # uvicorn writes nothing more to a disconnected client
            self.running.message_event.set()

    def is_answered(self) -> bool:
        """Whether every request that has started is answered."""
        return self.running is None or self.running.response_complete


def _called() -> None:
    """A function without effect that replaces a callback which must not be called again."""


class HttpResponder:
    """Writes the response to one request."""

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: HttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Writes a whole response, unless the client has disconnected."""
        cycle, protocol = self._cycle, self._protocol
        protocol.in_flight = None
        on_response, cycle.on_response = cycle.on_response, _called  # breaks a reference cycle
        cycle.response_started = cycle.response_complete = True
        if cycle.disconnected:
            return
        parts = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        if CLOSE in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", body)
        cast(BufferedTransport, protocol.transport).write_whole(b"".join(parts))
        if not cycle.keep_alive:
            protocol.transport.close()
        on_response()
