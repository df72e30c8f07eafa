"""Mixes a network's distribution with a cache language model. The cache holds the tokens of the last `length`
positions.

Let N be the cache's length and h_1 .. h_n the last n = min(N, position) tokens, without the start token:

    p(t) = w_0 q(t) + w_1 [count of t] / N + w_2 [share of t after h_n] + w_3 [share of t after h_(n-1), h_n]

q is the network's distribution at temperature 1. The second share counts the tokens after the earlier occurrences of
h_n in the cache. The third share counts only the tokens after the earlier occurrences of the pair h_(n-1), h_n. The
weights depend on the numbers of these occurrences. If n < N, the counts divided by N sum to n / N only. The remaining
weight, w_1 (1 - n / N), is added to w_0, so that the probabilities sum to 1.

Kuhn and De Mori (1990), "A cache-based natural language model for speech recognition"; Grave, Joulin and Usunier
(2017), "Improving neural language models with a continuous cache". The counts are exact and depend on the last N tokens
alone. A window and an uninterrupted run with the same last N tokens therefore add the same probabilities of the cache.

A model of events may also have transition tables (`models/transitions.py`). This distribution is then mixed with
theirs, and "the cache" below means both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_statistics import CacheStatistics, weight_rows
from wane.models.manifest import CacheModel
from wane.models.transitions import OWN, Transitions, recent_events

Tokens = NDArray[np.unsignedinteger[Any]] | NDArray[np.int64]

NEAR = 8
"""`CacheMixture.top` computes the mixture's probability of at least this many tokens of each row: the network's most
probable ones."""


class CacheShares(NamedTuple):
    """The cache's part of the distributions of B rows. V is the size of the vocabulary.

    network: float64 (B), the weight of the network's distribution.
    keys: int64 (F), `row * (V + 1) + token` for each token to which the cache of a row adds a probability, ascending.
    added: float64 (F), these probabilities.
    tokens: int64 (B), the number of tokens in each row's cache.
    """

    network: NDArray[np.float64]
    keys: NDArray[np.int64]
    added: NDArray[np.float64]
    tokens: NDArray[np.int64]

    def at(self, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the probability that the cache adds to the token of each key: float64, of the shape of `keys`."""
        if not len(self.keys):
            return np.zeros(keys.shape)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.added[place], 0.0)

    def part(self, rows: Sequence[int], vocabulary_size: int) -> CacheShares:
        """Returns the part of R rows, given in ascending order."""
        stride, at = vocabulary_size + 1, np.array(rows, np.int64)
        own = self.keys // stride
        place = np.searchsorted(at, own)
        kept = at[np.minimum(place, len(at) - 1)] == own
        keys = self.keys[kept] + (place[kept] - own[kept]) * stride
        return CacheShares(self.network[at], keys, self.added[kept], self.tokens[at])


class TopTokens(NamedTuple):
    """The most probable tokens of B rows, in descending order. Equal probabilities are ordered by ascending id. ids:
    int64 (B, k); probabilities: float64 (B, k)."""

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float64]


