"""The oracle of the cache mixture. It implements the definition in `models/cache_mixture.py` directly and counts by
brute force."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import CacheModel


def mixture(cache: CacheModel, network: NDArray[np.float64], history: Sequence[int]) -> NDArray[np.float64]:
    """Returns the mixture's distribution (V) from the network's distribution (V) and the preceding tokens, without the
    start token."""
    known = list(history)[-cache.length :]
    after_last = [known[i + 1] for i in range(len(known) - 1) if known[i] == known[-1]]
    after_two = [known[i + 1] for i in range(1, len(known) - 1) if known[i - 1 : i + 1] == known[-2:]]
    weights = cache.weights[6 * _bin(len(after_last)) + _bin(len(after_two))]
    result = (weights[0] + weights[1] * (1 - len(known) / cache.length)) * network
    for token in known:
        result[token] += weights[1] / cache.length
    for token in after_last:
        result[token] += weights[2] / len(after_last)
    for token in after_two:
        result[token] += weights[3] / len(after_two)
    return result


def _bin(count: int) -> int:
    """Returns the bin of a number of occurrences. The bins are 0, 1, 2, 3 to 4, 5 to 8, and 9 and more."""
    for index, least in enumerate((9, 5, 3, 2, 1)):
        if count >= least:
            return 5 - index
    return 0
