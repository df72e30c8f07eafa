"""What is being received and not yet answered, over all connections: one budget in bytes.

A connection's head, and messages of some KiB, are bounded by how many connections there may be, and nobody counts them:
whatever large bodies are under way, a session's next step is taken.
"""

from __future__ import annotations

SMALL_BYTES = 1 << 12  # that a connection may have under way uncounted


class Intake:
    """Counts the bytes that came and are not answered, on those connections that have more than a few."""

    def __init__(self, most: int) -> None:
        """`most`: bytes, over all connections."""
        self.most = most
        self.taken = 0

    def has_room(self, count: int) -> bool:
        """Whether so many bytes more could be taken now."""
        return self.taken + count <= self.most


class Share:
    """What one connection has under way."""

    __slots__ = ("counted", "intake")

    def __init__(self, intake: Intake) -> None:
        self.intake = intake
        self.counted = 0

    def is_now(self, count: int) -> bool:
        """Notes that the connection has `count` bytes under way; or, where there is no room for more, notes nothing
        and says False. What is less than it was always fits."""
        more = (count if count > SMALL_BYTES else 0) - self.counted
        if more > 0 and not self.intake.has_room(more):
            return False
        self.counted += more
        self.intake.taken += more
        return True
