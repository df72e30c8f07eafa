"""A server with a fake engine, and clients that send slowly, read slowly, or send invalid bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast
from unittest.mock import patch

from tests.service.conftest import SocketServer, never
from tests.service.fake_engine import FakeRegistry
from wane.service.app import Application, create_app
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings

SOON_S, ENOUGH_S, LATE_S = 0.2, 1.5, 600.0
"""Values of the server's timeouts, in seconds. SOON_S is for a timeout that the test waits for. ENOUGH_S is for a
timeout that the test also waits for, after an action that must end before the timeout. LATE_S is for a timeout that
must not end during the test."""

GET = b"GET /healthz HTTP/1.1\r\nhost: wane\r\n\r\n"
POST = b"POST /v1/predict HTTP/1.1\r\nhost: wane\r\ncontent-length: 1000\r\n\r\n{"
CHUNKED = b"%s HTTP/1.1\r\nhost: wane\r\ntransfer-encoding: chunked\r\n\r\n"
HANDSHAKE = (
    b"GET /v1/sessions/s/stream HTTP/1.1\r\nhost: wane\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
MALFORMED = {
    "request line": b"POST /v1/predict HT\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\n\r\n",
    "method": b"\x00\x01\r\n\r\n",
    "URL": b"GET http:// HTTP/1.1\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    "chunk": CHUNKED % b"POST /v1/sessions" + b"zz\r\n",
    "second chunk": CHUNKED % b"POST /v1/sessions" + b"2\r\n{}\r\nzz\r\n",
}
WAIT_S = 120.0


class SlowClient(SocketServer):
    """A server with a fake engine. Tests can read the server's metrics and receive budget."""

    def __init__(self, app: Application, registry: FakeRegistry) -> None:
        super().__init__(app, registry)
        self.metrics: Metrics = app.state.metrics


@asynccontextmanager
async def serving(**changes: float | str) -> AsyncIterator[SlowClient]:
    """Starts a server with long timeouts, except for the settings in `changes`."""
    late = dict.fromkeys(("header_timeout_s", "body_timeout_s", "send_timeout_s"), LATE_S)
    settings = Settings.model_validate({"request_timeout_ms": 1000 * int(LATE_S), **late, **changes})
    registry, metrics = FakeRegistry(), Metrics()
    app = create_app(settings, cast(ModelRegistry, registry), metrics, on_load_failure=never)
    server = SlowClient(app, registry)
    task = asyncio.create_task(server.serve())
    await server.listening.wait()
    # The send buffer is small, so that it fills quickly.
    server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    try:
        # The server waits for the client's close frame. Most of these clients never send a close frame, so this line
        # shortens the server's wait.
        with patch("wane.service.net.connection.REJECTED_READ_S", SOON_S):
            async with asyncio.timeout(WAIT_S):
                yield server
    finally:
        server.should_exit = True
        await task


async def dialogue(server: SlowClient, first: bytes, drip: bytes = b"") -> bytes:
    """Sends `first`, and then `drip` repeatedly. Returns the bytes that the server sends before it closes the
    connection."""
    reader, writer = await asyncio.open_connection(*server.address)
    return await send_and_read(reader, writer, first, drip)


async def send_and_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes, drip: bytes) -> bytes:
    """Like `dialogue`, but on a connection that is already open."""

    async def keep_sending() -> None:
        while drip:
            writer.write(drip)
            await writer.drain()
            await asyncio.sleep(SOON_S / 10)

    writer.write(first)
    sending = asyncio.create_task(keep_sending())
    said = bytearray()
    try:
        with suppress(ConnectionError):
            while some := await reader.read(2**16):
                said.extend(some)
        return bytes(said)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


async def conversation(server: SlowClient, first: bytes, drip: bytes = b"") -> bytes:
    """Like `dialogue`, but on a WebSocket after its handshake."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(HANDSHAKE)
    await reader.readuntil(b"\r\n\r\n")
    return await send_and_read(reader, writer, first, drip)


def unread_socket(server: SlowClient) -> socket.socket:
    """Returns a socket with a small receive buffer. The caller connects the socket, and reads nothing from it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.setblocking(False)
    return connection


def statuses(said: bytes) -> list[int]:
    """Returns the status of every response in a server's bytes, in order. Fails if the bytes are not a sequence of
    whole responses."""
    found = []
    while said:
        head, end, rest = said.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        assert end and first.startswith(b"HTTP/1.1 "), said
        headers = dict(line.lower().split(b": ", 1) for line in lines)
        if headers.get(b"transfer-encoding") == b"chunked":
            size = None
            while size != 0:
                line, end, rest = rest.partition(b"\r\n")
                size = int(line, 16)
                assert end and rest[size : size + 2] == b"\r\n", rest
                rest = rest[size + 2 :]
        else:
            size = int(headers[b"content-length"])
            assert len(rest) >= size, rest
            rest = rest[size:]
        found.append(int(first.split(b" ")[1]))
        said = rest
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def frame(first: int, data: bytes = b"") -> bytes:
    """Returns a WebSocket frame with this first byte and a mask of zeros."""
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xff" + len(data).to_bytes(8)
    return bytes([first]) + length + bytes(4) + data


async def flood(server: SlowClient, first: bytes, more: bytes, most_bytes: int) -> bytes:
    """Sends `first`, and then `more` repeatedly. Returns the bytes that the server sends. Fails if the server accepts
    `most_bytes` bytes of `more`."""
    reader, writer = await asyncio.open_connection(*server.address)
    said = bytearray()

    async def listen() -> None:
        with suppress(ConnectionError):
            while some := await reader.read(2**16):
                said.extend(some)

    writer.write(first)
    if first == HANDSHAKE:  # a client must not send frames before its handshake is answered
        said += await reader.readuntil(b"\r\n\r\n")
    listening = asyncio.create_task(listen())
    sent_bytes = 0
    with suppress(ConnectionError):
        while not listening.done():
            writer.write(more)
            await writer.drain()
            sent_bytes += len(more)
            assert sent_bytes < most_bytes, "the server reads without a limit"
            await asyncio.sleep(0)
    await listening
    writer.transport.abort()
    return bytes(said)
