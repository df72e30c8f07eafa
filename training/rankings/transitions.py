"""Counts the transition tables of a training split, and fits the weights of their mixture with a model.

`models/transitions.py` defines the tables and the mixture. The weights are fitted to the validation split by
expectation maximisation, which also chooses one of BACKWARDS. A table keeps the KEPT largest entries of each event's
row."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from wane.models.layer_registry import Frozen
from wane.models.transitions import LENGTHS, PARTS, REACH, Table, Transitions, Weights, recent_events
from wane.training.rankings.baselines import followers
from wane.training.sessions import Sessions

KEPT = 50
BACKWARDS = (1.0, 0.2)
"""The weights that are tried of an event before another in the counts of what was near it. Visits to a shop have no
direction, but what people bought over years has one."""

ITERATIONS = 60
PRIOR = 0.1
"""The number of pseudo-positions that are added to the positions of each length and part."""


class TransitionWeights(Frozen):
    """The fitted weights of the mixture with a model, and of the one with popularity in the model's place (`alone`).
    `backwards`: see `Counts`."""

    with_model: Weights
    alone: Weights
    backwards: float = 1.0


class Counts:
    """The tables of a training split, without weights. size: V, the size of the vocabulary. backwards: what an
    event before another counts in its row of `near`, relative to one after it; more than 0."""

    def __init__(self, train: Sessions, size: int, backwards: float = 1.0) -> None:
        self.size = size
        pairs, sums = followers(train, size, REACH)
        back = pairs % size * size + pairs // size
        both, place = np.unique(np.concatenate([pairs, back]), return_inverse=True)
        self._following = _table(*followers(train, size, 1), size)
        near = np.bincount(place, np.concatenate([sums, backwards * sums]), len(both)).astype(np.float64)
        self._near = _table(both, near, size)
        occurrences = np.bincount(train.stream, minlength=size).astype(np.float64) + 1
        occurrences[train.eos_id] = 1
        self._popular = np.log(occurrences / occurrences.sum())

    def weighted(self, weights: Weights) -> Transitions:
        """Returns the tables with the weights of their mixture."""
        return Transitions(weights, self._following, self._near)

    def popular(self, count: int) -> NDArray[np.float64]:
        """Returns the logarithms of the events' shares of the training split, with 1 added to each count: float64
        (count, V)."""
        return np.tile(self._popular, (count, 1))

    def parts(
        self, sessions: list[NDArray[np.int64]], model: NDArray[np.float64], targets: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Returns the probability of the next event by each of PARTS, float64 (n, PARTS), with the model's in place of
        a part without entries. sessions: the events of each session so far. model: float64 (n), the model's probability
        of the next event. targets: int64 (n), the next events."""
        recent, found = recent_of(sessions, self.size), [model]
        for part in np.eye(len(PARTS))[1:]:
            left, added = self.weighted((tuple(part.tolist()),) * LENGTHS).parts_of(*recent, targets)
            found.append(np.where(left > 0, model, added))
        return np.stack(found, 1)


def _table(pairs: NDArray[np.int64], values: NDArray[np.float64], size: int) -> Table:
    """Returns the KEPT largest entries of each row. pairs: int64 (n,), row x V + column, ascending."""
    rows, columns = pairs // size, pairs % size
    order = np.lexsort((columns, -values, rows))
    kept = np.sort(order[np.arange(len(rows)) - np.searchsorted(rows, rows) < KEPT])
    rows, columns, values = rows[kept], columns[kept], values[kept]
    return Table(np.searchsorted(rows, np.arange(size + 1)), columns, values.astype(np.float32))


def recent_of(sessions: Sequence[NDArray[np.int64]], empty: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns `recent_events` of sessions' events so far."""
    lengths = np.array([len(session) for session in sessions], np.int64)
    ends = np.cumsum(lengths)
    return recent_events(np.concatenate([*sessions, np.zeros(1, np.int64)]), ends - 1, ends - lengths, empty)


def mixed(tables: Transitions, sessions: list[NDArray[np.int64]], model: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the logarithms of the probabilities of a mixture with tables: float64 (n, V). model: float64 (n, V), the
    log-probabilities of the model."""
    more = tables.added(*recent_of(sessions, model.shape[1]))
    total = more.model[:, None] * np.exp(model)
    np.add.at(total, (more.row, more.event), more.probability)
    with np.errstate(divide="ignore"):
        return np.log(total, out=total)


def lengths_of(sessions: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns the row of the weights of each session."""
    return np.array([min(len(session), LENGTHS) - 1 for session in sessions], np.int64)


def fit(parts: NDArray[np.float64], rows: NDArray[np.int64], used: Collection[str] = PARTS) -> tuple[Weights, float]:
    """Returns the weights under which the next events have the largest likelihood, and the mean of their -log p in
    nats. parts: float64 (n, PARTS), the probability of the next event by each part, with the model's in place of a part
    without counts. rows: int64 (n,), `lengths_of` the sessions. used: the parts whose weight may be more than 0."""
    parts = np.maximum(parts, 1e-12)
    allowed = np.array([part in used for part in PARTS], np.float64)
    table: list[tuple[float, float, float, float, float]] = []
    for row in range(LENGTHS):
        own, weights = parts[rows == row], allowed / allowed.sum()
        for _ in range(ITERATIONS):
            shares = own * weights
            shares /= shares.sum(1, keepdims=True)
            weights = (shares.sum(0) + PRIOR * allowed) / (len(own) + PRIOR * allowed.sum())
        first, second, third, fourth, fifth = (round(float(weight), 6) for weight in weights)
        table.append((first, second, third, fourth, fifth))
    return tuple(table), float(-np.log((parts * np.array(table)[rows]).sum(1)).mean())
