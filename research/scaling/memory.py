"""Two simulations of the states in a replica's memory. One is an LRU cache of the states of individual sessions. The
other counts only the resident, remembered and away sessions of a population of equal sessions.

If the steps of all sessions are Poisson processes of equal rate, each session is equally likely to step next, whatever
happened before. The sessions are then exchangeable, so the number of resident sessions is itself a Markov chain (the
chain of all cache contents is lumpable). A simulation of this number alone is therefore exact. At any time, an LRU
state cache contains a uniform random sample of the sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Protocol

import numpy as np


class Found(Enum):
    """Where a replica finds the state that a step needs."""

    RESIDENT = "resident"
    REMEMBERED = "remembered"
    """The state was evicted, but this replica has the session's last tokens."""

    AWAY = "away"
    """The session was at another replica, so its last tokens are read from the store."""


class States(Protocol):
    """The states that are in a replica's memory (resident)."""

    def use(self, session: int) -> Found:
        """Returns where the state for a session's next step is found. Afterwards this state is resident."""
        ...

    def drop(self, session: int) -> None:
        """Drops the state of a failed step."""
        ...

    @property
    def resident(self) -> int:
        """Returns the number of resident states."""
        ...


class StateCache:
    """An LRU cache of the states of individual sessions."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._resident: OrderedDict[int, None] = OrderedDict()
        self._known: set[int] = set()

    def use(self, session: int) -> Found:
        """See `States`."""
        if session in self._resident:
            self._resident.move_to_end(session)
            return Found.RESIDENT
        found = Found.REMEMBERED if session in self._known else Found.AWAY
        self._known.add(session)
        self._resident[session] = None
        if len(self._resident) > self._capacity:
            self._resident.popitem(last=False)
        return found

    def drop(self, session: int) -> None:
        """See `States`."""
        self._resident.pop(session, None)

    @property
    def resident(self) -> int:
        """See `States`."""
        return len(self._resident)


class Population:
    """The numbers of sessions whose states are resident, remembered or away (see `Found`). `use` draws a random
    session."""

    def __init__(self, sessions: int, capacity: int, random: np.random.Generator, *, away: int = 0) -> None:
        """away: the number of sessions that are new to the replica. Of the other sessions, as many are resident as the
        capacity allows."""
        self.sessions = sessions
        self.away = away
        self._capacity = capacity
        self._random = random
        self._resident = min(sessions - away, capacity)

    def use(self, session: int) -> Found:  # noqa: ARG002 (a random session is drawn)
        """See `States`. Ignores `session`, and draws a random session of the population."""
        drawn = self._random.random() * self.sessions
        if drawn < self._resident:
            return Found.RESIDENT
        if drawn >= self.sessions - self.away:
            self.away -= 1
            found = Found.AWAY
        else:
            found = Found.REMEMBERED
        self._resident = min(self._resident + 1, self._capacity)
        return found

    def drop(self, session: int) -> None:  # noqa: ARG002
        """See `States`."""
        self._resident = max(self._resident - 1, 0)

    @property
    def resident(self) -> int:
        """See `States`."""
        return self._resident

    def join(self, sessions: int) -> None:
        """Adds sessions that come from other replicas."""
        self.sessions += sessions
        self.away += sessions

    def leave(self, sessions: int) -> None:
        """Removes random sessions: resident, remembered and away sessions in proportion to their numbers."""
        share = sessions / self.sessions
        self.away -= round(share * self.away)
        self._resident -= round(share * self._resident)
        self.sessions -= sessions
