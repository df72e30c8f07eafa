"""WebSockets with limits on frames, messages and handshakes, and the queue of messages received and not yet handled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from types import CodeType, TracebackType
from typing import Any, cast

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, apply_mask  # type: ignore[attr-defined]  # the quick one where there is one
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

from wane.service.aio.eager import Waiter
from wane.service.aio.interrupt import Interrupt
from wane.service.aio.timers import Timer, timers
from wane.service.errors import Abandoned
from wane.service.net.connection import DEAF_S, SMALL_BYTES, RejectReason, TimeoutProtocol, bare_answer

CHANNEL = "wane.channel"
"""Where a WebSocket's scope has the protocol that carries it, for as long as its route runs."""

DISCONNECT_GRACE_S = 0.05
"""Time that an answer has after its client disconnected, before it is cancelled: most are there sooner."""

MOST_EARLY = 16
"""Messages that are read while one is being answered: the rest stay in the network, which slows their sender down."""


Message = MutableMapping[str, Any]  # ASGI's


class ClientDisconnected(Exception):
    """The client is gone, and takes no answer any more."""


class ReceiveQueue:
    """Takes the place of uvicorn's queue.

        with receive_queue:
            answer = await engine.submit(...)

    ends the body of the `with` when the client goes away, and raises Abandoned in its place.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[Message] = deque()
        self._reader: Waiter[None] | None = None
        self._timer: Timer | None = None
        self._interrupt: Interrupt | None = None
        self._has_left = False

    def __len__(self) -> int:
        return len(self._messages)

    def empty(self) -> bool:
        """As a queue's."""
        return not self._messages

    def put_nowait(self, message: Message) -> None:
        """As a queue's. The reader goes on in the event loop's next turn. No message that matters follows a
        disconnection."""
        self._messages.append(message)
        if self._reader is not None:
            self._loop.call_soon(self._wake)
        if message["type"] == "websocket.disconnect":
            self._has_left = True
            if self._interrupt is not None:
                self._interrupt_soon()

    def put_now(self, message: Message) -> None:
        """As `put_nowait`. The reader goes on before this returns."""
        self._messages.append(message)
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.resolve(None)

    async def get(self) -> Message:
        """As a queue's, for one reader."""
        while not self._messages:
            reader: Waiter[None] = Waiter()
            self._reader = reader
            try:
                await reader
            finally:
                if self._reader is reader:
                    self._reader = None
        return self._messages.popleft()

    def __enter__(self) -> None:
        self._interrupt = Interrupt()
        if self._has_left:
            self._interrupt_soon()

    def _interrupt_soon(self) -> None:
        if self._timer is None and self._interrupt is not None:
            self._timer = timers().at(self._loop.time() + DISCONNECT_GRACE_S, self._interrupt.fire)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if interrupt is not None and interrupt.ended(kind):
            raise Abandoned("the client hung up before the answer") from error


PIECE_BYTES = 1 << 12  # of what a WebSocket sends, taken apart at a time
MOST_FRAMES, FRAMES_S = 1000, 10.0  # frames that end no message (fragments, pings), within FRAMES_S seconds
PROTOCOL, NOT_UTF8, POLICY, TRY_AGAIN = 1002, 1007, 1008, 1013
WHOLE_TEXT = 0x81  # the first byte of a text in one frame
MASKED = 0x80  # in the second, beside the length of what is short
SHORT_BYTES, MEDIUM_BYTES = 125, 0xFFFF  # of a frame whose length is in that byte, or in the next two
BETWEEN_FRAMES = StreamReader.at_eof.__code__  # where the library waits for a frame to begin
WITHIN_FRAME = StreamReader.read_exact.__code__  # and for the rest of one


