"""Minimal HTTP/1.1 and WebSocket clients on plain sockets. They support only the features that the loads need, and use
little CPU time."""

from __future__ import annotations

import os
import socket
import struct
from base64 import b64encode

READ_AT_ONCE = 65536
TEXT, CLOSE, PING, PONG = 0x1, 0x8, 0x9, 0xA


class BadAnswer(Exception):
    """A server sent an unexpected answer. The message contains the beginning of that answer."""


def connect(port: int) -> socket.socket:
    """Opens a connection to a local port with TCP_NODELAY."""
    connected = socket.create_connection(("127.0.0.1", port), timeout=10)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def http_request(path: str, body: str) -> bytes:
    """Returns the bytes of a POST request with a JSON body for a keep-alive connection."""
    data = body.encode()
    head = (
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(data)}",
    )
    return "\r\n".join((*head, "", "")).encode() + data


class HttpAnswers:
    """Parses the answers on one connection. Supports only bodies with a content-length."""

    def __init__(self) -> None:
        self._received = bytearray()

    def receive(self, data: bytes) -> bytes | None:
        """Appends `data` to the bytes received so far. Returns the body of the answer if it is complete, else None.
        Raises BadAnswer if the status is not 2xx."""
        if not data:
            raise BadAnswer("the server closed the connection")
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self._received[:end]).lower()
        _, named, length = head.partition(b"\r\ncontent-length:")
        if not named:
            raise BadAnswer(f"the answer has no content-length; its head is {head[:300]!r}")
        whole = end + 4 + int(length.partition(b"\r\n")[0])
        if len(self._received) < whole:
            return None
        body = bytes(self._received[end + 4 : whole])
        del self._received[:whole]
        if not head.startswith(b"http/1.1 2"):
            raise BadAnswer(f"the server answered {head[:12].decode()}: {body[:300]!r}")
        return body


class HttpConnection:
    """One open connection of HTTP/1.1."""

    def __init__(self, port: int) -> None:
        self.socket = connect(port)
        self._answers = HttpAnswers()

    def send(self, request: bytes) -> None:
        """Sends a request made by `http_request`."""
        self.socket.sendall(request)

    def receive(self) -> bytes | None:
        """Reads from the socket once. Returns the body of an answer if one is complete, else None. Raises BadAnswer."""
        return self._answers.receive(self.socket.recv(READ_AT_ONCE))


class WebSocket:
    """One open WebSocket. It handles only unfragmented text messages and answers pings."""

    def __init__(self, port: int, path: str) -> None:
        """Raises BadAnswer if the server does not switch protocols."""
        self.socket = connect(port)
        key = b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET {path} HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
            f"sec-websocket-key: {key}\r\nsec-websocket-version: 13\r\n\r\n".encode()
        )
        received = b""
        while b"\r\n\r\n" not in received:
            data = self.socket.recv(READ_AT_ONCE)
            received += data
            if not data:
                raise BadAnswer(f"the server did not open a WebSocket at {path}; it sent {received[:300]!r}")
        head, _, rest = received.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101"):
            raise BadAnswer(f"the server did not open a WebSocket at {path}; it sent {head[:300]!r}")
        self._received = bytearray(rest)

    def send(self, frame: bytes) -> None:
        """Sends a frame made by `text_frame`."""
        self.socket.sendall(frame)

    def receive(self) -> bytes | None:
        """Reads from the socket once. Returns a message if one is complete, else None. Raises BadAnswer if the server
        has closed the WebSocket."""
        data = self.socket.recv(READ_AT_ONCE)
        if not data:
            raise BadAnswer("the server closed the connection")
        self._received += data
        while (frame := self._frame()) is not None:
            kind, payload = frame
            if kind == TEXT:
                return payload
            if kind == PING:
                self.socket.sendall(_frame(PONG, payload))
            elif kind == CLOSE:
                raise BadAnswer(f"the server closed the WebSocket: {payload!r}")
        return None

    def _frame(self) -> tuple[int, bytes] | None:
        """Removes the first complete frame from the received bytes. Returns its opcode and payload, or None."""
        held = self._received
        if len(held) < 2:
            return None
        length, start = held[1] & 0x7F, 2
        if length >= 126:
            code, start = ("!H", 4) if length == 126 else ("!Q", 10)
            if len(held) < start:
                return None
            (length,) = struct.unpack_from(code, held, 2)
        if len(held) < start + length:
            return None
        kind, payload = held[0] & 0xF, bytes(held[start : start + length])
        del held[: start + length]
        return kind, payload


def text_frame(text: str) -> bytes:
    """Returns a client's text frame. The protocol requires a mask. A mask of zeros leaves the payload unchanged."""
    return _frame(TEXT, text.encode())


def _frame(kind: int, payload: bytes) -> bytes:
    if len(payload) > 125:
        raise ValueError(f"the payload has {len(payload)} bytes, but at most 125 are supported")
    return bytes([0x80 | kind, 0x80 | len(payload), 0, 0, 0, 0]) + payload
