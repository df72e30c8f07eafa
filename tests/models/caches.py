"""Random caches and transition tables for tests, and a simple implementation of the mixture with the tables."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import CACHE_BINS, CacheModel
from wane.models.transitions import LAGS, LENGTHS, OWN, Table, Transitions

BINS = len(CACHE_BINS) + 1


def random_cache(random: Random, length: int) -> CacheModel:
    """Returns a cache of the last `length` tokens, with random weights."""
    return CacheModel(length=length, weights=tuple(_weights(random, row) for row in range(BINS**2)))


def _weights(random: Random, row: int) -> tuple[float, float, float, float]:
    one, two, three = random.random(), random.random() * (row >= BINS), random.random() * (row % BINS > 0)
    total = one + two + three + 0.1 + random.random()
    return 1 - (one + two + three) / total, one / total, two / total, three / total


class RandomTables:
    """Random transition tables of a vocabulary of `size` events. About a third of the rows are empty."""

    def __init__(self, random: Random, size: int) -> None:
        self.size = size
        self.following, self.near = self._random(random), self._random(random)
        self.weights = tuple(_shares(random) for _ in range(LENGTHS))
        self.transitions = Transitions(self.weights, _table(self.following, size), _table(self.near, size))

    def _random(self, random: Random) -> dict[tuple[int, int], float]:
        rows = [row for row in range(self.size) if random.random() < 0.7]
        pairs = {(row, random.randrange(self.size)) for row in rows for _ in range(4)}
        return {pair: random.randrange(1, 9) / 2 for pair in sorted(pairs)}

    def mixed(self, model: NDArray[np.float64], history: Sequence[int]) -> NDArray[np.float64]:
        """Returns the mixture's distribution, as the docstring of `models/transitions.py` defines it. model: (V), the
        distribution of network and cache. history: the session's known events."""
        if not len(history):
            return model
        parts = [np.zeros(self.size) for _ in range(4)]
        for event in range(self.size):
            parts[0][event] = self.following.get((history[-1], event), 0)
            parts[1][event] = self.near.get((history[-1], event), 0)
            for lag, earlier in enumerate(list(history)[-2 : -2 - LAGS : -1], start=1):
                parts[2][event] += self.near.get((earlier, event), 0) / lag
        for age, event in enumerate(list(history)[: -1 - OWN : -1], start=1):
            parts[3][event] += 1 / age
        of_model, *weights = self.weights[min(len(history), LENGTHS) - 1]
        total = np.zeros(self.size)
        for weight, part in zip(weights, parts, strict=True):
            if part.any():
                total += weight * part / part.sum()
            else:
                of_model += weight
        return total + of_model * model


def _table(counts: dict[tuple[int, int], float], size: int) -> Table:
    rows = np.array([row for row, _ in counts], np.int64)
    events = np.array([event for _, event in counts], np.int64)
    return Table(np.searchsorted(rows, np.arange(size + 1)), events, np.array([*counts.values()], np.float32))


def _shares(random: Random) -> tuple[float, float, float, float, float]:
    a, b, c, d, e = (0.1 + random.random() for _ in range(5))
    total = a + b + c + d + e
    return a / total, b / total, c / total, d / total, e / total
