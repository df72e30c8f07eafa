"""WebSockets with clients that send frames without end, or a handshake that is none."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

from service.patience import DEAF_S, Patient, bare_answer
from service.refusals import Reason

PIECE_BYTES = 1 << 12  # of what a WebSocket sends, taken apart at a time
MOST_FRAMES, FRAMES_S = 1000, 10.0  # that end no message, in so many seconds: fragments, pings
POLICY = 1008


class PatientWebSocket(Patient, WebSocketsSansIOProtocol):
    """A WebSocket, with an end to patience."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.close_timeout = DEAF_S
        self.rest = b""  # of what came in, which is not taken apart before the messages in front of it are taken
        self.frames_left = MOST_FRAMES
        self.frames_since_s = self.loop.time()
        self.deaf = False  # it is about to be closed, and what still comes is not taken

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        if not self.rest and len(data) <= PIECE_BYTES:
            super().data_received(data)
        else:
            self.rest += data
            self.take_apart()
        if not self.handshake_initiated:
            self.refuse_handshake()

    def take_apart(self) -> None:
        """Goes on with what came in, piece by piece, until there is a message to take: a piece is frames enough to keep
        everybody else waiting."""
        while self.rest and not self.read_paused and not self.deaf:
            piece, self.rest = self.rest[:PIECE_BYTES], self.rest[PIECE_BYTES:]
            super().data_received(piece)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self.tell(Reason.HANDSHAKE, HTTPStatus(self.response.status_code))

    def refuse_handshake(self) -> None:
        """The request's head came in whole, but the library cannot read what HTTP could: it has an answer ready, or
        none, and uvicorn would wait for more."""
        answer = b"".join(self.conn.data_to_send()) or bare_answer(HTTPStatus.BAD_REQUEST)
        self.tell(Reason.HANDSHAKE, HTTPStatus(int(answer.split(b" ", 2)[1])))
        self.deaf = True
        self.rest = b""
        self.transport.write(answer)
        self.transport.close()

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
            self.tell(Reason.FRAMES)
            code, reason = POLICY, "too many frames without a message"
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            self.conn.fail(code, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)
