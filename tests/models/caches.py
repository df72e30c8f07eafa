"""Random caches for tests."""

from __future__ import annotations

from random import Random

from wane.models.manifest import CACHE_BINS, CacheModel

BINS = len(CACHE_BINS) + 1


def random_cache(random: Random, length: int) -> CacheModel:
    """Returns a cache of the last `length` tokens, with random weights."""
    return CacheModel(length=length, weights=tuple(_weights(random, row) for row in range(BINS**2)))


def _weights(random: Random, row: int) -> tuple[float, float, float, float]:
    one, two, three = random.random(), random.random() * (row >= BINS), random.random() * (row % BINS > 0)
    total = one + two + three + 0.1 + random.random()
    return 1 - (one + two + three) / total, one / total, two / total, three / total
