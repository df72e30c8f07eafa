"""A TCP proxy that simulates network failures between two programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """A proxy that forwards bytes to a port. `sever` stops the forwarding, and `mend` starts the forwarding again."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self._server: asyncio.Server | None = None
        self._whole = asyncio.Event()
        self._whole.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.answers_held = False

    async def open(self) -> None:
        """Listens on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening, and closes every connection."""
        assert self._server is not None
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._drop()
        await self._server.wait_closed()

    def sever(self) -> None:
        """Stops forwarding without closing connections, like a network whose cable is unplugged."""
        self._whole.clear()

    def hold_answers(self) -> None:
        """From now on forwards requests but no answers, until a call of `mend`."""
        self.answers_held = True

    def mend(self) -> None:
        """Closes all open connections, and forwards the bytes of new connections. Discards the bytes that the proxy has
        not forwarded."""
        self._drop()
        self.answers_held = False
        self._whole.set()

    def _drop(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._writers.add(writer)
        with suppress(OSError, asyncio.CancelledError):
            await self._whole.wait()
            there, onward = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(onward)
            await asyncio.gather(self._pass(reader, onward), self._pass(there, writer, answers=True))
        self._connections.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool = False) -> None:
        while data := await reader.read(65536):
            if not self._whole.is_set() or (answers and self.answers_held):
                continue
            writer.write(data)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def proxy(target: int) -> AsyncIterator[Proxy]:
    """Runs a proxy to the port `target` during the block."""
    between = Proxy(target)
    await between.open()
    try:
        yield between
    finally:
        await between.close()