class WebSocketProtocol(TimeoutProtocol, WebSocketsSansIOProtocol):
    """A WebSocket with limits and timeouts."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.close_timeout = DEAF_S
        self.receive_queue = ReceiveQueue(self.loop)
        self.queue = self.receive_queue  # type: ignore[assignment]  # it has what uvicorn uses
        self.at_rest = False  # nothing came that is not a message, whole
        self.rest = b""  # of what came in, which is not taken apart before the messages in front of it are taken
        self.frames_left = MOST_FRAMES
        self.frames_since_s = self.loop.time()
        self.discarding = False  # it is about to be closed, and what still comes is not taken
        self.in_message = False  # something came of a message, or of a frame, that is not whole
        self.fragment_bytes = 0  # of the frames of that message which are whole
        self.unanswered: deque[int] = deque()  # messages, by their bytes, in their order
        self.unanswered_bytes = 0  # of all of them

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.rest, self.frames = b"", []
        self.conn.reader.discard()
        self.conn.parser.close()  # it would hold its last frame, and itself, until the garbage collector comes
        self.share.is_now(0)

    def data_received(self, data: bytes) -> None:
        if self.discarding:
            return
        if self.at_rest and (text := short_text(data)) is not None:
            self.take_in(text, is_text=True, at_rest=True)
        elif not self.rest and len(data) <= PIECE_BYTES:
            super().data_received(data)
            self.at_rest = is_between_messages(self.conn)
        else:
            self.rest += data
            if self.has_room():
                self.take_apart()
        if self.in_message or self.timer is not None or self.rest or self.unanswered_bytes > SMALL_BYTES:
            self.look()
        if not self.handshake_initiated:
            self.refuse_handshake()

    def look(self) -> None:
        """At what came and is no message yet: whether there is room for it, and that it does not take too long."""
        if self.discarding or not self.has_room():
            return
        if not self.in_message or self.read_paused:
            self.at_ease()
        elif self.timer is None:
            self.timer = self.loop.call_later(self.connection_limits.body_s, self.too_slow)

    def has_room(self) -> bool:
        """Whether there is room for what came; else the WebSocket is closed."""
        if self.share.is_now(self.coming_bytes() + self.unanswered_bytes):
            return True
        self.break_off(RejectReason.FULL, TRY_AGAIN, "too much is being received")
        return False

    def coming_bytes(self) -> int:
        """What came and is no message yet."""
        return len(self.rest) + len(self.conn.reader.buffer) + self.fragment_bytes

    def too_slow(self) -> None:
        """The time is up for the rest of a message."""
        self.timer = None
        self.break_off(
            RejectReason.SLOW_BODY, POLICY, f"a message was not whole after {self.connection_limits.body_s:g} s"
        )

    def take_apart(self) -> None:
        """Goes on with what came in, piece by piece, until there is a message to take: a piece is frames enough to keep
        everybody else waiting."""
        while self.rest and not self.read_paused and not self.discarding:
            piece, self.rest = self.rest[:PIECE_BYTES], self.rest[PIECE_BYTES:]
            super().data_received(piece)
        self.at_rest = not self.rest and is_between_messages(self.conn)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self.tell(RejectReason.HANDSHAKE, HTTPStatus(self.response.status_code))

    def refuse_handshake(self) -> None:
        """The request's head came in whole, but the library cannot read what HTTP could: it has an answer ready, or
        none, and uvicorn would wait for more."""
        answer = b"".join(self.conn.data_to_send()) or bare_answer(HTTPStatus.BAD_REQUEST)
        self.tell(RejectReason.HANDSHAKE, HTTPStatus(int(answer.split(b" ", 2)[1])))
        self.discarding = True
        self.rest = b""
        self.transport.write(answer)
        self.transport.close()

    def handle_events(self) -> None:
        begun = not self.conn.events or bool(self.conn.reader.buffer)
        super().handle_events()
        self.in_message = begun or bool(self.frames) or waits(self.conn) is WITHIN_FRAME

    def handle_parser_exception(self) -> None:
        """What came is no frame, or a frame too long."""
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
        """As uvicorn's, and a channel's."""
        message = await self.receive_queue.get()
        if self.read_paused and self.receive_queue.empty():
            self.read_paused = False
            self.transport.resume_reading()
        if self.rest:
            self.take_apart()
        if self.in_message and not self.disconnected:
            self.look()  # it has waited for this one, and its time begins
        return cast(ASGIReceiveEvent, message)

    def send(self, message: ASGISendEvent) -> Coroutine[Any, Any, None]:
        """As uvicorn's."""
        if message["type"] == "websocket.send":
            self.is_answered()
        return super().send(message)

    async def send_text(self, text: bytes) -> None:
        """As a channel's: what `send` does with a text, without the library's frames, because nothing is compressed."""
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
        """As a channel's."""
        if not self.close_sent:
            with suppress(OSError):  # the client was quicker
                await self.send({"type": "websocket.close", "code": code, "reason": reason})

    def until_hangup(self) -> ReceiveQueue:
        """As a channel's."""
        return self.receive_queue

    def is_answered(self) -> None:
        """One message is answered by one."""
        if self.unanswered:
            self.unanswered_bytes -= self.unanswered.popleft()
            if self.share.counted:
                self.share.is_now(self.coming_bytes() + self.unanswered_bytes)

    def send_receive_event_to_app(self) -> None:
        """As uvicorn's."""
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames, self.fragment_bytes = [], 0
        self.take_in(data, is_text=self.curr_msg_data_type == "text")

    def take_in(self, data: bytes, *, is_text: bool, at_rest: bool = False) -> None:
        """A message has come. A text that is not UTF-8 is logged as that, and not with a traceback. `at_rest`: the
        library's parser is not at work, so that the reader may go on at once."""
        if self.close_sent:
            self.counts_frame()
            return
        self.frames_left = MOST_FRAMES
        if is_text:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                self.break_off(RejectReason.MALFORMED, NOT_UTF8, "a text that is not UTF-8")
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
        """Whether one more frame that ends no message is taken; else the WebSocket is closed."""
        if self.discarding:
            return False
        self.frames_left -= 1
        if self.frames_left > 0:
            return True
        now_s = self.loop.time()
        if now_s - self.frames_since_s > FRAMES_S and not self.close_sent:
            self.frames_left, self.frames_since_s = MOST_FRAMES, now_s
            return True
        self.break_off(RejectReason.FRAMES, POLICY, "too many frames without a message")
        return False

    def break_off(self, reason: RejectReason, code: int, why: str) -> None:
        """Leaves what still comes where it is, and closes the WebSocket as soon as its client can have read why."""
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
    """The text, where `data` is a frame that has a short one, whole, and nothing else: as most messages come."""
    size = len(data) - 6
    if not 0 <= size <= SHORT_BYTES or data[0] != WHOLE_TEXT or data[1] != MASKED | size:
        return None
    text: bytes = apply_mask(data[6:], data[2:6])
    return text


def is_between_messages(conn: ServerProtocol) -> bool:
    """Whether the library waits for a frame that begins a message, and has nothing of it."""
    return conn.current_size is None and waits(conn) is BETWEEN_FRAMES


def waits(conn: ServerProtocol) -> CodeType | None:
    """Where the library waits for more to come: the innermost of its generators. A library that is made otherwise is
    neither here nor there: then no message passes it by, and none is taken for begun."""
    inner = getattr(conn.parser, "gi_yieldfrom", None)
    while (deeper := getattr(inner, "gi_yieldfrom", None)) is not None:
        inner = deeper
    return getattr(inner, "gi_code", None)
