"""Closes the engines of replaced and unloaded models, after their last requests.

If the new version has the same tokenizer, sessions continue on it, and their states are rebuilt from their last tokens.
Otherwise sessions stay on the old version. The old version is then kept until it has been unused for a session's time
to live.

Requests in flight are counted by epoch (`Epochs`). A new epoch begins whenever an engine is replaced or unloaded. A
replaced engine is closed after the last request that arrived before the replacement, whichever engine that request
uses.
"""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass

from wane.service.engine.engine import Engine
from wane.service.registry import loader


@dataclass(slots=True, eq=False)
class Epoch:
    """The number of requests in flight that arrived between two calls of `Epochs.depart`."""

    count: int = 0
    gone: asyncio.Event | None = None  # set when the last request has ended, if something waits for that

    def leave(self) -> None:
        """Records the end of one request of this epoch."""
        self.count -= 1
        if not self.count and self.gone is not None:
            self.gone.set()


class Epochs:
    """The epochs of all requests. All methods must be called on the event loop's thread."""

    def __init__(self) -> None:
        self._latest = Epoch()
        self._earlier: list[Epoch] = []

    def enter(self) -> Epoch:
        """Counts a new request, and returns its epoch. The request must leave that epoch when it ends."""
        self._latest.count += 1
        return self._latest

    async def depart(self) -> None:
        """Waits until all requests that are in flight now have ended. Does not wait for later requests."""
        self._earlier.append(self._latest)
        self._latest = Epoch()
        for epoch in [*self._earlier]:
            if epoch.count:
                epoch.gone = epoch.gone or asyncio.Event()
                await epoch.gone.wait()
            if epoch in self._earlier:
                self._earlier.remove(epoch)


class RetiredEngines:
    """Replaced and unloaded engines. Engines in `leaving` answer their last requests. Engines in `lingering` serve the
    sessions of their tokenizer. All methods must be called on the event loop's thread."""

    def __init__(self, epochs: Epochs, session_ttl_s: float) -> None:
        self._epochs = epochs
        self._session_ttl_s = session_ttl_s
        self.leaving: list[Engine] = []
        self.lingering: dict[Engine, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def of(self, model: str, vocabulary: str) -> Engine | None:
        """Returns the lingering engine that serves the sessions of a model and a tokenizer, or None."""
        return next(
            (engine for engine in self.lingering if (engine.name, engine.tokenizer) == (model, vocabulary)), None
        )

    def retire(self, engine: Engine) -> None:
        """Closes a replaced engine after its last in-flight request."""
        lingering = self.lingering.pop(engine, None)
        if lingering is not None:
            lingering.cancel()
        engine.retire()
        self.leaving.append(engine)
        task = asyncio.create_task(self._end(engine))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def linger(self, engine: Engine) -> None:
        """Keeps a replaced engine to serve the sessions of its tokenizer, until it has been unused for a session's time
        to live. All of these sessions have then expired."""
        self.lingering[engine] = asyncio.create_task(self._retire_unused(engine))

    def stop(self) -> list[Engine]:
        """Cancels the closing of engines, and returns the engines. The caller must close them."""
        engines = [*self.leaving, *self.lingering]
        for task in (*self._ending, *self.lingering.values()):
            task.cancel()
        return engines

    async def _end(self, engine: Engine) -> None:
        """Closes an engine, and returns its memory to the operating system.

        The engine's parts refer to one another, so only the garbage collector frees them. A garbage collection takes
        only some milliseconds, because it skips the objects that existed when the server became ready. Without `trim`,
        the C library would keep tens of megabytes for each closed engine.
        """
        try:
            await self._epochs.depart()
            await engine.drain()
            await engine.close()
            engine.discard()
        finally:
            self.leaving.remove(engine)
        del engine
        gc.collect()
        await asyncio.to_thread(loader.trim)

    async def _retire_unused(self, engine: Engine) -> None:
        asked = -1
        while asked != engine.admission.asked:
            asked = engine.admission.asked
            await asyncio.sleep(self._session_ttl_s)
        del self.lingering[engine]
        self.retire(engine)
