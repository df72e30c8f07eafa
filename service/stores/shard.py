"""A part of the sessions in memory, by id, the longest idle first.

A plain dict keeps its order of insertion, so an entry that is used is taken out and put in again. Beside OrderedDict
that costs no memory, and leaves nothing that the garbage collector would walk through: entries are strings and bytes.
A dict is copied when it outgrows its table, which for a million entries would hold up everybody: hence many small ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from service.stores.packed import TOUCHED, touched_s


class Shard:
    """Packed sessions, in the order of their last use; each ends after `ttl_s` without any."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._entries: dict[str, bytes] = {}
        self._quiet_until_s = -math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, session: str, packed: bytes) -> None:
        """Makes the session the most recently used."""
        self._entries.pop(session, None)
        self._entries[session] = packed

    def get(self, session: str, now_s: float) -> bytes | None:
        """The session, unless it is over; its place in the order stays as it is."""
        packed = self._entries.get(session)
        return packed if packed is not None and now_s <= TOUCHED.unpack_from(packed)[0] + self._ttl_s else None

    def pop(self, session: str) -> bytes | None:
        """Takes the session out, if it is there."""
        return self._entries.pop(session, None)

    def all(self, now_s: float) -> Iterator[tuple[str, bytes]]:
        """Every session that is not over, the longest idle first."""
        since_s = now_s - self._ttl_s
        return ((session, packed) for session, packed in self._entries.items() if touched_s(packed) >= since_s)

    def oldest(self) -> tuple[str, bytes] | None:
        """The session that was longest idle."""
        return next(iter(self._entries.items()), None)

    def over(self, now_s: float) -> str | None:
        """A session that is over. To ask costs next to nothing while none can be."""
        if now_s <= self._quiet_until_s:
            return None
        oldest = self.oldest()
        ends_s = (now_s if oldest is None else touched_s(oldest[1])) + self._ttl_s
        if oldest is not None and now_s > ends_s:
            return oldest[0]
        self._quiet_until_s = ends_s  # whatever is used from now on ends later
        return None
