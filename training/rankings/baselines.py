"""Baselines that rank the next event without a network, from the training split.

- popularity: the events of the training split by their number of occurrences.
- last item: the session's last event first, then the other events by popularity.
- Markov: the events by the number of times that they directly followed the session's last event, then by popularity.
- association rules: the events by the number of times that they are in a session with the last event.
- sequential rules: the events by the number of times that they followed the last event, each divided by the distance.
- item to item: the other events by the same number as association rules, divided by the square roots of both events'
  numbers of occurrences.
- V-SkNN: vector multiplication session k nearest neighbours.
- VMIS-kNN: vector multiplication indexed session k nearest neighbours, with larger weights for rare events.

The rules, item to item and V-SkNN are those of the program session-rec (Ludewig and Jannach 2018, arXiv 1803.09587).
VMIS-kNN is that of the program Serenade (Kersbergen et al., SIGMOD 2022, doi 10.1145/3514221.3517901).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wane.training.sessions import Sessions

REACH = 10
"""Sequential rules count an event up to this distance after another."""

RULES = 20
"""The number of events that association and sequential rules keep for each last event."""

SIMILAR = 100
"""The number of events that item to item keeps for each last event."""

DAMPING = 20.0
"""Item to item adds this to the numbers of occurrences, so that the similarity of rare events is small."""

PAIRS_AT_ONCE = 1 << 24
"""The number of pairs that are counted before they are summed, 256 MiB."""


class Baseline(Protocol):
    """A method that scores each event as the next event of a session."""

    def scores(self, sessions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        """Returns the scores of all tokens for each session: float64 (sessions, V). sessions: the events of each
        session so far, at least one event per session."""


class Popularity:
    """Scores an event by its number of occurrences in the training split."""

    def __init__(self, train: Sessions, size: int) -> None:
        self.counts = np.bincount(train.stream, minlength=size).astype(np.float64)
        self.counts[train.eos_id] = 0

    def scores(self, sessions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        return np.tile(self.counts, (len(sessions), 1))

    def below_one(self) -> NDArray[np.float64]:
        """Returns the counts scaled to less than 1, float64 (V,). Added to scores that are whole numbers, they only
        break ties."""
        shares: NDArray[np.float64] = self.counts / (self.counts.max() + 1)
        return shares


class LastItem:
    """Gives the session's last event the highest score. Scores the other events by popularity."""

    def __init__(self, popularity: Popularity) -> None:
        self._popularity = popularity

    def scores(self, sessions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        scores = np.tile(self._popularity.below_one(), (len(sessions), 1))
        scores[np.arange(len(sessions)), [session[-1] for session in sessions]] = 1
        return scores


class Table:
    """Scores an event by an entry of a sparse matrix, in the row of the session's last event. Popularity orders equal
    entries, and the events without an entry.

    pairs: int64 (n,), row x V + column, ascending. values: float64 (n,), positive. most: the number of entries of each
    row that are kept, the largest; of equal ones, those of the most popular events. None keeps all.
    """

    def __init__(
        self, pairs: NDArray[np.int64], values: NDArray[np.float64], popularity: Popularity, most: int | None = None
    ) -> None:
        size = len(popularity.counts)
        rows, columns, values = pairs // size, pairs % size, values.round(9)  # equal sums are equal numbers
        if most is not None:
            order = np.lexsort((columns, -popularity.counts[columns], -values, rows))
            rows, columns, values = rows[order], columns[order], values[order]
            kept = np.arange(len(rows)) - np.searchsorted(rows, rows) < most
            rows, columns, values = rows[kept], columns[kept], values[kept]
        self._columns, self._values = columns, values
        self._edges = np.searchsorted(rows, np.arange(size + 1))
        gaps = np.diff(np.unique(np.append(values, 0.0)))
        self._below = popularity.below_one() * max(1e-9, gaps.min(initial=1.0))

    def scores(self, sessions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        scores = np.tile(self._below, (len(sessions), 1))
        for row, session in zip(scores, sessions, strict=True):
            self.add_row(row, session[-1], 1.0)
        return scores

    def add_row(self, scores: NDArray[np.float64], event: np.int64, weight: float) -> None:
        """Adds the entries of an event's row, times `weight`, to `scores`, float64 (V,)."""
        entries = slice(self._edges[event], self._edges[event + 1])
        scores[self._columns[entries]] += weight * self._values[entries]


def followers(train: Sessions, size: int, reach: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the pairs of an event and another up to `reach` places after it in a session, as event x V + other,
    ascending, and the sum of 1 / distance over the occurrences of each pair."""
    stream, ends = train.stream, np.cumsum(train.stream == train.eos_id)
    found, weights = [], []
    for distance in range(1, reach + 1):
        first, second = stream[:-distance], stream[distance:]
        inside = (ends[:-distance] == ends[distance:]) & (first != train.eos_id)
        found.append(first[inside] * size + second[inside])
        weights.append(np.full(len(found[-1]), 1 / distance))
    pairs, place = np.unique(np.concatenate(found), return_inverse=True)
    return pairs, np.bincount(place, np.concatenate(weights), len(pairs)).astype(np.float64)


def _companions(train: Sessions, size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the pairs of events of the same session, as event x V + other, ascending, and their numbers: each pair of
    two different places in a session counts once in each direction."""
    stream = train.stream
    events = stream != train.eos_id
    keys, counts = np.unique((np.cumsum(~events)[events] - 1) * size + stream[events], return_counts=True)
    edges = np.flatnonzero(np.diff(keys // size, prepend=-1, append=-1))
    pairs, sums = np.zeros(0, np.int64), np.zeros(0)
    found, numbers, waiting = [pairs], [sums], 0
    for first, end in pairwise(edges.tolist()):
        own, often = keys[first:end] % size, counts[first:end].astype(np.float64)
        together = np.outer(often, often) - np.diag(often)
        kept = together > 0
        found.append((own[:, None] * size + own)[kept])
        numbers.append(together[kept])
        waiting += len(found[-1])
        if waiting > PAIRS_AT_ONCE:
            pairs, sums = _summed(found, numbers)
            found, numbers, waiting = [pairs], [sums], 0
    return _summed(found, numbers)


def _summed(
    pairs: list[NDArray[np.int64]], numbers: list[NDArray[np.float64]]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the different pairs, ascending, and the sum of the numbers of each."""
    every, place = np.unique(np.concatenate(pairs), return_inverse=True)
    return every, np.bincount(place, np.concatenate(numbers), len(every)).astype(np.float64)


class Vsknn:
    """V-SkNN with the weights `div` of the authors' program session-rec.

    The i-th of the current session's n events has the weight i / n. (If an event occurs several times, only its last
    occurrence counts.) The similarity of a training session is the sum of the weights of the events that it has in
    common with the current session, divided by the current session's number of distinct events. The candidates are the
    latest training sessions that have a common event. The neighbours are the candidates with the largest similarity. Of
    equally similar candidates, the later one is preferred. Each neighbour adds `similarity / j` to the score of each of
    its events. j is the position, counted from the end of the current session, of the last common event (1 for the last
    event).

    recent, neighbours: the largest numbers of candidates and of neighbours, m and k in the paper.
    """

    def __init__(self, train: Sessions, size: int, recent: int = 1000, neighbours: int = 100) -> None:
        stream = train.stream
        sessions = np.cumsum(stream == train.eos_id) - 1
        events = stream != train.eos_id
        count = len(train.begins)
        by_event = np.unique(stream[events] * count + sessions[events])
        self._sessions = (by_event % count).astype(np.int64)
        self._event_edges = np.searchsorted(by_event, np.arange(size + 1) * count)
        by_session = np.unique(sessions[events] * size + stream[events])
        self._events = by_session % size
        self._session_edges = np.searchsorted(by_session, np.arange(count + 1) * size)
        self._size, self._recent, self._neighbours = size, recent, neighbours

    def scores(self, sessions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        return np.stack([self._scores_of(session) for session in sessions])

    def _by_age(self, nearest: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the factors of neighbours. nearest: int64 (n,), j in the description of the class."""
        factors: NDArray[np.float64] = 1 / nearest
        return factors

    def _scores_of(self, session: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the scores of all events after one session: float64 (V,)."""
        last = {int(event): index for index, event in enumerate(session, start=1)}
        found, weights, back = [], [], []
        for event, index in last.items():
            first, end = int(self._event_edges[event]), int(self._event_edges[event + 1])
            some = self._sessions[max(first, end - self._recent) : end]
            found.append(some)
            weights.append(np.full(len(some), index / len(session)))
            back.append(np.full(len(some), len(session) + 1 - index))
        candidates, place = np.unique(np.concatenate(found), return_inverse=True)
        similarity = np.bincount(place, np.concatenate(weights), len(candidates)) / len(last)
        similarity = similarity.round(12)  # equal sums are equal numbers
        nearest = np.full(len(candidates), len(session) + 1)
        np.minimum.at(nearest, place, np.concatenate(back))
        recent = np.arange(max(0, len(candidates) - self._recent), len(candidates))
        chosen = recent[np.lexsort((-recent, -similarity[recent]))[: self._neighbours]]
        begins = self._session_edges[candidates[chosen]]
        counts = self._session_edges[candidates[chosen] + 1] - begins
        entries = np.arange(counts.sum()) + np.repeat(begins - np.cumsum(counts) + counts, counts)
        added = np.repeat(similarity[chosen] * self._by_age(nearest[chosen]), counts)
        return np.bincount(self._events[entries], added, self._size).astype(np.float64)


class Vmis(Vsknn):
    """VMIS-kNN: V-SkNN over the last events of the current session alone, where each neighbour adds
    `similarity x (1 - j / 10)`, and the score of an event is multiplied by log(events / occurrences) of the training
    split. Serenade also leaves the session's last event out of its lists. Here the protocol `next_other` does that, for
    every method.

    last: the number of the current session's events that are read, at most 9. The defaults are what Serenade's search
    of parameters found on its example.
    """

    def __init__(self, train: Sessions, size: int, recent: int = 1502, neighbours: int = 288, last: int = 4) -> None:
        super().__init__(train, size, recent, neighbours)
        occurrences = np.bincount(train.stream[train.stream != train.eos_id], minlength=size)
        self._last, self._rarity = last, np.log(max(1, occurrences.sum()) / np.maximum(1, occurrences))

    def scores(self, sessions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        scores = super().scores([session[-self._last :] for session in sessions])
        scores *= self._rarity
        return scores

    def _by_age(self, nearest: NDArray[np.int64]) -> NDArray[np.float64]:
        factors: NDArray[np.float64] = 1 - nearest / 10
        return factors


def baselines_of(train: Sessions, size: int) -> dict[str, Baseline]:
    """Returns the baselines by name. size: V, the size of the vocabulary."""
    popularity = Popularity(train, size)
    together, numbers = _companions(train, size)
    first, second = together // size, together % size
    others = first != second
    norms = np.sqrt(popularity.counts + DAMPING)
    return {
        "popularity": popularity,
        "last item": LastItem(popularity),
        "Markov": Table(*followers(train, size, 1), popularity),
        "association rules": Table(together, numbers, popularity, RULES),
        "sequential rules": Table(*followers(train, size, REACH), popularity, RULES),
        "item to item": Table(
            together[others], (numbers / (norms[first] * norms[second]))[others], popularity, SIMILAR
        ),
        "V-SkNN": Vsknn(train, size),
        "VMIS-kNN": Vmis(train, size),
    }
