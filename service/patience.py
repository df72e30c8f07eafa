"""How long the server waits for a client, and how much it keeps for one: what its connections may cost.

uvicorn reads what comes, and writes what there is to write, however long that takes. Here a connection has so much time
for the head of a request, so much for its body, and so much to read what it is sent; and there are so many connections.
What went wrong before there is a request to answer is answered here, in bytes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from service.corked import Corked, CorkedProtocol
from service.settings import Settings

Headers = list[tuple[bytes, bytes]]

HEAD_END = b"\r\n\r\n"
DEAF_S = 2.0  # for a client to read its answer, after which what it still sends is no longer taken
PIECE_BYTES = 1 << 12  # of what a WebSocket sends, taken apart at a time
MOST_FRAMES, FRAMES_S = 1000, 10.0  # that end no message, in so many seconds: fragments, pings
POLICY = 1008


@dataclass(frozen=True, slots=True)
class Patience:
    """`connections` at a time; `header_bytes` of a request's head; seconds for a head, for a body, and until something
    that was sent is read."""

    connections: int
    header_bytes: int
    header_s: float
    body_s: float
    send_s: float

    @classmethod
    def of(cls, settings: Settings) -> Patience:
        """What the operator chose."""
        return cls(
            settings.max_connections,
            settings.max_header_bytes,
            settings.header_timeout_s,
            settings.body_timeout_s,
            settings.send_timeout_s,
        )


class Unread:
    """Cuts a connection whose client reads nothing for so long."""

    __slots__ = ("_after_s", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, after_s: float) -> None:
        self._transport = transport
        self._after_s = after_s
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """There is more to read than the network takes."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._after_s, self._transport.abort)

    def end(self) -> None:
        """It was read, or the connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Trailers(Headers):
    """Where the fields behind a chunked body go: nobody reads them, and a request's headers are those of its head."""

    def append(self, field: tuple[bytes, bytes]) -> None:
        """Keeps nothing."""


TRAILERS = Trailers()


