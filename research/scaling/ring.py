"""Assigns sessions to replicas as HAProxy does with `balance hash` and `hash-type consistent sdbm avalanche`.

The ring is a circle of 2^32 places. Each server has sixteen points on it per unit of the server's weight. Each session
has one place, and belongs to the server whose point is nearest to it in either direction. The algorithm is that of
HAProxy 2.6, `src/lb_chash.c`. The algorithm applies two public hashes to a session's name: sdbm, and then a 32-bit
integer hash by Bob Jenkins with a multiplication at the end. `tests/stack/test_ring.py` compares this module with
HAProxy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

POINTS = 16  # points per unit of weight
WEIGHT = 64  # the weight of a server in deploy/haproxy/haproxy.cfg
NUMBERED = 4096  # the size of each server's range of point ids
PLACES = 2**32
Places = NDArray[np.uint32]


def sdbm(text: bytes) -> int:
    """Returns the sdbm hash of a key, before the avalanche hash."""
    place = 0
    for byte in text:
        place = (65599 * place + byte) % PLACES
    return place


def spread(values: Places) -> Places:
    """Applies the avalanche hash, in which every bit of a key's hash affects every bit of the place on the circle."""
    a = values.astype(np.uint32)
    a = a + np.uint32(0x7ED55D16) + (a << np.uint32(12))
    a = a ^ np.uint32(0xC761C23C) ^ (a >> np.uint32(19))
    a = a + np.uint32(0x165667B1) + (a << np.uint32(5))
    a = (a + np.uint32(0xD3A2646C)) ^ (a << np.uint32(9))
    a = a + np.uint32(0xFD7046C5) + (a << np.uint32(3))
    a = a ^ np.uint32(0xB55A4F09) ^ (a >> np.uint32(16))
    return a * np.uint32(3221225473)


def places(sessions: Iterable[str]) -> Places:
    """Returns the sessions' places on the circle."""
    return spread(np.array([sdbm(session.encode()) for session in sessions], np.uint32))


class Ring:
    """The circle with the points of all servers. A server is identified by its number in HAProxy, from 1."""

    def __init__(self, points: Mapping[int, int]) -> None:
        """points: each server's number of points, by server number (see `full` and `starting`)."""
        numbers = np.repeat(np.fromiter(points, np.int64), list(points.values()))
        own = np.concatenate([np.arange(count) for count in points.values()])
        where = spread((numbers * NUMBERED + own).astype(np.uint32))
        order = np.argsort(where, kind="stable")
        self._where, self._numbers = where[order], numbers[order]

    def owners(self, places: Places) -> NDArray[np.int64]:
        """Returns, for each place, the number of the server whose point is nearest."""
        count = len(self._where)
        after = np.searchsorted(self._where, places) % count
        before = (after - 1) % count
        # both distances are computed modulo the circle's size
        nearer = (places - self._where[before]) <= (self._where[after] - places)
        return self._numbers[np.where(nearer, before, after)]

    def shares(self) -> dict[int, float]:
        """Returns each server's share of the circle."""
        gaps = np.diff(self._where, append=self._where[:1]).astype(np.float64)
        halves = (gaps + np.roll(gaps, 1)) / 2 / PLACES
        return {int(number): float(halves[self._numbers == number].sum()) for number in np.unique(self._numbers)}


def full(servers: Iterable[int], weight: int = WEIGHT) -> dict[int, int]:
    """Returns each server's number of points at full weight."""
    return dict.fromkeys(servers, weight * POINTS)


def starting(age_s: float, slowstart_s: float, weight: int = WEIGHT) -> int:
    """Returns the number of points of a server in slow start. The server's weight grows in sixteen steps over
    `slowstart_s` seconds."""
    steps = POINTS if age_s >= slowstart_s else int((POINTS * int(age_s) + slowstart_s - 1) // slowstart_s)
    return max(1, weight * steps)
