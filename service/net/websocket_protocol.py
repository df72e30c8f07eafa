"""WebSockets with limits on frames, messages and handshakes."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, apply_mask  # type: ignore[attr-defined]  # the fast one, if it is installed
from websockets.http11 import Request
from websockets.protocol import State

from wane.service.net.connection import DEAF_S, SMALL_BYTES, RejectReason, TimeoutProtocol, bare_answer
from wane.service.net.receive_queue import CHANNEL, MOST_EARLY, ClientDisconnected, Message, ReceiveQueue

PIECE_BYTES = 1 << 12  # the number of received bytes that are parsed in one call
# the largest number of fragments, pings and pongs within FRAMES_S seconds without a complete message
MOST_FRAMES, FRAMES_S = 1000, 10.0
PROTOCOL, NOT_UTF8, POLICY, TRY_AGAIN = 1002, 1007, 1008, 1013
WHOLE_TEXT = 0x81  # the first byte of a text message in one frame
MASKED = 0x80  # the bit of a frame's second byte that marks a masked frame; the other bits hold a short length
# the longest payload in bytes whose length fits in the second byte, and the longest whose length fits in the next two
# bytes
SHORT_BYTES, MEDIUM_BYTES = 125, 0xFFFF
# a short length of 126 or 127 means that the length is in a separate field of this many bytes
LENGTH_BYTES = {126: 2, 127: 8}
MASK_BYTES = 4


class FrameBoundary:
    """Finds the boundaries of frames in the bytes that a client sends (RFC 6455, 5.2)."""

    __slots__ = ("_head", "_missing_bytes")

    def __init__(self) -> None:
        self._head = b""  # received bytes of a frame whose length field is incomplete
        self._missing_bytes = 0  # the number of bytes of the current frame that are not received yet

    @property
    def is_within_frame(self) -> bool:
        """Whether the last received frame is incomplete."""
        return bool(self._missing_bytes or self._head)

    def feed(self, data: bytes) -> None:
        """Adds received bytes."""
        data = self._head + data
        at = self._missing_bytes  # the offset of the next frame
        while at < len(data):
            size = frame_bytes(data, at)
            if size is None:
                self._head, self._missing_bytes = data[at:], 0
                return
            at += size
        self._head, self._missing_bytes = b"", at - len(data)


def frame_bytes(data: bytes, at: int) -> int | None:
    """Returns the length in bytes of the frame that begins at offset `at`, including the frame's head. Returns None if
    the head is incomplete."""
    if len(data) < at + 2:
        return None
    payload_bytes = data[at + 1] & ~MASKED
    width = LENGTH_BYTES.get(payload_bytes, 0)
    begin = at + 2 + width
    if len(data) < begin:
        return None
    if width:
        payload_bytes = int.from_bytes(data[at + 2 : begin])
    return 2 + width + MASK_BYTES + payload_bytes


class WebSocketProtocol(TimeoutProtocol, WebSocketsSansIOProtocol):
    """A WebSocket with limits and timeouts. The class implements `Channel`, so that the WebSocket's route can use it
    directly."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.close_timeout = DEAF_S
        self.receive_queue = ReceiveQueue(self.loop)
        self.queue = self.receive_queue  # type: ignore[assignment]  # has the methods that uvicorn calls
        self.boundary = FrameBoundary()
        self.at_rest = False  # whether all received bytes are parsed and the last message is complete
        self.rest = b""  # received bytes to parse after the route has read the earlier messages
        self.frames_left = MOST_FRAMES
        self.frames_since_s = self.loop.time()
        self.discarding = False  # whether the WebSocket is about to be closed and received bytes are dropped
        self.in_message = False  # whether a message or a frame is incomplete
        self.fragment_bytes = 0  # number of payload bytes in the complete frames of an incomplete message
        self.unanswered: deque[int] = deque()  # the length in bytes of each unanswered message, oldest first
        self.unanswered_bytes = 0  # the sum of `unanswered`

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.rest, self.frames = b"", []
        self.conn.reader.discard()
        self.conn.parser.close()  # breaks a reference cycle that would keep the last frame in memory
        self.share.is_now(0)

    def data_received(self, data: bytes) -> None:
        if self.discarding:
            return
        if self.at_rest and (text := short_text(data)) is not None:
            self.take_in(text, is_text=True, at_rest=True)
        elif not self.rest and len(data) <= PIECE_BYTES:
            self.parse(data)
        else:
            self.rest += data
            if self.has_room():
                self.take_apart()
        if self.in_message or self.timer is not None or self.rest or self.unanswered_bytes > SMALL_BYTES:
            self.look()
        if not self.handshake_initiated:
            self.refuse_handshake()

    def parse(self, data: bytes) -> None:
        """Passes received bytes to the websockets library."""
        if self.handshake_initiated:
            self.boundary.feed(data)
        super().data_received(data)
        self.in_message = self.boundary.is_within_frame or bool(self.frames)
        self.at_rest = not (self.in_message or self.rest)

    def look(self) -> None:
        """Closes the WebSocket if the receive budget has no room for the received bytes. Starts the timer if a message
        is incomplete and reading is not paused, and stops the timer otherwise."""
        if self.discarding or not self.has_room():
            return
        if not self.in_message or self.read_paused:
            self.at_ease()
        elif self.timer is None:
            self.timer = self.loop.call_later(self.settings.body_timeout_s, self.too_slow)

    def has_room(self) -> bool:
        """Returns whether the receive budget has room for the received bytes. Closes the WebSocket if there is no
        room."""
        if self.share.is_now(self.coming_bytes() + self.unanswered_bytes):
            return True
        self.break_off(RejectReason.FULL, TRY_AGAIN, "the server is receiving too much data: try again later")
        return False

    def coming_bytes(self) -> int:
        """Returns the number of received bytes that are not parsed yet or belong to an incomplete message."""
        return len(self.rest) + len(self.conn.reader.buffer) + self.fragment_bytes

    def too_slow(self) -> None:
        """Closes the WebSocket, because a message was still incomplete after `body_timeout_s`."""
        self.timer = None
        why = f"a message was not complete after {self.settings.body_timeout_s:g} s"
        self.break_off(RejectReason.SLOW_BODY, POLICY, why)

    def take_apart(self) -> None:
        """Parses received bytes in pieces until reading is paused, so that one client does not block the others."""
        while self.rest and not self.read_paused and not self.discarding:
            piece, self.rest = self.rest[:PIECE_BYTES], self.rest[PIECE_BYTES:]
            self.parse(piece)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self.tell(RejectReason.HANDSHAKE, HTTPStatus(self.response.status_code))

    def refuse_handshake(self) -> None:
        """Rejects a handshake whose head the HTTP parser accepted, but the websockets library could not parse. Without
        this rejection, uvicorn would wait for more bytes."""
        answer = b"".join(self.conn.data_to_send()) or bare_answer(HTTPStatus.BAD_REQUEST)
        self.tell(RejectReason.HANDSHAKE, HTTPStatus(int(answer.split(b" ", 2)[1])))
        self.discarding = True
        self.rest = b""
        self.transport.write(answer)
        self.transport.close()

    def handle_parser_exception(self) -> None:
        """Handles an invalid frame or a frame that is too long."""
        self.discarding = True
        self.rest = b""
        if self.conn.close_sent is not None and self.conn.close_sent.code == PROTOCOL:
            self.tell(RejectReason.MALFORMED)
        super().handle_parser_exception()

    async def run_asgi(self) -> None:
        scope = cast(dict[str, Any], self.scope)
        scope[CHANNEL] = self
        try:
            await super().run_asgi()
        finally:
            del scope[CHANNEL]

    async def receive(self) -> ASGIReceiveEvent:
        message = await self.receive_queue.get()
        if self.read_paused and self.receive_queue.empty():
            self.read_paused = False
            self.transport.resume_reading()
        if self.rest:
            self.take_apart()
        if self.in_message and not self.disconnected:
            self.look()  # reading was paused until this message was read, so the timer starts now
        return cast(ASGIReceiveEvent, message)

    def send(self, message: ASGISendEvent) -> Coroutine[Any, Any, None]:
        if message["type"] == "websocket.send":
            self.is_answered()
        return super().send(message)

    async def send_text(self, text: bytes) -> None:
        """Sends a text message. Builds the frame without the websockets library. This is possible because frames are
        not compressed."""
        if not self.writable.is_set():
            await self.writable.wait()
        if self.disconnected or self.conn.state is not State.OPEN:
            raise ClientDisconnected
        self.is_answered()
        size = len(text)
        if size <= SHORT_BYTES:
            head = bytes((WHOLE_TEXT, size))
        elif size <= MEDIUM_BYTES:
            head = bytes((WHOLE_TEXT, 126, size >> 8, size & 0xFF))
        else:
            head = bytes((WHOLE_TEXT, 127)) + size.to_bytes(8)
        self.transport.write(head + text)

    async def send_close(self, code: int, reason: str) -> None:
        if not self.close_sent:
            with suppress(OSError):  # the client disconnected before the close frame was sent
                await self.send({"type": "websocket.close", "code": code, "reason": reason})

    def until_hangup(self) -> ReceiveQueue:
        return self.receive_queue

    def is_answered(self) -> None:
        """Records that the oldest message is answered."""
        if self.unanswered:
            self.unanswered_bytes -= self.unanswered.popleft()
            if self.share.counted:
                self.share.is_now(self.coming_bytes() + self.unanswered_bytes)

    def send_receive_event_to_app(self) -> None:
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames, self.fragment_bytes = [], 0
        self.take_in(data, is_text=self.curr_msg_data_type == "text")

    def take_in(self, data: bytes, *, is_text: bool, at_rest: bool = False) -> None:
        """Queues a message. If `at_rest` is true, the library's parser is not running, and the reader resumes
        immediately."""
        if self.close_sent:
            self.counts_frame()
            return
        self.frames_left = MOST_FRAMES
        if is_text:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                self.break_off(RejectReason.MALFORMED, NOT_UTF8, "a text message is not valid UTF-8")
                return
            message: Message = {"type": "websocket.receive", "text": text}
        else:
            message = {"type": "websocket.receive", "bytes": data}
        self.unanswered.append(len(data))
        self.unanswered_bytes += len(data)
        if at_rest:
            self.receive_queue.put_now(message)
        else:
            self.receive_queue.put_nowait(message)
        if not self.read_paused and (len(self.receive_queue) >= MOST_EARLY or self.unanswered_bytes > SMALL_BYTES):
            self.read_paused = True
            self.transport.pause_reading()

    def handle_text(self, event: Frame) -> None:
        self.fragment_bytes = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self.fragment_bytes = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        if self.counts_frame():
            self.fragment_bytes += len(event.data)
            super().handle_cont(event)

    def handle_ping(self) -> None:
        if self.counts_frame():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self.counts_frame():
            super().handle_pong(event)

    def counts_frame(self) -> bool:
        """Counts a frame that completes no message. If there were too many such frames, closes the WebSocket and
        returns False."""
        if self.discarding:
            return False
        self.frames_left -= 1
        if self.frames_left > 0:
            return True
        now_s = self.loop.time()
        if now_s - self.frames_since_s > FRAMES_S and not self.close_sent:
            self.frames_left, self.frames_since_s = MOST_FRAMES, now_s
            return True
        self.break_off(RejectReason.FRAMES, POLICY, "too many frames without a complete message")
        return False

    def break_off(self, reason: RejectReason, code: int, why: str) -> None:
        """Stops reading, sends a close frame, and closes the connection DEAF_S seconds later, so that the client can
        read the frame."""
        if self.discarding or self.transport.is_closing():
            return
        self.discarding = True
        self.at_ease()
        self.rest, self.frames, self.fragment_bytes = b"", [], 0
        self.transport.pause_reading()
        if not self.close_sent:
            self.tell(reason)
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": why})
            self.conn.fail(code, why)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)
        self.share.is_now(self.unanswered_bytes)


def short_text(data: bytes) -> bytes | None:
    """Returns the text if `data` is exactly one frame with a short text. Returns None otherwise. Most messages are such
    frames."""
    size = len(data) - 6
    if not 0 <= size <= SHORT_BYTES or data[0] != WHOLE_TEXT or data[1] != MASKED | size:
        return None
    text: bytes = apply_mask(data[6:], data[2:6])
    return text
