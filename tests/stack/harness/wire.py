"""A wire between two programs that can be cut: a TCP proxy which then carries nothing, and says so to nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

READ_AT_ONCE = 65536


class Wire:
    """Carries bytes between whoever connects to `port` and the port `behind` it.

    While it is cut, connections stay open, new ones are taken, and nothing arrives. What was sent meanwhile arrives
    once it is mended, as late as that is.
    """

    def __init__(self) -> None:
        self.port = self.behind = 0
        self._whole = asyncio.Event()
        self._whole.set()

    def cut(self) -> None:
        """Nothing arrives any more."""
        self._whole.clear()

    def mend(self) -> None:
        """Everything arrives."""
        self._whole.set()

    async def start(self) -> asyncio.Server:
        """Listens on a free port."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        with contextlib.closing(writer), contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self.behind)
            with contextlib.closing(back):
                await asyncio.gather(self._carry(reader, back), self._carry(there, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_AT_ONCE):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def wire() -> AsyncIterator[Wire]:
    """A wire whose other end is still to be told."""
    carrying = Wire()
    server = await carrying.start()
    try:
        yield carrying
    finally:
        carrying.mend()
        server.close()
