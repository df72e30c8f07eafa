"""Which sessions' states a replica has: in full, by session, or as the sizes of a population that share one fate.

Where every session steps as a Poisson process of the same rate, whichever steps next is any of them with the same
probability, whatever happened before. Then only how many are resident matters, and not which: the count alone is a
Markov chain (the sessions are exchangeable, the chain lumps), and nothing is approximated by keeping no more than it.
A state cache that drops the least recently used holds a uniform sample of them at any time, too."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Protocol

import numpy as np


class Found(Enum):
    """Where a step's state comes from."""

    RESIDENT = "resident"
    REMEMBERED = "remembered"
    """It was dropped; the tail is known here."""

    AWAY = "away"
    """The session was elsewhere: its tail is read from the store."""


class States(Protocol):
    """What a replica asks of its memory."""

    def use(self, session: int) -> Found:
        """A session steps, and its state is there afterwards."""
        ...

    def drop(self, session: int) -> None:
        """Its step came to nothing: there is no state."""
        ...

    @property
    def resident(self) -> int:
        """How many states there are."""
        ...


class StateCache:
    """Every session by name; the one that was unused for longest is dropped."""

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
    """Sessions without names: how many are resident, remembered, and away. `use` draws which of them it is."""

    def __init__(self, sessions: int, capacity: int, random: np.random.Generator, *, away: int = 0) -> None:
        """`away` of the sessions are new to the replica; of the others, as many are resident as there is room for."""
        self.sessions = sessions
        self.away = away
        self._capacity = capacity
        self._random = random
        self._resident = min(sessions - away, capacity)

    def use(self, session: int) -> Found:  # noqa: ARG002  (any may be meant)
        """See `States`; which session it is is drawn."""
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
        """Sessions come that were elsewhere."""
        self.sessions += sessions
        self.away += sessions

    def leave(self, sessions: int) -> None:
        """Any of the sessions go, as many of each kind as there are of it."""
        share = sessions / self.sessions
        self.away -= round(share * self.away)
        self._resident -= round(share * self._resident)
        self.sessions -= sessions
