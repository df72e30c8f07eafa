"""Mixes a network's distribution with a cache language model: the tokens of the last `length` positions.

With h_1 .. h_n the last n = min(N, position) tokens, without the start token, and N the cache's length:

    p(t) = w_0 q(t) + w_1 [count of t] / N + w_2 [share of t after h_n] + w_3 [share of t after h_(n-1), h_n]

q is the network's distribution at temperature 1. The second share is over the earlier occurrences of h_n in the cache,
the third over those that follow h_(n-1). The weights depend on how many such occurrences there are. Where n < N, the
network receives the rest of w_1, so that the sum stays 1.

Kuhn and De Mori (1990), "A cache-based natural language model for speech recognition"; Grave, Joulin and Usunier
(2017), "Improving neural language models with a continuous cache". The mixture's counts are exact and depend on the
last N tokens alone: a window and a never-interrupted run that know these N tokens add the same to their networks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import CACHE_BINS, CacheModel

Tokens = NDArray[np.int64] | NDArray[np.uint32]


class CacheShares(NamedTuple):
    """The mixture's parts that do not depend on the network, for B rows.

    network: float64 (B), the weight of the network's distribution. keys: int64 (U), `row * V + token` of every token in
    a row's cache, ascending. shares: float64 (U), what the cache adds to the probability of each key. tokens: int64
    (B), the number of tokens in each row's cache.
    """

    network: NDArray[np.float64]
    keys: NDArray[np.int64]
    shares: NDArray[np.float64]
    tokens: NDArray[np.int64]


class TopTokens(NamedTuple):
    """The most probable tokens of B rows, in falling order, the smaller id first among equals: ids int64 and
    probabilities float64, both (B, k)."""

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float64]


def weight_rows(pairs: NDArray[np.int64], triples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the row of the weights' table for each number of occurrences of the last token (`pairs`) and of the last
    two tokens (`triples`): int64, of the same shape."""
    rows: NDArray[np.int64] = (len(CACHE_BINS) + 1) * np.searchsorted(
        CACHE_BINS, pairs, side="right"
    ) + np.searchsorted(CACHE_BINS, triples, side="right")
    return rows


class CacheMixture:
    """The mixture of one model."""

    def __init__(self, cache: CacheModel, vocabulary_size: int) -> None:
        self.length = cache.length
        self.vocabulary_size = vocabulary_size
        self.empty = vocabulary_size
        """The id of a place in a ring that holds no token."""
        self._weights = np.array(cache.weights, np.float64)
        self.least_network = float(self._weights[:, 0].min())
        """The smallest weight of the network, over all histories."""
        self.largest_network = 1.0 if self.length else 0.0
        """The largest weight of the network: that of an empty cache."""

    def ring(self, history: Tokens) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns one row for `shares` from the tokens before the prediction: rings int64 (1, N) and newest (1)."""
        known = history[-self.length :]
        ring = np.full((1, self.length), self.empty, np.int64)
        ring[0, : len(known)] = known
        return ring, np.array([len(known) - 1])

    def shares(self, rings: Tokens, newest: NDArray[np.int64]) -> CacheShares:
        """Returns the cache's part of B distributions.

        rings: (B, N), the tokens of each row's cache in a ring, `empty` where there is none; newest: int64 (B), the
        place of the last token. Places are filled from 0.
        """
        batch, length = rings.shape
        every = np.arange(batch)
        last, before = rings[every, newest], rings[every, newest - 1]
        match = rings == last[:, None]
        match[every, newest] = False
        match[last == self.empty] = False
        row, place = np.nonzero(match)
        follows = place + 1
        follows[follows == length] = 0
        oldest = (newest + 1) % length  # of a full ring; else a place that is empty and never matches
        is_triple = (rings[row, place - 1] == before[row]) & (place != oldest[row])
        pairs = np.bincount(row, minlength=batch)
        triples = np.bincount(row[is_triple], minlength=batch)
        weights = self._weights[weight_rows(pairs, triples)]
        keys, counts, tokens = self._counted(rings)
        shares = counts * (weights[keys // self.vocabulary_size, 1] / length)
        if len(row):
            added = weights[row, 2] / pairs[row]
            added[is_triple] += (weights[:, 3] / np.maximum(triples, 1))[row[is_triple]]
            found = np.searchsorted(keys, row * self.vocabulary_size + rings[row, follows])
            shares += np.bincount(found, added, len(keys))
        network = weights[:, 0] + weights[:, 1] * (1 - tokens / length)
        return CacheShares(network, keys, shares, tokens)

    def _counted(self, rings: Tokens) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns the different tokens of each row as keys, how often each occurs, and the tokens of each row."""
        batch, size = len(rings), self.vocabulary_size
        ordered = np.sort(rings, axis=1).astype(np.int64)
        tokens = np.full(batch, rings.shape[1], np.int64)
        keys = (ordered + (np.arange(batch, dtype=np.int64) * size)[:, None]).ravel()
        if (ordered[:, -1] == self.empty).any():
            filled = ordered != self.empty
            tokens = filled.sum(axis=1)
            keys = keys[filled.ravel()]
        first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.zeros(0, np.int64)
        return keys[first], np.diff(first, append=len(keys)), tokens

    def log_probabilities(self, logits: NDArray[np.float32], found: CacheShares) -> NDArray[np.float64]:
        """Returns the mixture's log-probabilities at temperature 1 from the network's logits: (B, V) -> float64 (B, V).

        Where the cache adds nothing, they are the network's plus the logarithm of its weight, so that no probability is
        rounded to 0.
        """
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        network = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        mixed: NDArray[np.float64] = network + np.log(found.network)[:, None]
        flat = mixed.ravel()
        flat[found.keys] = np.logaddexp(flat[found.keys], np.log(np.maximum(found.shares, 1e-300)))
        return np.minimum(mixed, 0.0)

    def top(
        self,
        logits: NDArray[np.float32],
        log_sum_exp: NDArray[np.float64],
        network_ids: NDArray[np.int64],
        found: CacheShares,
        count: int,
    ) -> TopTokens:
        """Returns the `count` most probable tokens of the mixture without reading every logit.

        logits: (B, V); log_sum_exp: (B), of them; network_ids: (B, K >= count), the tokens with the largest logits in
        falling order. A token outside of the cache is among the mixture's first `count` only if it is among the
        network's.
        """
        batch, size = logits.shape
        every = np.arange(batch)[:, None]
        row = found.keys // size
        cached = found.network[row] * np.exp(logits.ravel()[found.keys] - log_sum_exp[row]) + found.shares
        ids = network_ids[:, :count]
        of_network = found.network[:, None] * np.exp(logits[every, ids] - log_sum_exp[:, None])
        wanted = every * size + ids
        if len(cached):
            place = np.minimum(np.searchsorted(found.keys, wanted), len(cached) - 1)
            in_cache = found.keys[place] == wanted
            least = np.where(in_cache, cached[place], of_network).min(axis=1)
        else:
            in_cache, least = np.zeros(wanted.shape, np.bool_), of_network.min(axis=1)
        near = np.flatnonzero(cached >= least[row])
        keys = np.concatenate([found.keys[near], wanted[~in_cache]])
        probabilities = np.concatenate([cached[near], of_network[~in_cache]])
        order = np.lexsort((keys, -probabilities, keys // size))
        keys, probabilities = keys[order], probabilities[order]
        starts = np.searchsorted(keys // size, np.arange(batch))
        first = starts[:, None] + np.arange(count)
        return TopTokens(keys[first] % size, np.minimum(probabilities[first], 1.0))
