"""Stands between asyncio and uvicorn's own protocol classes, and limits what one connection can cost the server.

A `Connection` is asyncio's protocol, and the transport of uvicorn's protocol. It passes one request at a time: the next
one when the application has answered the previous one. So refusals and WebSocket handshakes wait for earlier answers.
uvicorn writes the head and the body of a response separately. A `Connection` joins them, because each write is a system
call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from wane.service.net.framing import Body, Frames
from wane.service.net.limits import SMALL_BYTES, Limits, ReceiveShare, RejectReason, abort_unread, bare_answer

CONNECTION = "wane.connection"  # the key of a request's `Connection` in the state of its scope
HEAD_END, LINE_END = b"\r\n\r\n", b"\r\n"
OTHER_PROTOCOLS = b"PRI ", b"CONNECT "
MOST_LINE_BYTES, MOST_LINES = 8192, 128  # the limits of the websockets library for a handshake
PIECE_BYTES = 1 << 12  # the number of a WebSocket's bytes that are passed to uvicorn in one call
# While a WebSocket's message is answered for longer than EARLY_S, so many later messages are passed to uvicorn, because
# a pong or a close frame may be behind them.
MOST_EARLY, EARLY_S = 16, 1.0
MOST_FRAMES, FRAMES_S = 1000, 10.0  # the largest number of frames within FRAMES_S seconds without a complete message
REJECTED_READ_S = 2.0  # the time in which a rejected client can read the response before the connection is closed
READ_S = 30  # the time after `close` in which the client can read the rest of a response
POLICY, TRY_AGAIN, CLOSE_FRAME, DATA_FRAMES = 1008, 1013, 0x88, (0x81, 0x82)
INVALID = (b"\x03\xea", b"\x03\xef")  # the close codes 1002 (an invalid frame) and 1007 (text that is not UTF-8)
# uvicorn refuses a longer number, and Python cannot convert one with thousands of digits
LENGTH = re.compile(rb"\ncontent-length:[ \t]*+0*+([0-9]{0,20}+)[ \t]*+\r")
TO_WEBSOCKET = re.compile(rb"\nupgrade:[ \t]*websocket[ \t]*\r")
TRAILING_SPACE = re.compile(rb"(?<=\S)[ \t]+(?=\r\n)")


class Connection(asyncio.Protocol):
    """One connection. `uvicorn_protocol` is uvicorn's protocol for HTTP, and after a handshake for WebSockets."""

    def __init__(self, make: Callable[..., Any], limits: Limits, *, server_state: Any, app_state: Any, **named: Any):
        self.limits, self.settings = limits, limits.settings
        self.most_head_bytes = limits.settings.max_header_bytes
        self.loop = asyncio.get_running_loop()
        self.connections = server_state.connections
        state = {**app_state, CONNECTION: self}
        self.uvicorn_protocol: Any = make(server_state=server_state, app_state=state, **named)
        self.http_protocol: Any = None  # uvicorn's protocol for HTTP after a handshake
        self.share = ReceiveShare(limits)
        self.waiting = b""  # received bytes that are not passed on yet
        self.body: Body | None = None  # the incomplete body of the current request
        self.content: bytes | None = None  # the body of the current request, if it was received with the head
        self.frames: Frames | None = None  # set if the connection is a WebSocket
        self.frames_since_s = 0.0
        self.unanswered = 0  # number of complete messages of a WebSocket that are not answered yet
        self.is_answering = False  # whether the application is answering a request
        self.has_begun = False  # whether the response to the current request has begun
        self.unanswered_bytes = 0
        self.response_head = b""  # the head of a response whose body follows
        self.is_passing = False  # whether uvicorn is parsing received bytes
        self.is_paused = False  # whether uvicorn has paused reading
        self.is_early = False  # whether a WebSocket's messages are passed to uvicorn although it has paused reading
        self.early_timer: asyncio.TimerHandle | None = None
        self.has_stopped = False  # whether the transport has paused reading
        self.expects = False  # whether the current request may expect uvicorn's 100, which it sends if the body is read
        self.is_handshake = False  # whether the current request asks for a WebSocket
        self.closes = False  # whether the connection is closed after the current response
        self.has_closed = False  # whether the WebSocket's close frame is sent
        self.has_ended = False  # whether nothing more is sent, and received bytes are dropped
        self.head = b""  # the head of the current request
        self.fields = b""  # the fields of the previous request, which mostly has the same ones
        self.length: int | None = 0  # the length of the body of the current request, or None if it is chunked
        self.probe: HttpRequestParser | None = None  # checks an incomplete head, or a chunked body
        self.probed = 0  # the number of waiting bytes that the probe has read
        self.timer: asyncio.TimerHandle | None = None  # runs while a head, a body or a message is incomplete
        self.on_lost: Callable[[], None] | None = None  # is called once if the client leaves before it is answered

    # asyncio's protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.abort, self.get_extra_info = transport.abort, transport.get_extra_info
        peer = transport.get_extra_info("peername")
        self.client = peer[:2] if isinstance(peer, tuple) else None
        if len(self.connections) >= self.settings.max_connections:
            self.uvicorn_protocol = None
            self.refuse(RejectReason.TOO_MANY, HTTPStatus.SERVICE_UNAVAILABLE)
            return
        abort_unread(transport, self.settings.send_timeout_s)
        self.start_timer(self.settings.header_timeout_s)
        self.uvicorn_protocol.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if self.has_ended:
            return
        self.waiting = self.waiting + data if self.waiting else data
        self.pass_waiting()
        if self.content is None or self.waiting or self.unanswered_bytes > SMALL_BYTES or self.share.counted:
            self.check_budget()
            self.adjust_reading()

    def eof_received(self) -> None:
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        self.has_ended, self.waiting = True, b""
        self.share.resize(0)
        self.leave()
        if isinstance(exc, TimeoutError):
            self.count_rejection(RejectReason.UNREAD)
        self.notify_lost(exc)

    def pause_writing(self) -> None:
        if self.uvicorn_protocol is not None:
            self.uvicorn_protocol.pause_writing()

    def resume_writing(self) -> None:
        if self.uvicorn_protocol is not None:
            self.uvicorn_protocol.resume_writing()

    # The transport of uvicorn's protocol

    def write(self, data: bytes) -> None:
        if not data or self.has_ended or self.transport.is_closing():
            return
        if self.response_head:
            data, self.response_head = self.response_head + data, b""
            self.transport.write(data)
        elif self.frames is not None:
            self.write_frames(data)
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            if self.is_passing and self.is_handshake:
                self.count_rejection(RejectReason.HANDSHAKE, HTTPStatus(int(data[9:12])))
            elif self.is_passing:  # no application has run
                self.refuse_malformed()
                return
            self.has_begun = True
            # the rest of a chunked body may have any length
            self.closes = self.closes or (self.body is not None and self.body.is_chunked)
            if self.closes and b"\r\nconnection: close\r\n" not in data:
                data = data[:-2] + b"connection: close\r\n\r\n"
            if b"\r\ncontent-length: " in data:
                self.response_head = data
            else:
                self.transport.write(data)
        else:
            self.transport.write(data)

    def write_frames(self, data: bytes) -> None:
        """Writes the response to a handshake, or frames."""
        self.transport.write(data)
        if data[0] in DATA_FRAMES:
            self.unanswered_bytes, self.unanswered = 0, max(self.unanswered - 1, 0)
            self.check_budget()
        elif data.startswith(b"HTTP/1.1 101 "):
            self.has_begun, self.frames_since_s = True, self.loop.time()
            self.stop_timer()
        elif data[0] == CLOSE_FRAME:
            self.has_closed = True
            if data[2:4] in INVALID:
                self.count_rejection(RejectReason.MALFORMED)

    def flush(self) -> None:
        data, self.response_head = self.response_head, b""
        if data and not self.has_ended:
            self.transport.write(data)

    def close(self) -> None:
        """Closes the connection. A client that is still sending has REJECTED_READ_S seconds to read the response,
        because the kernel resets a connection that is closed with unread bytes."""
        if self.has_ended or self.transport.is_closing():
            return
        self.flush()
        if self.body is not None or self.waiting or self.frames is not None:
            self.end()
            return
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(READ_S, self.transport.abort)

    def is_closing(self) -> bool:
        return self.has_ended or self.transport.is_closing()

    def pause_reading(self) -> None:
        self.is_paused = True
        if self.frames is not None and self.early_timer is None:
            self.early_timer = self.loop.call_later(EARLY_S, self.pass_early)
        self.adjust_reading()

    def resume_reading(self) -> None:
        self.is_paused = self.is_early = False
        if self.frames is not None and not self.is_passing:
            self.time_message(self.frames)
            self.pass_waiting()
        self.adjust_reading()

    @property
    def is_held(self) -> bool:
        """Whether uvicorn must receive no more bytes now."""
        has_enough = self.unanswered >= MOST_EARLY or self.unanswered_bytes > PIECE_BYTES
        return self.is_paused and (has_enough or not self.is_early)

    def pass_early(self) -> None:
        self.early_timer = None
        self.is_early = self.is_paused
        self.pass_next()

    def adjust_reading(self) -> None:
        """Stops reading while uvicorn has enough, or while many bytes wait behind a request that is being answered.
        They then wait in the kernel's buffers. When uvicorn has a whole request, it gets nothing more until the answer,
        and reading goes on, because only a connection that is read notices that its client left."""
        if self.frames is None and self.body is None and self.is_answering:
            stops = len(self.waiting) > self.most_head_bytes
        else:
            stops = self.is_held
        if stops is not self.has_stopped and not (self.has_ended or self.transport.is_closing()):
            self.has_stopped = stops
            (self.transport.pause_reading if stops else self.transport.resume_reading)()

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        """Called by uvicorn when a WebSocket begins."""
        self.http_protocol, self.uvicorn_protocol = self.uvicorn_protocol, protocol
        self.frames, self.is_answering = Frames(), False
        self.start_timer(self.settings.header_timeout_s)

    # Requests

    def pass_waiting(self) -> None:
        """Passes waiting bytes to uvicorn: the rest of a body, the next request if the previous one is answered, or
        frames."""
        while self.waiting and not self.has_ended:
            if self.frames is not None:
                if self.is_held:
                    return
                self.pass_frames(self.frames)
            elif self.body is not None:
                self.pass_body(self.body)
            elif self.is_answering or not self.begin():
                return

    def begin(self) -> bool:
        """Begins the next request. Returns False if its head is incomplete."""
        received = self.waiting = self.waiting.lstrip(LINE_END)
        end = received.find(HEAD_END)
        if not 0 <= end <= self.most_head_bytes:
            self.check_part(received)
            return False
        size = end + 4
        head = received[:size]
        fields = head[head.index(LINE_END) :]
        if fields != self.fields or head.startswith(OTHER_PROTOCOLS):
            if not self.admits(head, fields):
                return False
            self.fields = b"" if self.is_handshake else fields
            if b" \r\n" in fields or b"\t\r\n" in fields:  # uvicorn treats this white space as a part of the value
                head, self.fields = head[: -len(fields)] + TRAILING_SPACE.sub(b"", fields), b""
        length = self.length
        if length is not None and length > SMALL_BYTES and not self.has_room(length):
            self.refuse(RejectReason.FULL, HTTPStatus.TOO_MANY_REQUESTS)
            return False
        self.head, self.probe, self.probed, self.content = head, None, 0, None
        self.is_answering, self.waiting = True, received[size:]
        if self.is_handshake:
            self.probe = HttpRequestParser(object())
            self.check(head)
        elif length is not None and len(self.waiting) >= length:
            content = self.waiting[:length]
            self.content = None if self.expects else content
            head, self.waiting, self.unanswered_bytes = head + content, self.waiting[length:], length
            if self.timer is not None:
                self.stop_timer()
        else:
            self.body, self.probe = Body(length), HttpRequestParser(object())
            self.start_timer(self.settings.header_timeout_s + self.settings.body_timeout_s)
            self.check(head)
        if not self.has_ended:
            self.pass_on(head)
        if self.is_handshake and self.frames is None:
            self.stop_timer()
            self.closes = True  # uvicorn ignores the Upgrade field, and would not read a further request
        return True

    def admits(self, head: bytes, fields: bytes) -> bool:
        """Reads the header fields that decide how the request ends. Refuses a request for another protocol."""
        if head.startswith(b"PRI "):  # the parser waits for more
            self.refuse_malformed("this is HTTP/2, and the server speaks HTTP/1.1")
            return False
        lower = fields.lower()
        declared = LENGTH.search(lower)
        self.length = None if b"\ntransfer-encoding:" in lower else int(declared[1] or 0) if declared else 0
        self.expects = b"\nexpect:" in lower
        self.is_handshake = b"\nupgrade:" in lower or head[:8].lower() == b"connect "
        return not self.is_handshake or self.admits_upgrade(head.lower(), self.length)

    def check_part(self, received: bytes) -> None:
        """Refuses the beginning of a head if it is too long or malformed. Starts the timer."""
        if self.timer is None:
            self.start_timer(self.settings.header_timeout_s)
            self.uvicorn_protocol.data_received(b"")  # ends uvicorn's timeout of an idle connection
        if len(received) > self.most_head_bytes:
            self.refuse(RejectReason.LONG_HEAD, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif received:
            self.probe = self.probe or HttpRequestParser(object())
            self.check(received[self.probed :])
            self.probed = len(received)

    def check(self, data: bytes) -> None:
        """Refuses bytes that the parser cannot read, with the parser's reason, which uvicorn does not tell."""
        if self.probe is not None:
            try:
                self.probe.feed_data(data)
            except HttpParserUpgrade:
                self.probe = None
            except HttpParserError as error:
                self.refuse_malformed(str(error))

    def admits_upgrade(self, lower: bytes, length: int | None) -> bool:
        """Returns whether a request with an Upgrade field, or with the method CONNECT, is a WebSocket handshake with
        nothing behind it. Otherwise refuses it. `lower`: the head in lower case."""
        reason, status, text = RejectReason.HANDSHAKE, HTTPStatus.BAD_REQUEST, ""
        lines = lower.split(LINE_END)
        if lower.startswith(b"connect ") or len(TO_WEBSOCKET.findall(lower)) != lower.count(b"\nupgrade:"):
            reason, text = RejectReason.MALFORMED, "the only accepted upgrade is websocket, and CONNECT is not accepted"
        elif len(lines[0]) > MOST_LINE_BYTES:
            status = HTTPStatus.REQUEST_URI_TOO_LONG
        elif max(map(len, lines)) > MOST_LINE_BYTES or len(lines) - 3 > MOST_LINES:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        elif length != 0:
            text = "a WebSocket handshake has no body"
        elif len(self.waiting) > len(lower):
            text = "the client sent data before the handshake was answered"
        else:
            return True
        self.refuse(reason, status, text)
        return False

    def has_room(self, length: int) -> bool:
        """Whether the budget has room for a body of this length. A body over the whole budget is refused by the
        application."""
        return length > self.limits.most_bytes or self.limits.has_room(length - self.share.counted)

    def hold(self, more: int) -> bool:
        """Adds bytes to those of the current request that count towards the receive budget, until it is answered.
        Returns False, without a change, if the budget has no room for them."""
        if self.has_ended:  # the bytes of a lost connection do not count
            return True
        if not self.share.resize(self.unanswered_bytes + len(self.waiting) + more):
            return False
        self.unanswered_bytes += more
        return True

    def pass_body(self, body: Body) -> None:
        """Passes the next bytes of a body to uvicorn, and limits the bytes around it."""
        in_trailers = body.in_trailers
        count = body.take(self.waiting)
        data, self.waiting = self.waiting[:count], self.waiting[count:]
        self.unanswered_bytes += count
        bare_bytes = body.bare_bytes if self.is_answering else self.unanswered_bytes
        self.check(data)
        if self.has_ended:
            return
        if in_trailers:  # uvicorn would add the trailers to the headers, so only the empty line after them is passed
            data = LINE_END if body.ended else b""
        if body.ended:
            self.body = self.probe = None
            self.has_begun = self.is_answering and self.has_begun
            self.stop_timer()
        self.pass_on(data)
        if bare_bytes > self.most_head_bytes:
            self.refuse(RejectReason.LONG_TRAILERS, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def pass_on(self, data: bytes) -> None:
        self.is_passing = True
        try:
            self.uvicorn_protocol.data_received(data)
        finally:
            self.is_passing = False

    def answered(self) -> None:
        """Called when the application has answered the current request."""
        self.is_answering, self.unanswered_bytes = False, 0
        if self.has_ended:
            return
        self.has_begun = self.body is not None
        if self.response_head:
            self.flush()
        if self.closes:
            self.close()
            return
        if self.share.counted:
            self.share.resize(0)
        if self.waiting:
            self.loop.call_soon(self.pass_next)  # uvicorn's task must end first

    def pass_next(self) -> None:
        self.pass_waiting()
        self.adjust_reading()

    def check_budget(self) -> None:
        """Refuses the connection if the receive budget has no room for its unanswered bytes."""
        count = self.unanswered_bytes + len(self.waiting)
        if self.frames is not None:
            count += self.frames.message_bytes
        if (count > SMALL_BYTES or self.share.counted) and not self.has_ended and not self.share.resize(count):
            if self.frames is not None:
                why = "the server is receiving too much data: try again later"
                self.break_off(RejectReason.FULL, TRY_AGAIN, why)
            else:
                self.refuse(RejectReason.FULL, HTTPStatus.TOO_MANY_REQUESTS)

    # WebSockets

    def pass_frames(self, frames: Frames) -> None:
        """Passes the next bytes to uvicorn, in pieces, so that one client does not block the others."""
        data, self.waiting = self.waiting[:PIECE_BYTES], self.waiting[PIECE_BYTES:]
        if self.has_closed:
            self.unanswered_bytes += len(data)
        elif frames.is_short_text(data):
            frames.without_message = 0
            self.unanswered += 1
        else:
            before = frames.messages
            self.unanswered_bytes += frames.take(data)
            self.unanswered += frames.messages - before
        is_late = self.has_closed and self.unanswered_bytes > self.most_head_bytes
        if frames.without_message > MOST_FRAMES or is_late:
            now_s = self.loop.time()
            if now_s - self.frames_since_s <= FRAMES_S or is_late:
                self.break_off(RejectReason.FRAMES, POLICY, "too many frames without a complete message")
                return
            self.frames_since_s, frames.without_message = now_s, 0
        self.pass_on(data)
        self.time_message(frames)

    def time_message(self, frames: Frames) -> None:
        """Starts the timer of an incomplete message. Stops it while reading is paused."""
        if not frames.is_within_message or self.is_held:
            self.stop_timer()
        elif self.timer is None:
            self.start_timer(self.settings.body_timeout_s)

    def break_off(self, reason: RejectReason, code: int, why: str) -> None:
        """Closes the WebSocket with a reason."""
        if not self.has_closed:
            self.count_rejection(reason)
            self.transport.write(bytes((CLOSE_FRAME, 2 + len(why))) + code.to_bytes(2) + why.encode())
        self.end()
        self.notify_lost(None)

    # The end of a connection

    def start_timer(self, seconds: float) -> None:
        self.stop_timer()
        self.timer = self.loop.call_later(seconds, self.too_slow)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def too_slow(self) -> None:
        """Refuses a client that sends too slowly. Closes the connection of a client that has sent nothing."""
        self.timer = None
        if self.frames is not None and not self.has_begun:
            self.refuse(RejectReason.HANDSHAKE, HTTPStatus.BAD_REQUEST)
        elif self.frames is not None:
            why = f"a message was not complete after {self.settings.body_timeout_s:g} s"
            self.break_off(RejectReason.SLOW_BODY, POLICY, why)
        elif self.body is not None:
            self.refuse(RejectReason.SLOW_BODY, HTTPStatus.REQUEST_TIMEOUT)
        elif self.waiting:
            self.refuse(RejectReason.SLOW_HEAD, HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.close()

    def refuse_malformed(self, reason: str = "") -> None:
        if not reason:  # uvicorn has refused the head
            try:
                HttpRequestParser(object()).feed_data(self.head)
                reason = "the request target cannot be read"
            except HttpParserError as error:
                reason = str(error)
        self.refuse(RejectReason.MALFORMED, HTTPStatus.BAD_REQUEST, f"malformed HTTP request: {reason}")

    def refuse(self, reason: RejectReason, status: HTTPStatus, text: str = "") -> None:
        """Answers the current request with `status`, unless its response has begun, and closes the connection."""
        self.count_rejection(reason, None if self.has_begun else status)
        if not self.has_begun:
            self.transport.write(bare_answer(status, text.encode()))
        self.end()
        self.notify_lost(None)

    def count_rejection(self, reason: RejectReason, status: HTTPStatus | None = None) -> None:
        self.limits.count_rejected(reason, self.client, status)

    def end(self) -> None:
        """Sends nothing more, and drops received bytes until the connection is closed."""
        self.has_ended, self.waiting, self.body = True, b"", None
        self.share.resize(0)
        self.leave()
        if not self.transport.is_closing():
            with suppress(OSError):  # the client has reset the connection
                self.transport.write_eof()
                self.transport.resume_reading()
        self.stop_timer()
        self.timer = self.loop.call_later(REJECTED_READ_S, self.transport.close)

    def leave(self) -> None:
        """Tells a request that its client has left."""
        if self.early_timer is not None:
            self.early_timer.cancel()
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    def notify_lost(self, exc: Exception | None) -> None:
        """Tells uvicorn's protocols that the connection is lost."""
        protocols = self.uvicorn_protocol, self.http_protocol
        self.uvicorn_protocol = self.http_protocol = None
        for protocol in protocols:
            if protocol is not None:
                protocol.connection_lost(exc)


def answering(app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Returns an ASGI application that tells a request's `Connection` when `app` has answered."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        finally:
            if scope["type"] == "http":
                scope["state"][CONNECTION].answered()

    return answer
