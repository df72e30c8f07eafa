"""Fake replicas. Each fake replica records the requests that it receives, and answers with its configured status."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Replica:
    """A fake replica. `ready` is whether readiness probes succeed. `answers` is the status of the answers to all other
    requests. If `answers` is `nothing`, the replica closes the connection without an answer. `asked` lists the paths of
    all requests except readiness probes."""

    number: int
    ready: bool = True
    answers: str = "200"
    asked: list[str] = field(default_factory=list)
    port: int = 0
    server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens on `port`, or on a free port if `port` is 0."""
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Stops listening, so new connections are refused."""
        assert self.server is not None
        self.server.close()
        self.server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split()[1]
                length = head.lower().partition("content-length:")[2].split("\r\n")[0]
                await reader.readexactly(int(length or 0))
                status = "200" if self.ready else "503"
                if path != "/readyz":
                    self.asked.append(path)
                    status = self.answers
                if status == "nothing":
                    return
                body = json.dumps({"replica": self.number})
                writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())


@contextlib.asynccontextmanager
async def three_replicas() -> AsyncIterator[list[Replica]]:
    """Runs three ready replicas."""
    replicas = [Replica(number) for number in range(3)]
    for replica in replicas:
        await replica.start()
    try:
        yield replicas
    finally:
        for replica in replicas:
            if replica.server is not None:
                replica.stop()
