"""The end of engines that others have taken the place of: each goes once its last request is over.

An engine that was replaced by one of the same tokenizer has no sessions of its own any more. One whose tokenizer is
another keeps those that it has, until it has not been asked for anything for as long as sessions live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

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
        task.add_done_callback(lambda _: self._leaving.pop(engine, None))

    def linger(self, engine: Engine) -> None:
        """Keeps an engine for the sessions that it has."""
        self._lingering[engine] = asyncio.create_task(self._watch(engine))

    async def _end(self, engine: Engine) -> None:
        await self._presence.depart()
        await engine.drain()
        await engine.close()
        engine.discard()

    async def _watch(self, engine: Engine) -> None:
        """Retires an engine that no session can have any more: the last would have ended by itself."""
        asked = -1
        while asked != engine.asked:
            asked = engine.asked
            await asyncio.sleep(self._session_ttl_s)
        del self._lingering[engine]
        self.retire(engine)

    async def settled(self) -> None:
        """Waits until those that leave are gone."""
        while self._leaving:
            await asyncio.wait(self._leaving.values())

    def stop(self) -> list[Engine]:
        """Ends nothing any more by itself; whoever asks is to end these."""
        engines = [*self._leaving, *self._lingering]
        for task in (*self._leaving.values(), *self._lingering.values()):
            task.cancel()
        return engines
