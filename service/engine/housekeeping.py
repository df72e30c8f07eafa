"""Housekeeping, off the latency path: what is over is forgotten, and what is kept is checked, a part at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from wane.service.observability.metrics import Metrics
from wane.service.sessions.sessions import Sessions
from wane.service.state.cache import StateCache
from wane.service.state.pool import RESERVED

logger = logging.getLogger("wane.engine")

EVERY_S = 1.0
SLOTS_AT_ONCE = 256  # one and a half milliseconds for states of 4 KB: most of it their checksums


class IntegrityReport(TypedDict):
    """How often every state was checked, and how many faults were found: each costs a rebuilding, and is logged."""

    rounds: int
    faults: int


class Housekeeper:
    """Looks after the states of one model: `look` once, or `run` to do so every second.

    A fault costs states, never answers: a state that is not to be believed is forgotten, and rebuilt by the next
    token of its session. It is counted and logged, because it is a bug, or memory that fails.
    """

    def __init__(
        self, state_cache: StateCache, sessions: Sessions, metrics: Metrics, model: str, is_idle: Callable[[], bool]
    ) -> None:
        """`is_idle` says whether no request is in progress."""
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
        """Looks every second, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.look()
            except Exception:  # an unreachable store comes back: housekeeping goes on
                logger.exception("the housekeeping of model %s failed", self._model)

    async def look(self) -> None:
        """Forgets what is over, and checks the bookkeeping and the next few states."""
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
                logger.error("the states of model %s are not to be believed: %s", self._model, fault.text)
            self._state_cache.mend(faults, idle=idle)

    def document(self) -> IntegrityReport:
        """`integrity` of the report: how often all states have been checked, and what was found."""
        return {"rounds": self._rounds, "faults": self._faults}
