"""One minimal keep-alive HTTP/1.1 connection on asyncio streams."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: the status, and the body parsed as JSON. The body is None if it is empty."""

    status: int
    body: Any


class Connection:
    """A connection to the server. A request opens the connection if it is not open."""

    def __init__(self, port: int, key: str | None = None) -> None:
        """key: the API key, sent with every request; None for a server without keys."""
        self._port = port
        self._authorization = "" if key is None else f"authorization: Bearer {key}\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: dict[str, object] | None = None) -> Reply:
        """Sends a request and returns its answer."""
        reader, _ = await self._send(method, path, body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head[9:12])
        _, _, length = head.partition(b"\r\ncontent-length:")
        data = await reader.readexactly(int(length.partition(b"\r\n")[0] or 0))
        return Reply(status, json.loads(data) if data else None)

    async def leave(self, method: str, path: str, body: dict[str, object] | None = None) -> None:
        """Sends a request and hangs up without waiting."""
        _, writer = await self._send(method, path, body)
        await writer.drain()
        self.close()

    async def _send(
        self, method: str, path: str, body: dict[str, object] | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._streams[1].write(f"{head}{self._authorization}content-length: {len(data)}\r\n\r\n".encode() + data)
        return self._streams

    def close(self) -> None:
        """Hangs up."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
