"""A TCP proxy between two programs. A test can interrupt (cut) the proxy. A cut proxy forwards no bytes and closes no
connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

READ_AT_ONCE = 65536


class Wire:
    """A proxy that forwards bytes between its clients, which connect to `port`, and the program at the port `behind`.

    After `cut`, connections stay open and new ones are accepted, but no bytes arrive. After `mend`, the bytes that were
    sent in the meantime arrive.
    """

    def __init__(self) -> None:
        self.port = self.behind = 0
        self._whole = asyncio.Event()
        self._whole.set()

    def cut(self) -> None:
        """Stops forwarding."""
        self._whole.clear()

    def mend(self) -> None:
        """Forwards again, including the bytes that were sent in the meantime."""
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
    """Runs a proxy while the `with` block runs. The test sets the proxy's target port, `behind`, later."""
    carrying = Wire()
    server = await carrying.start()
    try:
        yield carrying
    finally:
        carrying.mend()
        server.close()
