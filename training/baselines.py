"""Baselines that rank the next event without a network, from the training split.

- popularity: the events of the training split by their number of occurrences.
- last item: the session's last event again, then popularity.
- Markov: by the number of times that an event followed the session's last event, then popularity.
- V-SkNN: vector multiplication session k nearest neighbours (Ludewig and Jannach 2018, arXiv 1803.09587).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wane.training.sessions import Sessions

NEIGHBOURS = 100
"""k of V-SkNN."""

RECENT = 1000
"""m of V-SkNN: the number of latest sessions with a common event among which the neighbours are chosen."""


class Baseline(Protocol):
    """A method that scores the next event."""

    def scores(self, sessions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        """Returns the scores of all tokens: float64 (sessions, V). sessions: the events of each session so far, at
        least one."""


class Popularity:
    """Counts of the training split."""

    def __init__(self, train: Sessions, size: int) -> None:
        self.counts = np.bincount(train.stream, minlength=size).astype(np.float64)
        self.counts[train.eos_id] = 0

    def scores(self, sessions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        return np.tile(self.counts, (len(sessions), 1))

    def below_one(self) -> NDArray[np.float64]:
        """Returns the counts divided by more than the largest, float64 (V,), to break ties of whole numbers."""
        shares: NDArray[np.float64] = self.counts / (self.counts.max() + 1)
        return shares


class LastItem:
    """The last event, then popularity."""

    def __init__(self, popularity: Popularity) -> None:
        self._popularity = popularity

    def scores(self, sessions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        scores = np.tile(self._popularity.below_one(), (len(sessions), 1))
        scores[np.arange(len(sessions)), [session[-1] for session in sessions]] = 1
        return scores


class Markov:
    """The counts of pairs of neighbours in the sessions of the training split, then popularity."""

    def __init__(self, train: Sessions, popularity: Popularity) -> None:
        size, stream = len(popularity.counts), train.stream
        inside = (stream[:-1] != train.eos_id) & (stream[1:] != train.eos_id)
        pairs, self._counts = np.unique(stream[:-1][inside] * size + stream[1:][inside], return_counts=True)
        self._next = pairs % size
        self._edges = np.searchsorted(pairs, np.arange(size + 1) * size)
        self._popularity = popularity

    def scores(self, sessions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        scores = np.tile(self._popularity.below_one(), (len(sessions), 1))
        for row, session in enumerate(sessions):
            of_last = slice(self._edges[session[-1]], self._edges[session[-1] + 1])
            scores[row, self._next[of_last]] += self._counts[of_last]
        return scores


class Vsknn:
    """V-SkNN with the weights `div` of the authors' program session-rec.

    The i-th of a session's n events has the weight i / n. (The last occurrence counts.) Of the RECENT latest training
    sessions that have a common event, the NEIGHBOURS with the largest sum of the weights of the common events are the
    neighbours; later sessions win ties. Each neighbour adds `similarity / j` to the score of each of its events: j is
    the position, counted from the session's end, of the last event that the neighbour has, too. The similarity is the
    sum of weights, divided by the number of distinct events.
    """

    def __init__(self, train: Sessions, size: int) -> None:
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
        self._size = size

    def scores(self, sessions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        scores = np.zeros((len(sessions), self._size))
        for row, session in enumerate(sessions):
            self._add(scores[row], session)
        return scores

    def _add(self, scores: NDArray[np.float64], session: NDArray[np.int64]) -> None:
        """Adds the neighbours' scores of one session to `scores`, float64 (V,)."""
        last = {int(event): index for index, event in enumerate(session, start=1)}
        found, weights, back = [], [], []
        for event, index in last.items():
            first, end = int(self._event_edges[event]), int(self._event_edges[event + 1])
            some = self._sessions[max(first, end - RECENT) : end]
            found.append(some)
            weights.append(np.full(len(some), index / len(session)))
            back.append(np.full(len(some), len(session) + 1 - index))
        candidates, place = np.unique(np.concatenate(found), return_inverse=True)
        similarity = np.bincount(place, np.concatenate(weights), len(candidates)) / len(last)
        nearest = np.full(len(candidates), len(session) + 1)
        np.minimum.at(nearest, place, np.concatenate(back))
        recent = np.arange(max(0, len(candidates) - RECENT), len(candidates))
        chosen = recent[np.lexsort((-recent, -similarity[recent]))[:NEIGHBOURS]]
        for index in chosen.tolist():
            neighbour = candidates[index]
            events = self._events[self._session_edges[neighbour] : self._session_edges[neighbour + 1]]
            scores[events] += similarity[index] / nearest[index]


def baselines_of(train: Sessions, size: int) -> dict[str, Baseline]:
    """Returns the baselines by name. size: V, the size of the vocabulary."""
    popularity = Popularity(train, size)
    return {
        "popularity": popularity,
        "last item": LastItem(popularity),
        "Markov": Markov(train, popularity),
        "V-SkNN": Vsknn(train, size),
    }
