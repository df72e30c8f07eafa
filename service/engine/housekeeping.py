"""Periodic housekeeping: expires idle states and sessions."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from wane.service.engine.live_accuracy import LiveAccuracy
from wane.service.sessions.sessions import Sessions
from wane.service.state.cache import StateCache

logger = logging.getLogger("wane.engine")

EVERY_S = 1.0


class Housekeeper:
    """Expires the idle states and sessions of one model. `look` does one pass, and `run` calls `look` every second."""

    def __init__(
        self,
        state_cache: StateCache,
        sessions: Sessions,
        model: str,
        is_idle: Callable[[], bool],
        *,
        checks: bool,
        live: LiveAccuracy | None = None,
    ) -> None:
        """`is_idle` returns whether no request is in flight. `checks` is the setting `check_invariants`."""
        self._state_cache = state_cache
        self._sessions = sessions
        self._is_idle = is_idle
        self._checks = checks
        self._model = model
        self._live = live
        self.parked = 0  # the number of this model's sessions without a state in memory, after the last pass

    async def run(self) -> None:
        """Calls `look` every second, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            if self._live is not None:
                self._live.passed(EVERY_S)
            try:
                await self.look()
            except Exception:  # housekeeping continues, because an unreachable store may become reachable again
                logger.exception("the housekeeping of model %s failed", self._model)
            if self._checks:
                self.check()

    async def look(self) -> None:
        """Expires idle states and sessions."""
        known = await self._sessions.expire()
        self.parked = max(known - len(self._state_cache), 0)

    def check(self) -> None:
        """Ends the process if the reference counts of the states or the cache's indexes are inconsistent."""
        try:
            self._state_cache.check_integrity(idle=self._is_idle())
        except AssertionError:
            logger.critical("the state cache of model %s is inconsistent: this is a bug", self._model, exc_info=True)
            os.abort()  # a debugger finds the process as it was
