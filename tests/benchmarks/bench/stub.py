"""A stub server on its own thread. The server supports those features of HTTP and WebSocket that the load generators
use."""

from __future__ import annotations

import hashlib
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Answer = Callable[[int, bytes], bytes]
"""A function that takes the number and the body of a request, and returns the bytes of the complete answer."""


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


class Stub:
    """A server with one thread for each connection. `asked` is a list of the requests' bodies, in the order of their
    arrival."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.port: int = self._listening.getsockname()[1]
        self.asked: list[bytes] = []

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(ConnectionError), connection, connection.makefile("rb") as file:
            while line := file.readline():
                headers = dict(_header(line) for line in iter(file.readline, b"\r\n"))
                if "upgrade" in headers:
                    connection.sendall(_switch(headers["sec-websocket-key"]))
                    self._talk(connection, file.read)
                    return
                self._reply(connection, file.read(int(headers["content-length"])), line)

    def _reply(self, connection: socket.socket, body: bytes, line: bytes) -> None:
        with self._lock:
            number = len(self.asked)
            self.asked.append(body)
        assert line.startswith(b"POST ")
        connection.sendall(self._answer(number, body))

    def _talk(self, connection: socket.socket, read: Callable[[int], bytes]) -> None:
        """Answers a client's WebSocket messages. Each message must be one masked frame of at most 125 bytes."""
        while len(head := read(2)) == 2:
            mask = read(4)
            payload = bytes(byte ^ mask[index % 4] for index, byte in enumerate(read(head[1] & 0x7F)))
            if head[0] == 0x81:
                with self._lock:
                    number = len(self.asked)
                    self.asked.append(payload)
                connection.sendall(self._answer(number, payload))


@contextmanager
def serving(answer: Answer) -> Iterator[Stub]:
    """Runs a stub server while the `with` block runs. Its clients must disconnect before the end of the block."""
    stub = Stub(answer)
    thread = threading.Thread(target=stub.accept)
    thread.start()
    try:
        yield stub
    finally:
        stub.close()
        thread.join()


def message(payload: bytes, kind: int = 0x1) -> bytes:
    """Returns a WebSocket frame as a server sends it, without a mask."""
    if len(payload) < 126:
        return bytes([0x80 | kind, len(payload)]) + payload
    return bytes([0x80 | kind, 126]) + len(payload).to_bytes(2, "big") + payload


def _header(line: bytes) -> tuple[str, str]:
    name, _, value = line.decode().partition(":")
    return name.lower(), value.strip()


def _switch(key: str) -> bytes:
    accept = b64encode(hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()).decode()
    head = ("HTTP/1.1 101 Switching Protocols", "upgrade: websocket", "connection: upgrade")
    return "\r\n".join((*head, f"sec-websocket-accept: {accept}", "", "")).encode()