class PatientProtocol(CorkedProtocol):
    """HTTP, with an end to patience."""

    def __init__(self, *given: Any, patience: Patience, **named: Any) -> None:
        super().__init__(*given, **named)
        self.patience = patience
        self.last_whole: object = None  # the scope of the last request that came in whole
        self.completed = False  # a request, by what has come in last
        self.last_begun: object = None  # that of the last one whose head did not come in at once
        self.head_bytes = 0  # of that head, behind what its beginning came in
        self.bare_bytes = 0  # that came since the last byte of the body itself, which is not whole
        self.withheld: RequestResponseCycle | None = None  # the request that is kept alive once its body is whole
        self.timer: asyncio.TimerHandle | None = None
        self.unread: Unread | None = None
        self.graced = False  # the timer has run out once
        self.deaf = False  # the last answer is given, and what still comes is thrown away

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        is_full = len(self.connections) >= self.patience.connections
        super().connection_made(transport)
        cast(Corked, self.transport).delays_closing = self.delays_closing
        self.unread = Unread(transport, self.patience.send_s)
        if is_full:
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            self.timer = self.loop.call_later(self.patience.header_s, self.too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self.at_ease()
        if self.unread is not None:
            self.unread.end()
        cast(Corked, self.transport).let_go()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        most = self.patience.header_bytes
        if self.scope is not self.last_whole and self.in_body():
            self.go_on(data)
        elif len(data) > most and not 0 <= data.find(HEAD_END) <= most:
            self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        else:
            super().data_received(data)
        if self.scope is self.last_whole:
            if self.completed:
                self.completed = False
                if self.timer is not None:
                    self.at_ease()
            elif self.timer is None and (self.cycle is None or self.cycle.response_complete):
                self.begin_timer()  # an empty line may stand before a request, and begins none
            return
        self.completed = False
        if self.timer is None:
            self.begin_timer()
        if not self.in_body():
            if self.last_begun is not self.scope:
                self.last_begun, self.head_bytes = self.scope, 0
            else:
                self.head_bytes += len(data)
            if self.head_bytes > most:
                self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self.bare_bytes > most:
            self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self.cycle.keep_alive and any(name == b"transfer-encoding" for name, _ in self.scope["headers"]):
            self.cycle.keep_alive = False
            self.withheld = self.cycle

    def begin_timer(self) -> None:
        """From now on a head is waited for, and no longer than it may take."""
        self.graced = False
        self.timer = self.loop.call_later(self.patience.header_s, self.too_slow)

    def go_on(self, data: bytes) -> None:
        """More of a body; or of what comes with one and is nobody's: how long its chunks are, and its trailers."""
        cycle, before = self.cycle, len(self.cycle.body)
        super().data_received(data)
        is_bare = self.cycle is cycle and self.in_body() and len(cycle.body) == before
        self.bare_bytes = self.bare_bytes + len(data) if is_bare else 0

    def on_chunk_header(self) -> None:
        """The length of a chunk has come: from here on, fields are trailers."""
        if self.in_body():
            self.headers = TRAILERS

    def on_message_complete(self) -> None:
        self.last_whole = self.scope
        self.completed = True
        if self.withheld is not None:
            self.withheld.keep_alive = not self.withheld.response_started
            self.withheld = None
        super().on_message_complete()

    def shutdown(self) -> None:
        self.withheld = None
        super().shutdown()

    def in_body(self) -> bool:
        """Whether the head of the request that comes in is whole, and its body is not."""
        return self.scope is not self.last_whole and self.cycle is not None and self.cycle.scope is self.scope

    def at_ease(self) -> None:
        """Nothing is waited for."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def too_slow(self) -> None:
        """The time is up for what comes in: for a body once the door has had the time to say so itself."""
        self.timer = None
        if self.in_body() and not self.graced:
            self.graced = True
            self.timer = self.loop.call_later(self.patience.body_s, self.too_slow)
        elif self.scope is None:  # not a byte has come
            self.transport.close()
        else:
            self.refuse(HTTPStatus.REQUEST_TIMEOUT)

    def refuse(self, status: HTTPStatus) -> None:
        """Ends the connection; with an answer, unless there was one, or one to an earlier request is on its way."""
        self.at_ease()
        if self.is_free_to_answer():
            self.transport.write(
                b"HTTP/1.1 %d %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % (status, status.phrase.encode())
            )
        self.transport.close()

    def delays_closing(self) -> bool:
        """Whether the connection is closed a little later: while a request still comes in. A connection with something
        unread in it is not closed but reset, and whoever sent too much would not be told so."""
        if self.scope is self.last_whole or self.deaf or self.transport.is_closing():
            return False
        self.deaf = True
        self.at_ease()
        if not self.cycle_is_answered():
            self.cycle.disconnected = True  # so that nothing more is written
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write_eof()
        self.timer = self.loop.call_later(DEAF_S, self.transport.close)
        return True

    def cycle_is_answered(self) -> bool:
        """Whether there is no request, or nothing more to say to the last one."""
        return self.cycle is None or self.cycle.response_complete

    def is_free_to_answer(self) -> bool:
        """Whether what is written now is taken for the answer to the request that comes in."""
        if self.pipeline:
            return False
        if self.in_body():
            return not self.cycle.response_started
        return self.cycle_is_answered()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.unread is not None:
            self.unread.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.unread is not None:
            self.unread.end()


class PatientWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket, with an end to patience."""

    def __init__(self, *given: Any, patience: Patience, **named: Any) -> None:
        super().__init__(*given, **named)
        self.patience = patience
        self.unread: Unread | None = None
        self.close_timeout = DEAF_S
        self.rest = b""  # of what came in, which is not taken apart before the messages in front of it are taken
        self.frames_left = MOST_FRAMES
        self.frames_since_s = self.loop.time()
        self.deaf = False  # it is about to be closed, and what still comes is not taken

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.unread = Unread(transport, self.patience.send_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.unread is not None:
            self.unread.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        if not self.rest and len(data) <= PIECE_BYTES:
            super().data_received(data)
            return
        self.rest += data
        self.take_apart()

    def take_apart(self) -> None:
        """Goes on with what came in, piece by piece, until there is a message to take: a piece is frames enough to keep
        everybody else waiting."""
        while self.rest and not self.read_paused and not self.deaf:
            piece, self.rest = self.rest[:PIECE_BYTES], self.rest[PIECE_BYTES:]
            super().data_received(piece)

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if self.rest:
            self.take_apart()
        return message

    def send_receive_event_to_app(self) -> None:
        if self.close_sent:
            self.counts_frame()
        else:
            self.frames_left = MOST_FRAMES
        super().send_receive_event_to_app()

    def handle_cont(self, event: Frame) -> None:
        if self.counts_frame():
            super().handle_cont(event)

    def handle_ping(self) -> None:
        if self.counts_frame():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self.counts_frame():
            super().handle_pong(event)

    def counts_frame(self) -> bool:
        """Whether one more frame that ends no message is taken; else the WebSocket is closed."""
        if self.deaf:
            return False
        self.frames_left -= 1
        if self.frames_left > 0:
            return True
        now_s = self.loop.time()
        if now_s - self.frames_since_s > FRAMES_S and not self.close_sent:
            self.frames_left, self.frames_since_s = MOST_FRAMES, now_s
            return True
        self.stop_listening()
        return False

    def stop_listening(self) -> None:
        """Leaves what still comes where it is, and closes the WebSocket as soon as its client can have read why."""
        self.deaf = True
        self.rest = b""
        self.transport.pause_reading()
        if not self.close_sent:
            code, reason = POLICY, "too many frames without a message"
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            self.conn.fail(code, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.unread is not None:
            self.unread.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.unread is not None:
            self.unread.end()


def protocols(settings: Settings) -> dict[str, Any]:
    """What uvicorn is to be configured with."""
    patience = Patience.of(settings)
    return {"http": partial(PatientProtocol, patience=patience), "ws": partial(PatientWebSocket, patience=patience)}
