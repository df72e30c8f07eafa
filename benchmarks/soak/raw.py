"""Connections that send arbitrary bytes and read the status of the answer, if there is one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping

CLOSED = "closed"
SILENT = "no answer"
ANSWERED_WITHIN_S = 30.0
BUFFER_BYTES = 4096
RESET = struct.pack("ii", 1, 0)  # value of SO_LINGER with which a close drops unsent data and sends RST


class Raw:
    """One open connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Sends data. Ignores the error if the server has closed the connection."""
        with contextlib.suppress(OSError):
            self._writer.write(data)
            await self._writer.drain()

    async def status(self, within_s: float = ANSWERED_WITHIN_S) -> str:
        """Returns the status of the next answer, `closed` if the connection ends, or `no answer` after a timeout."""
        try:
            async with asyncio.timeout(within_s):
                line = await self._reader.readline()
        except TimeoutError:
            return SILENT
        except (OSError, ValueError):
            return CLOSED
        return line[9:12].decode("latin-1") if line.startswith(b"HTTP/1.1 ") else CLOSED

    async def read(self, count: int, within_s: float = ANSWERED_WITHIN_S) -> bytes:
        """Reads at most `count` bytes. Returns empty bytes after a timeout."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._reader.read(count)
        return b""

    def reset(self) -> None:
        """Closes the connection with RST."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Raw]:
    """Opens a connection with a small receive buffer."""
    plain = socket.socket()
    try:
        plain.setblocking(False)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=plain, limit=BUFFER_BYTES)
    except BaseException:
        plain.close()
        raise
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


def head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Returns a request head whose lines have the correct form. The path and the headers are not checked, so they may
    be invalid."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def request(method: str, path: str, key: str | None, body: object = None) -> bytes:
    """Returns a complete request. A body of type bytes is sent as it is. Any other body is encoded as JSON."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(data))}
    return head(method, path, headers | authorization(key)) + data


def authorization(key: str | None) -> dict[str, str]:
    """Returns the authorization header for a key; no header if the key is None."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


def upgrade(path: str, key: str | None) -> bytes:
    """Returns a WebSocket upgrade request."""
    token = b64encode(b"0123456789abcdef").decode()
    headers = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-version": "13"}
    return head("GET", path, headers | {"sec-websocket-key": token} | authorization(key))


def frame(text: str, announced: int | None = None) -> bytes:
    """Returns a WebSocket text frame. announced: a false length for the frame's header; None for the true length. The
    mask consists of zeros."""
    data = text.encode()
    length = len(data) if announced is None else announced
    if length < 126:
        size = bytes([0x80 | length])
    elif length < 2**16:
        size = struct.pack("!BH", 0x80 | 126, length)
    else:
        size = struct.pack("!BQ", 0x80 | 127, length)
    return b"\x81" + size + bytes(4) + data
