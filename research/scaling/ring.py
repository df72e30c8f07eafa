"""Which replica a session belongs to, as HAProxy has it: `balance hash`, `hash-type consistent sdbm avalanche`.

A server has sixteen points for each unit of its weight on a circle of 2^32 places; a session belongs to the server of
the point nearest to its own place, on either side. HAProxy 2.6, `src/lb_chash.c`; both hashes are public: sdbm, and a
32-bit integer hash by Bob Jenkins followed by a product. `tests/stack/test_ring.py` holds this against the real
program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

POINTS = 16  # for a unit of weight
WEIGHT = 64  # of a server, in deploy/haproxy/haproxy.cfg
NUMBERED = 4096  # numbers that each server has for its points
PLACES = 2**32
Places = NDArray[np.uint32]


def sdbm(text: bytes) -> int:
    """The hash of a key, before it is spread."""
    place = 0
    for byte in text:
        place = (65599 * place + byte) % PLACES
    return place


def spread(values: Places) -> Places:
    """An avalanche: every bit of the value bears on every bit of the place."""
    a = values.astype(np.uint32)
    a = a + np.uint32(0x7ED55D16) + (a << np.uint32(12))
    a = a ^ np.uint32(0xC761C23C) ^ (a >> np.uint32(19))
    a = a + np.uint32(0x165667B1) + (a << np.uint32(5))
    a = (a + np.uint32(0xD3A2646C)) ^ (a << np.uint32(9))
    a = a + np.uint32(0xFD7046C5) + (a << np.uint32(3))
    a = a ^ np.uint32(0xB55A4F09) ^ (a >> np.uint32(16))
    return a * np.uint32(3221225473)


def places(sessions: Iterable[str]) -> Places:
    """Where sessions are on the circle."""
    return spread(np.array([sdbm(session.encode()) for session in sessions], np.uint32))


class Ring:
    """The circle with the points of some servers, each known by its number (HAProxy's own, from 1)."""

    def __init__(self, points: Mapping[int, int]) -> None:
        """`points`: how many each server has; `full` and `starting` say how many that are."""
        numbers = np.repeat(np.fromiter(points, np.int64), list(points.values()))
        own = np.concatenate([np.arange(count) for count in points.values()])
        where = spread((numbers * NUMBERED + own).astype(np.uint32))
        order = np.argsort(where, kind="stable")
        self._where, self._numbers = where[order], numbers[order]

    def owners(self, places: Places) -> NDArray[np.int64]:
        """The number of the server for each place."""
        count = len(self._where)
        after = np.searchsorted(self._where, places) % count
        before = (after - 1) % count
        nearer = (places - self._where[before]) <= (self._where[after] - places)  # both modulo the circle
        return self._numbers[np.where(nearer, before, after)]

    def shares(self) -> dict[int, float]:
        """The part of the circle that is each server's."""
        gaps = np.diff(self._where, append=self._where[:1]).astype(np.float64)
        halves = (gaps + np.roll(gaps, 1)) / 2 / PLACES
        return {int(number): float(halves[self._numbers == number].sum()) for number in np.unique(self._numbers)}


def full(servers: Iterable[int], weight: int = WEIGHT) -> dict[int, int]:
    """Points of servers that have all of their weight."""
    return dict.fromkeys(servers, weight * POINTS)


def starting(age_s: float, slowstart_s: float, weight: int = WEIGHT) -> int:
    """Points of a server that came up so long ago: the weight grows in sixteenths of the time that is given it."""
    steps = POINTS if age_s >= slowstart_s else int((POINTS * int(age_s) + slowstart_s - 1) // slowstart_s)
    return max(1, weight * steps)
