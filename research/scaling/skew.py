"""Hot sessions: rates that fall with the rank as a power of it (Zipf), laid on the ring.

The first million ranks are placed one by one; the rest of up to 10^8 is so even that each replica's part of it is its
part of the ring. How often the cache has a state is Che's approximation for a cache that drops the least recently
used."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from research.scaling.ring import Ring, full, spread

PLACED = 1_000_000


@dataclass(frozen=True, slots=True)
class Skew:
    """exponent: of the rank; hottest_per_s: steps a second of the first session; busiest: the busiest replica's rate by
    the mean one's, and `busiest_even` by the ring alone; resident: share of steps that find their state where a tenth
    of all states has room."""

    exponent: float
    hottest_per_s: float
    busiest: float
    busiest_even: float
    resident: float

    def document(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def weights(sessions: int, exponent: float) -> tuple[NDArray[np.float64], float]:
    """Shares of all steps: of the first ranks each, and of all the others together."""
    first = np.arange(1, min(sessions, PLACED) + 1, dtype=np.float64) ** -exponent
    rest = power_sum(len(first) + 0.5, sessions + 0.5, exponent) if sessions > len(first) else 0.0
    total = float(first.sum()) + rest
    return first / total, rest / total


def power_sum(low: float, high: float, exponent: float) -> float:
    """The integral of rank to the power of minus the exponent."""
    if exponent == 1.0:
        return float(np.log(high / low))
    return float((high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent))


def skew(
    sessions: int, replicas: int, steps_per_s: float, exponent: float, most_per_s: float = np.inf, seed: int = 0
) -> Skew:
    """One fleet. `most_per_s`: of one session, whose steps wait for each other."""
    first, rest = weights(sessions, exponent)
    first = np.minimum(first, most_per_s / steps_per_s)
    whole = float(first.sum()) + rest
    random = np.random.default_rng(seed)
    ring = Ring(full(range(1, replicas + 1)))
    owners = ring.owners(spread(random.integers(0, 2**32, len(first), dtype=np.uint32)))
    shares = ring.shares()
    even = np.array([shares[number] for number in range(1, replicas + 1)])
    load = np.bincount(owners, first, replicas + 1)[1:] + rest * even
    found = resident(first, rest, sessions, sessions / 10) / whole
    return Skew(
        exponent,
        float(first[0] * steps_per_s),
        float(load.max() * replicas / whole),
        float(even.max() * replicas),
        found,
    )


def resident(first: NDArray[np.float64], rest: float, sessions: int, room: float) -> float:
    """The share of steps that find their state, where `room` of the sessions' states are kept: Che's approximation. The
    time for which an unused state stays is that in which so many different sessions step."""
    others = max(sessions - len(first), 0)
    each = rest / others if others else 0.0

    def held(age: float) -> float:
        return float((1 - np.exp(-first * age)).sum()) + others * float(-np.expm1(-each * age))

    low, high = 0.0, float(sessions)
    while held(high) < room:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) < room else (low, middle)
    return float((first * -np.expm1(-first * high)).sum()) + rest * float(-np.expm1(-each * high))
