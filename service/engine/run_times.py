"""What batches of one token each take to run, by how many they are: quick ones need no thread of their own."""

from __future__ import annotations

import math

from models.manifest import Role

NEWEST = 1 / 8
"""Weight of the latest run in an average."""


class RunTimes:
    """Kept for every power of two of the number of items, up to which a batch counts as one of so many.

    A run on the runner's thread takes turns with the event loop at the interpreter, and seems to take as long as it
    waits for that, too: of those only one that was quicker than is known says anything.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[Role, int], float] = {}

    def expected(self, role: Role, items: int) -> float:
        """Seconds that a batch is expected to take; infinitely many where none of its size was run."""
        return self._seconds.get((role, (items - 1).bit_length()), math.inf)

    def took(self, role: Role, items: int, seconds: float, *, here: bool) -> None:
        """A batch was run, `here`, on the event loop's thread, or on the runner's."""
        size = role, (items - 1).bit_length()
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + NEWEST * (seconds - known) if here else min(known, seconds)
