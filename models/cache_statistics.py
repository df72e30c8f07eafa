"""The statistics of a cache (`cache_mixture.py`) at every position of a known text.

Only the probability of the actual next token is needed. Each position therefore has three numbers, which depend on the
text alone: the next token's share in the cache, its share after the last token, and its share after the last two
tokens. All positions are counted in one vectorised pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import CACHE_BINS, CacheModel

TINY = 1e-300
"""Replaces a probability of 0 before its logarithm is computed."""


def weight_rows(pairs: NDArray[np.int64], triples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns row indices of the table of weights: int64, of the arguments' shape. `pairs` are the numbers of earlier
    occurrences of the last token, `triples` those of the last two tokens."""
    rows: NDArray[np.int64] = (len(CACHE_BINS) + 1) * np.searchsorted(
        CACHE_BINS, pairs, side="right"
    ) + np.searchsorted(CACHE_BINS, triples, side="right")
    return rows


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The cache's statistics at n positions of a stream. The next token is the token after the position.

    length: the number of tokens that the cache holds.
    shares: float64 (n, 3). Column 0 is the next token's count in the cache divided by `length`. Column 1 is the next
        token's share among the tokens after earlier occurrences of the last token. Column 2 is the next token's share
        among the tokens after earlier occurrences of the last two tokens.
    rows: int64 (n), the row indices of the table of weights.
    filled: float64 (n), the share of the cache that holds tokens.
    """

    length: int
    shares: NDArray[np.float64]
    rows: NDArray[np.int64]
    filled: NDArray[np.float64]

    def at(self, positions: NDArray[np.int64]) -> CacheStatistics:
        """Returns the statistics at the given positions. `positions` is an index array of any shape."""
        return CacheStatistics(self.length, self.shares[positions], self.rows[positions], self.filled[positions])

    def parts(self, cache: CacheModel) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the network's weight and the probability that the cache adds, float64 (n) each."""
        weights = np.array(cache.weights)[self.rows]
        network = weights[..., 0] + weights[..., 1] * (1 - self.filled)
        return network, (weights[..., 1:] * self.shares).sum(axis=-1)

    def log_probabilities(self, cache: CacheModel, network: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the mixture's log-probability of each token. network: float64 (n), the log-probabilities of the
        network alone."""
        weight, added = self.parts(cache)
        return np.minimum(np.logaddexp(np.log(weight) + network, np.log(np.maximum(added, TINY))), 0.0)


def cache_statistics(
    stream: NDArray[np.int64], length: int, start: int | None = None, *, truncated: bool = False
) -> CacheStatistics:
    """Returns the statistics of a stream of at least two tokens. By default, the first token is the start token, which
    does not enter the cache. If `truncated` is true, the first token is an ordinary token, which enters the cache.

    `start` is a token that begins a new sequence with an empty cache, like `<eos>` for events. If `start` is None, the
    stream is one sequence.
    """
    count = len(stream) - 1
    at = np.arange(count)
    begins = np.zeros(count, np.bool_) if start is None else stream[:-1] == start
    begins[0] |= not truncated
    first = np.maximum.accumulate(np.where(begins, at + 1, 0))
    oldest = np.maximum(first, at - length + 1)
    size = int(stream.max()) + 1
    pairs_of = np.unique(stream[:-1] * size + stream[1:], return_inverse=True)[1]
    triples_of = np.unique(pairs_of[:-1] * size + stream[2:], return_inverse=True)[1]
    ones, twos, threes = Occurrences(stream), Occurrences(pairs_of), Occurrences(triples_of)
    known = at - oldest + 1
    triples_end = np.where(known > 1, at - 2, -1)
    pairs = ones(at, oldest, np.where(known > 0, at - 1, -1))
    triples = twos(at - 1, oldest, triples_end)
    shares = np.zeros((count, 3))
    shares[:, 0] = ones(at + 1, oldest, at) / length
    shares[:, 1] = twos(at, oldest, at - 1) / np.maximum(pairs, 1)
    shares[:, 2] = threes(at - 1, oldest, triples_end) / np.maximum(triples, 1)
    return CacheStatistics(length, shares, weight_rows(pairs, triples), known / length)


class Occurrences:
    """Counts how often a value of an int64 array (n) occurs between two positions of the array."""

    def __init__(self, values: NDArray[np.int64]) -> None:
        self._values, self._count = values, len(values)
        self._ordered = np.sort(values * self._count + np.arange(self._count))

    def __call__(self, like: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns, for each index i, how often the array's value at position `like[i]` occurs from position `first[i]`
        to `last[i]`, inclusive. The result is 0 where `last[i]` is before `first[i]`."""
        if not self._count:
            return np.zeros(len(like), np.int64)
        base = self._values[like] * self._count
        end = np.searchsorted(self._ordered, base + last, side="right")
        found: NDArray[np.int64] = end - np.searchsorted(self._ordered, base + first)
        return np.where(last >= first, found, 0)
