"""The resident states of a replica: as an LRU cache of named sessions, or as counts of a population of equal sessions.

If every session steps as a Poisson process of the same rate, the next step belongs to each session with the same
probability, independent of the past. The sessions are then exchangeable, so the number of resident sessions is a Markov
chain by itself (the chain of the states is lumpable). A simulation of this number alone is exact. An LRU state cache
also contains a uniform sample of the sessions at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Protocol

import numpy as np


class Found(Enum):
    """Where a replica finds the state of a step."""

    RESIDENT = "resident"
    REMEMBERED = "remembered"
    """The state was evicted, but this replica has the session's last tokens."""

    AWAY = "away"
    """The session was at another replica, so its last tokens are read from the store."""


class States(Protocol):
    """The resident states of a replica."""

    def use(self, session: int) -> Found:
        """Returns where the state of a session's step is found. Afterwards the state is resident."""
        ...

    def drop(self, session: int) -> None:
        """Drops the state of a failed step."""
        ...

    @property
    def resident(self) -> int:
        """Returns the number of resident states."""
        ...


class StateCache:
    """An LRU cache of named sessions."""

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
    """The numbers of resident, remembered and away sessions. `use` draws a random kind of session."""

    def __init__(self, sessions: int, capacity: int, random: np.random.Generator, *, away: int = 0) -> None:
        """away: the number of sessions that are new to the replica. The other sessions are resident, up to the
        capacity."""
        self.sessions = sessions
        self.away = away
        self._capacity = capacity
        self._random = random
        self._resident = min(sessions - away, capacity)

    def use(self, session: int) -> Found:  # noqa: ARG002 (a random session is drawn)
        """See `States`. Ignores `session`, and draws a random kind of session."""
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
        """Removes random sessions, from each kind in proportion to its number."""
        share = sessions / self.sessions
        self.away -= round(share * self.away)
        self._resident -= round(share * self._resident)
        self.sessions -= sessions