class CacheMixture:
    """The mixture of one model's network and cache. Each cache is a ring buffer of N elements: token i of a sequence is
    at index i % N."""

    def __init__(self, cache: CacheModel, vocabulary_size: int, transitions: Transitions | None = None) -> None:
        """transitions: the tables of a cache that has `CacheModel.transitions`."""
        self.transitions = transitions
        self.model = cache
        self.length = cache.length
        self.vocabulary_size = vocabulary_size
        self.empty = vocabulary_size
        """The id that stands for "no token" in a ring buffer."""
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if vocabulary_size < 1 << 16 else np.uint32)
        """The integer type of the ring buffers. It is the smallest possible one, because small types are sorted faster.
        """
        self._weights = np.array(cache.weights, np.float64)
        self._has_counts = bool(self._weights[:, 1].any())
        self.least_network = float(self._weights[:, 0].min()) * (transitions.least_model if transitions else 1.0)
        """The smallest weight of the network."""
        self.most_added = self.length + (transitions.most_added if transitions else 0)
        """The largest number of tokens of one row to which the cache adds a probability."""

    def unknown(self, tokens: int, position: int) -> float:
        """Returns a bound of the total variation between two mixtures, one with a complete cache and one whose cache
        holds only the last `tokens` of the sequence's `position` tokens."""
        return 0.0 if tokens >= min(position, self.length) else 1 - self.least_network

    def ring(self, history: Sequence[int] | Tokens, position: int) -> NDArray[np.unsignedinteger[Any]]:
        """Returns the ring buffer (N) of a sequence of `position` tokens. `history` holds the sequence's last tokens,
        without the start token. Only the last N of them are read."""
        known = np.asarray(history[-self.length :], self.dtype)
        ring = np.full(self.length, self.empty, self.dtype)
        ring[np.arange(position - len(known), position) % self.length] = known
        return ring

    def of(self, history: Sequence[int] | Tokens) -> CacheShares:
        """Returns the cache's part of one distribution. `history` holds the tokens before the predicted one, without
        the start token."""
        return self.shares(self.ring(history, len(history))[None], np.array([(len(history) - 1) % self.length]))

    def shares(self, rings: Tokens, newest: NDArray[np.int64]) -> CacheShares:
        """Returns the cache's part of B distributions.

        rings: (B, N), the ring buffers, with `empty` at indices without a token. newest: int64 (B), the index of the
        last token in each ring buffer.
        """
        batch, length = rings.shape
        every = np.arange(batch)
        stride = self.vocabulary_size + 1
        oldest = (newest + 1) % length
        tokens = np.full(batch, length)
        if rings[every, oldest].max(initial=0) == self.empty:
            tokens = (rings != self.empty).sum(axis=1)
        last, before = rings[every, newest], rings[every, newest - 1]
        place = np.flatnonzero(rings == last[:, None])
        row = place // length
        place -= row * length
        earlier = (place != newest[row]) & (last[row] != self.empty)
        row, place = row[earlier], place[earlier]
        # In a full ring buffer, the element before the oldest token is the newest token, which does not precede it in
        # the sequence.
        is_triple = (rings[row, place - 1] == before[row]) & (place != oldest[row])
        pairs = np.bincount(row, minlength=batch)
        triples = np.bincount(row[is_triple], minlength=batch)
        weights = self._weights[weight_rows(pairs, triples)]
        follows = place + 1
        follows[follows == length] = 0
        added = weights[row, 2] / pairs[row]
        added[is_triple] += (weights[:, 3] / np.maximum(triples, 1))[row[is_triple]]
        network = weights[:, 0] + weights[:, 1] * (1 - tokens / length)
        keys, parts = [row * stride + rings[row, follows]], [added]
        if self._has_counts:
            in_order = np.add(np.sort(rings, axis=1), (every * stride)[:, None]).ravel()
            first = _firsts(in_order)
            counts, in_order = np.diff(first, append=len(in_order)), in_order[first]
            of = in_order // stride
            if tokens.min(initial=length) < length:
                known = in_order - of * stride != self.empty
                counts, in_order, of = counts[known], in_order[known], of[known]
            keys.append(in_order)
            parts.append(counts * (weights[:, 1] / length)[of])
        if self.transitions is not None:
            recent = rings[every[:, None], (newest[:, None] - np.arange(OWN)) % length].astype(np.int64)
            more = self.transitions.added(recent, (recent != self.empty).sum(axis=1))
            network = network * more.model
            parts = [part * more.model[of // stride] for of, part in zip(keys, parts, strict=True)]
            keys.append(more.row * stride + more.event)
            parts.append(more.probability)
        all_keys, all_parts = np.concatenate(keys), np.concatenate(parts)
        order = np.argsort(all_keys, kind="stable")
        all_keys, all_parts = all_keys[order], all_parts[order]
        if len(all_keys):
            first = _firsts(all_keys)
            all_keys, all_parts = all_keys[first], np.add.reduceat(all_parts, first)
        return CacheShares(network, all_keys, all_parts, tokens)

    def score(
        self,
        statistics: CacheStatistics,
        stream: NDArray[np.int64],
        at: NDArray[np.int64],
        first: NDArray[np.int64],
        network: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Returns the mixture's log-probabilities of the tokens after n positions of a stream: float64 (n).

        statistics: those of the stream. at, first: int64 (n), the positions, and those of the first tokens of their
        sequences. network: float64 (n), the network's log-probabilities of the same tokens."""
        mixed = statistics.at(at).log_probabilities(self.model, network)
        if self.transitions is None:
            return mixed
        recent, known = recent_events(stream, at, first, self.empty)
        model, added = self.transitions.parts_of(recent, known, stream[at + 1])
        with np.errstate(divide="ignore"):
            return np.minimum(np.logaddexp(np.log(model) + mixed, np.log(added)), 0.0)

    def network_weights(
        self, statistics: CacheStatistics, stream: NDArray[np.int64], at: NDArray[np.int64], first: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Returns the network's weight in the mixture after n positions of a stream, float64 (n). See `score`."""
        weights, _ = statistics.at(at).parts(self.model)
        if self.transitions is None:
            return weights
        recent, known = recent_events(stream, at, first, self.empty)
        return weights * self.transitions.parts_of(recent, known, stream[at + 1])[0]

    def added(self, found: CacheShares) -> NDArray[np.float64]:
        """Returns the probability that the cache adds to each token: float64 (B, V)."""
        result = np.zeros((len(found.network), self.vocabulary_size + 1))
        result.ravel()[found.keys] = found.added
        return result[:, :-1]

    def log_probabilities(self, logits: NDArray[np.float32], found: CacheShares) -> NDArray[np.float64]:
        """Returns the mixture's log-probabilities at temperature 1 from the network's logits: (B, V) -> float64 (B, V).

        For a token to which the cache adds nothing, the result is the network's log-probability plus the logarithm of
        the network's weight. No probability is therefore rounded to 0.
        """
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        network = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        mixed: NDArray[np.float64] = network + np.log(found.network)[:, None]
        added = self.added(found)
        cached = np.nonzero(added)
        mixed[cached] = np.logaddexp(mixed[cached], np.log(added[cached]))
        return np.minimum(mixed, 0.0)

    def top(
        self,
        logits: NDArray[np.float32],
        log_sum_exp: NDArray[np.float64],
        network_ids: NDArray[np.int64],
        found: CacheShares,
        count: int,
    ) -> TopTokens:
        """Returns the `count` most probable tokens of the mixture without reading every logit. Of the tokens that are
        not among the first max(NEAR, count) of `network_ids`, it considers only those to which the cache adds enough
        probability.

        logits: (B, V).
        log_sum_exp: (B), the log-sum-exp of each row's logits.
        network_ids: (B, K >= count), the tokens with the largest logits in descending order.
        """
        batch, stride = len(logits), self.vocabulary_size + 1
        every = np.arange(batch)
        ids = network_ids[:, : max(NEAR, count)]
        near_keys = ids + (every * stride)[:, None]
        of_network = found.network[:, None] * np.exp(logits[every[:, None], ids] - log_sum_exp[:, None])
        near = of_network + found.at(near_keys)
        least = np.partition(near, near.shape[1] - count, axis=1)[:, near.shape[1] - count]
        # The network's probability of a token that is not in `ids` is at most that of the last token in `ids`.
        needed = least - of_network[:, -1] * (1 + 1e-9)
        row = found.keys // stride
        is_far = found.added >= needed[row]
        if len(found.keys):
            place = np.minimum(np.searchsorted(found.keys, near_keys), len(found.keys) - 1)
            is_far[place[found.keys[place] == near_keys]] = False
        row, others = row[is_far], found.keys[is_far]
        of_others = found.network[row] * np.exp(logits[row, others - row * stride] - log_sum_exp[row])
        of_others += found.added[is_far]
        enough = of_others >= least[row]
        row, others, of_others = row[enough], others[enough], of_others[enough]
        first = np.flatnonzero(near >= least[:, None])
        keys = np.concatenate([near_keys.ravel()[first], others])
        probabilities = np.concatenate([near.ravel()[first], of_others])
        row = np.concatenate([first // near.shape[1], row])
        order = np.lexsort((keys, -probabilities, row))
        starts = np.searchsorted(row[order], every)
        chosen = order[starts[:, None] + np.arange(count)]
        return TopTokens(keys[chosen] - (every * stride)[:, None], np.minimum(probabilities[chosen], 1.0))


def _firsts(keys: NDArray[np.int64]) -> NDArray[np.intp]:
    """Returns the index of the first occurrence of each of the ascending keys, of which there is at least one."""
    return np.concatenate([[0], np.flatnonzero(keys[1:] != keys[:-1]) + 1])
