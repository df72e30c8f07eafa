"""The end of engines that others have taken the place of: each goes once its last request is over.

An engine that was replaced by one of the same tokenizer has no sessions of its own any more. One whose tokenizer is
another keeps those that it has, until it has not been asked for anything for as long as sessions live.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Iterable
from contextlib import suppress

from service.engine.engine import Engine
from service.engine.presence import Presence


class Retirement:
    """Engines on their way out. All methods belong to the event loop's thread."""

    def __init__(self, presence: Presence, session_ttl_s: float) -> None:
        """`presence`: of all who may hold an engine. `session_ttl_s`: how long a session lives unused."""
        self._presence = presence
        self._session_ttl_s = session_ttl_s
        self._leaving: dict[Engine, asyncio.Task[None]] = {}
        self._lingering: dict[Engine, asyncio.Task[None]] = {}
        self._tidying: set[asyncio.Task[None]] = set()

    @property
    def leaving(self) -> Iterable[Engine]:
        """Those that answer their last requests."""
        return tuple(self._leaving)

    @property
    def lingering(self) -> Iterable[Engine]:
        """Those that answer for sessions of their tokenizer."""
        return tuple(self._lingering)

    def of(self, model: str, vocabulary: str) -> Engine | None:
        """The engine that lingers for the sessions of a tokenizer."""
        return next((one for one in self._lingering if (one.name, one.tokenizer) == (model, vocabulary)), None)

    def retire(self, engine: Engine) -> None:
        """Ends an engine that nobody is given any more, once nobody is at it."""
        lingering = self._lingering.pop(engine, None)
        if lingering is not None:
            lingering.cancel()
        engine.retire()
        task = self._leaving[engine] = asyncio.create_task(self._end(engine))
        task.add_done_callback(lambda _: self._gone(engine))

    def linger(self, engine: Engine) -> None:
        """Keeps an engine for the sessions that it has."""
        self._lingering[engine] = asyncio.create_task(self._watch(engine))

    async def _end(self, engine: Engine) -> None:
        await self._presence.depart()
        await engine.drain()
        await engine.close()
        engine.discard()

    def _gone(self, engine: Engine) -> None:
        self._leaving.pop(engine, None)
        task = asyncio.create_task(tidy())
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    async def _watch(self, engine: Engine) -> None:
        """Retires an engine that no session can have any more: the last would have ended by itself."""
        asked = -1
        while asked != engine.asked:
            asked = engine.asked
            await asyncio.sleep(self._session_ttl_s)
        del self._lingering[engine]
        self.retire(engine)

    async def settled(self) -> None:
        """Waits until those that leave are gone, and their memory with them."""
        while waited := [*self._leaving.values(), *self._tidying]:
            await asyncio.wait(waited)

    def stop(self) -> list[Engine]:
        """Ends nothing any more by itself; whoever asks is to end these."""
        engines = [*self._leaving, *self._lingering]
        for task in (*self._leaving.values(), *self._lingering.values()):
            task.cancel()
        return engines


async def tidy() -> None:
    """What an engine leaves behind goes back to the system, not only to this process.

    Its parts refer to one another, so that it takes the collector to find them: some milliseconds, for what was there
    when the server became ready is not looked at. And what is freed the C library may keep, in pieces: tens of
    megabytes of every engine, unless it is told to give them back.
    """
    await asyncio.sleep(0)  # until whoever called has let go of the engine
    gc.collect()
    await asyncio.to_thread(trim)


def trim() -> None:
    """Gives memory that is free back to the system, where the C library is one that keeps it (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
