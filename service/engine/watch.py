"""Loads what changes in the folder that bundles are in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from service.engine.repository import Repository, Signature, look
from service.errors import WaneError

logger = logging.getLogger("wane.engine")


class Watch:
    """`look` once, or `run` to do so now and then.

    A bundle is loaded once it has changed and then stayed as it is from one look to the next, so that one which is
    still being copied is left alone. One that could not be loaded is tried again when it changes again. A bundle that
    is gone changes nothing: its model is served until it is unloaded.
    """

    def __init__(self, repository: Repository, load: Callable[[str], Awaitable[object]]) -> None:
        """What the folder holds now is taken to be known. `load` is given the name of a model. Blocks."""
        self._repository = repository
        self._load = load
        self._known = self._seen = repository.signatures()

    async def run(self, every_s: float) -> None:
        """Looks every so many seconds, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.look()
            except Exception:  # a disk that is away comes back, and so does the watch
                logger.exception("the bundles' folder could not be looked at")

    async def look(self) -> None:
        """Loads what has changed, and has settled since the last look."""
        before, self._seen = self._seen, await asyncio.to_thread(self._repository.signatures)
        settled: dict[Path, Signature] = {path: one for path, one in self._seen.items() if before.get(path) == one}
        changed = [path for path, one in settled.items() if self._known.get(path) != one]
        self._known = {path: one for path, one in self._known.items() if path in self._seen} | settled
        for path in changed:
            found = await asyncio.to_thread(look, path)
            try:
                await self._load(found.name)
            except WaneError as error:
                logger.warning("%s has changed, and was not loaded: %s", path.name, error.message)
