"""A persistent HTTP/1.1 connection that uses little CPU time, because the tests run hundreds of connections on the same
cores as the servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Broken(Exception):
    """Raised if the connection is refused, or closed before the end of the answer. The outcome of the request is
    unknown."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: its status, its JSON document, and its headers with lower-case names."""

    status: int
    document: dict[str, Any]
    headers: Mapping[str, str]


class Connection:
    """A connection that sends one request at a time, and reconnects if it was closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Reply:
        """Sends a request, and returns the answer. Raises Broken if the connection fails. The next call then
        reconnects."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        lines = [f"{method} {path} HTTP/1.1", "host: wane", f"content-length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            writer.write("\r\n".join((*lines, "", "")).encode() + content)
            return await self._reply(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            raise Broken(str(error)) from error
        except BaseException:
            # For example a cancellation. Without the close, the next request would read the answer to this one.
            self.close()
            raise

    async def _reply(self, reader: asyncio.StreamReader) -> Reply:
        first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        content = await reader.readexactly(int(headers.get("content-length", "0")))
        if "content-length" not in headers and not first.startswith("HTTP/1.1 204"):
            content = await reader.read()  # an answer of HAProxy itself, which then closes the connection
        if headers.get("connection", "").lower() == "close":
            self.close()
        document: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            document = json.loads(content)
        return Reply(int(first.split()[1]), document, headers)

    def close(self) -> None:
        """Closes the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
