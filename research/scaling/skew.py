"""Computes the load of a fleet with hot sessions. The rate of the session with rank r is proportional to r^(-exponent)
(Zipf's law).

The sessions of the first million ranks are placed on the ring one by one. The rates of the remaining sessions, up to
10^8 in all, are so similar that each replica receives a share of their steps equal to its share of the ring. The hit
rate of the LRU state cache is computed by Che's approximation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from research.scaling.ring import Ring, full, spread

PLACED = 1_000_000


@dataclass(frozen=True, slots=True)
class Skew:
    """The load of one fleet with hot sessions. The rate of the session with rank r is proportional to r^(-exponent).

    exponent: the exponent of this formula.
    hottest_per_s: the steps per second of the session with the highest rate.
    busiest: the busiest replica's rate divided by the mean rate of all replicas.
    busiest_even: the same ratio if all sessions had equal rates.
    resident: the share of steps that find their state in memory if the memory has room for a tenth of all states.
    """

    exponent: float
    hottest_per_s: float
    busiest: float
    busiest_even: float
    resident: float

    def document(self) -> dict[str, float]:
        """Returns the results for JSON."""
        return asdict(self)


def weights(sessions: int, exponent: float) -> tuple[NDArray[np.float64], float]:
    """Returns the share of all steps that belongs to each session of the first PLACED ranks, and the share of all other
    sessions together."""
    first = np.arange(1, min(sessions, PLACED) + 1, dtype=np.float64) ** -exponent
    rest = power_sum(len(first) + 0.5, sessions + 0.5, exponent) if sessions > len(first) else 0.0
    total = float(first.sum()) + rest
    return first / total, rest / total


def power_sum(low: float, high: float, exponent: float) -> float:
    """Returns the integral of rank^(-exponent) over the given range of ranks."""
    if exponent == 1.0:
        return float(np.log(high / low))
    return float((high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent))


def skew(
    sessions: int, replicas: int, steps_per_s: float, exponent: float, most_per_s: float = np.inf, seed: int = 0
) -> Skew:
    """Computes the load of one fleet. most_per_s: the highest possible steps per second of one session. This rate is
    limited, because a session's steps run one after another."""
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
    """Returns the share of steps that find their state in a cache of `room` states, by Che's approximation.

    The approximation assumes that an unused state is evicted after a fixed time, in which `room` different sessions
    step on average.
    """
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
