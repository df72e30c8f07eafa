"""Periodic housekeeping: expires idle states and sessions, and checks some of the cached states in each pass."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from typing_extensions import TypedDict  # pydantic requires `typing_extensions.TypedDict` before Python 3.12

from wane.service.observability.metrics import Metrics
from wane.service.sessions.sessions import Sessions
from wane.service.state.cache import StateCache
from wane.service.state.pool import RESERVED

logger = logging.getLogger("wane.engine")

EVERY_S = 1.0
SLOTS_AT_ONCE = 256  # checking this many 4 KB states takes 1.5 ms, mostly for checksums


class IntegrityReport(TypedDict):
    """`rounds` is the number of times that all states have been checked. `faults` is the number of faults that were
    found. Each fault is logged, and the state with the fault is dropped."""

    rounds: int
    faults: int


class Housekeeper:
    """Expires and checks the states of one model. `look` does one pass, and `run` calls `look` every second.

    A fault never causes a wrong answer: a corrupt state is dropped, and the session's next request rebuilds it. Faults
    are counted and logged, because each fault is a bug or a memory error.
    """

    def __init__(
        self, state_cache: StateCache, sessions: Sessions, metrics: Metrics, model: str, is_idle: Callable[[], bool]
    ) -> None:
        """`is_idle` returns whether no request is in flight."""
        self._state_cache = state_cache
        self._sessions = sessions
        self._is_idle = is_idle
        self._model = model
        self._next = RESERVED
        self._rounds = 0
        self._faults = 0
        self._parked = metrics.sessions_parked.labels(model)
        self._faults_metric = metrics.state_faults.labels(model)

    async def run(self) -> None:
        """Calls `look` every second, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.look()
            except Exception:  # housekeeping continues, because an unreachable store may become reachable again
                logger.exception("the housekeeping of model %s failed", self._model)

    async def look(self) -> None:
        """Expires idle states and sessions, then checks the state cache's indexes and the next SLOTS_AT_ONCE states."""
        known = await self._sessions.expire()
        self._parked.set(max(known - len(self._state_cache), 0))
        idle = self._is_idle()
        slots = range(self._next, min(self._next + SLOTS_AT_ONCE, self._state_cache.untouched))
        self._next = slots.stop
        if slots.stop == self._state_cache.untouched:
            self._next = RESERVED
            self._rounds += 1
        faults = self._state_cache.faults(slots, idle=idle)
        if faults:
            self._faults += len(faults)
            self._faults_metric.inc(len(faults))
            for fault in faults:
                logger.error("the state cache of model %s has a fault: %s", self._model, fault.text)
            self._state_cache.mend(faults, idle=idle)

    def document(self) -> IntegrityReport:
        """Returns the report's `integrity` field."""
        return {"rounds": self._rounds, "faults": self._faults}
