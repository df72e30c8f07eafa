"""Baselines that rank the next event without a network, from the training split.

- popularity: the events of the training split by their number of occurrences.
- last item: the session's last event first, then the other events by popularity.
- Markov: the events by the number of times that they directly followed the session's last event, then by popularity.
- V-SkNN: vector multiplication session k nearest neighbours (Ludewig and Jannach 2018, arXiv 1803.09587).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wane.training.sessions import Sessions

NEIGHBOURS = 100
"""The number of neighbours in V-SkNN, k in the paper."""

RECENT = 1000
"""V-SkNN chooses the neighbours among this many sessions, m in the paper: the latest training sessions that have an
event in common with the current session."""


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


class Markov:
    """Scores an event by the number of times that it directly followed the session's last event in the training split.
    Events with equal numbers are ordered by popularity."""

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

    The i-th of the current session's n events has the weight i / n. (If an event occurs several times, only its last
    occurrence counts.) The similarity of a training session is the sum of the weights of the events that it has in
    common with the current session, divided by the current session's number of distinct events. The candidates are the
    RECENT latest training sessions that have a common event. The NEIGHBOURS candidates with the largest similarity are
    the neighbours. Of equally similar candidates, the later one is preferred. Each neighbour adds `similarity / j` to
    the score of each of its events. j is the position, counted from the end of the current session, of the last common
    event (1 for the last event).
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
        """Adds to `scores`, float64 (V,), what the neighbours of one session add to each event's score."""
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
