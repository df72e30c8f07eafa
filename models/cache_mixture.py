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
    """The cache's part of the distributions of B rows. Each row has a cache, whose tokens are in a ring buffer of N
    places. V is the size of the vocabulary.

    network: float64 (B), the weight of the network's distribution.
    each: float64 (B), the probability that each occurrence of a token adds.
    keys: integers (B * N), `row * (V + 1) + token` for each place of each ring buffer, ascending. Token V stands for an
        empty place.
    following: int64 (F), the keys of the tokens that follow earlier occurrences of the row's last token, and of those
        to which transition tables add a probability, ascending.
    added: float64 (F), the probability that each entry of `following` adds to its token.
    tokens: int64 (B), the number of tokens in each row's cache.
    """

    network: NDArray[np.float64]
    each: NDArray[np.float64]
    keys: NDArray[np.signedinteger[Any]]
    following: NDArray[np.int64]
    added: NDArray[np.float64]
    tokens: NDArray[np.int64]

    def at(self, keys: NDArray[np.int64], rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """Returns the probability that the cache adds to the token of each key. `rows` is the row of each key. The
        result is float64 and has the shape of `keys`."""
        # If the types differed, searchsorted would convert all of `self.keys`.
        sought = keys.astype(self.keys.dtype, copy=False)
        result = np.zeros(keys.shape)
        if len(self.keys):
            counts = np.searchsorted(self.keys, sought, side="right") - np.searchsorted(self.keys, sought)
            result += counts * self.each[rows]
        if len(self.following):
            place = np.minimum(np.searchsorted(self.following, keys), len(self.following) - 1)
            result += np.where(self.following[place] == keys, self.added[place], 0.0)
        return result


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
        keys: NDArray[Any] = np.empty(0, np.int64)
        if self._has_counts:
            starts = (every * stride).astype(np.int32 if batch * stride < 1 << 31 else np.int64)
            keys = np.add(np.sort(rings, axis=1), starts[:, None]).ravel()
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
        following = row * stride + rings[row, follows]
        network = weights[:, 0] + weights[:, 1] * (1 - tokens / length)
        each = weights[:, 1] / length
        if self.transitions is not None:
            recent = rings[every[:, None], (newest[:, None] - np.arange(OWN)) % length].astype(np.int64)
            more = self.transitions.added(recent, (recent != self.empty).sum(axis=1))
            network, each = network * more.model, each * more.model
            # The counts of single tokens are added here, too, so that `top` sees what each token gets in all.
            of_keys, keys = keys, np.empty(0, np.int64)
            of_keys = of_keys[of_keys % stride != self.empty].astype(np.int64)
            following = np.concatenate([following, more.row * stride + more.event, of_keys])
            added = np.concatenate([added * more.model[row], more.probability, each[of_keys // stride]])
            each = np.zeros(batch)
        order = np.argsort(following, kind="stable")
        following, added = following[order], added[order]
        if len(following):
            first = np.concatenate([[0], np.flatnonzero(following[1:] != following[:-1]) + 1])
            following, added = following[first], np.add.reduceat(added, first)
        return CacheShares(network, each, keys, following, added, tokens)

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
        batch, stride = len(found.network), self.vocabulary_size + 1
        result = np.zeros((batch, stride))
        if len(found.keys):
            result += np.bincount(found.keys, minlength=batch * stride).reshape(batch, stride) * found.each[:, None]
        result.ravel()[found.following] += found.added
        return result[:, :-1]

    def added_to(self, found: CacheShares, row: int) -> NDArray[np.float64]:
        """Like `added`, for one row: float64 (V)."""
        stride, places = self.vocabulary_size + 1, slice(row * self.length, (row + 1) * self.length)
        result = np.zeros(stride)
        if len(found.keys):
            result += np.bincount(found.keys[places] - row * stride, minlength=stride) * found.each[row]
        ends = np.searchsorted(found.following, [row * stride, (row + 1) * stride])
        following = slice(int(ends[0]), int(ends[1]))
        result[found.following[following] - row * stride] += found.added[following]
        return result[:-1]

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
        near = of_network + found.at(near_keys, every[:, None])
        least = np.partition(near, near.shape[1] - count, axis=1)[:, near.shape[1] - count]
        # The network's probability of a token that is not in `ids` is at most that of the last token in `ids`.
        needed = least - of_network[:, -1] * (1 + 1e-9)
        others = self._that_add(found, needed)
        row = others // stride
        far = (ids[row] != (others - row * stride)[:, None]).all(axis=1)
        row, others = row[far], others[far]
        of_others = found.network[row] * np.exp(logits[row, others - row * stride] - log_sum_exp[row])
        of_others += found.at(others, row)
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

    def _that_add(self, found: CacheShares, needed: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns ascending keys. They include the key of every token to which the cache adds at least the probability
        `needed` of the token's row. needed: float64 (B)."""
        of = found.following // (self.vocabulary_size + 1)
        most = found.each * self.length  # all that the counts of single tokens can add
        following = found.following[found.added + most[of] >= needed[of]]
        rows = np.flatnonzero(most >= needed)
        if not len(rows) or not len(found.keys):
            return following
        keys = found.keys.reshape(-1, self.length)[rows].ravel()
        starts = np.concatenate([[0], np.flatnonzero(keys[1:] != keys[:-1]) + 1])
        counts, keys = np.diff(starts, append=len(keys)), keys[starts]
        row = keys // (self.vocabulary_size + 1)
        often = (counts * found.each[row] >= needed[row]) & (keys % (self.vocabulary_size + 1) != self.empty)
        return np.unique(np.concatenate([keys[often], following])) if often.any() else following
