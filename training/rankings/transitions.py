"""A mixture of a model with transition tables: an offline study, which no bundle has and no server answers with.

The tables are counts of the training split. With x_1 .. x_t, the session's events so far,

    p(y) = w_0 model(y) + w_1 next(y | x_t) + w_2 near(y | x_t) + w_3 sum_i near(y | x_(t-i)) / i + w_4 own(y)

- next(y | x): the share of y among the events that directly followed x.
- near(y | x): the share of y among the events within REACH places of x, before or after it, each by 1 / distance.
- The sum is over the LAGS events before the last one, and normalised.
- own(y): the session's last OWN events, each weighted by 1 / its age.

A part without counts leaves its weight to the model. The weights depend on the number of events, up to LENGTHS, and are
fitted to the validation split by expectation maximisation. The mixture reads nothing but the session's last events. So
like a cache it changes neither a bound nor a proof of the network's state.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from wane.models.layer_registry import Frozen
from wane.training.rankings.baselines import Popularity, Table, followers
from wane.training.sessions import Sessions

REACH = 10
LAGS = 8
OWN = 20
LENGTHS = 4
PARTS = ("model", "next", "near", "before", "own")
ITERATIONS = 60
PRIOR = 0.1
"""The number of pseudo-positions that are added to the positions of each length and part."""


Weights = tuple[tuple[float, float, float, float, float], ...]
"""The weights of PARTS for sessions of 1, 2, .. LENGTHS or more events."""


class TransitionWeights(Frozen):
    """The fitted weights of the mixture with a model, and of the one with popularity in the model's place (`alone`)."""

    with_model: Weights
    alone: Weights


class Transitions:
    """The tables of a training split. size: V, the size of the vocabulary."""

    def __init__(self, train: Sessions, size: int) -> None:
        popularity = Popularity(train, size)
        pairs, sums = followers(train, size, REACH)
        back = pairs % size * size + pairs // size
        both, place = np.unique(np.concatenate([pairs, back]), return_inverse=True)
        near = np.bincount(place, np.concatenate([sums, sums]), len(both)).astype(np.float64)
        self._size = size
        self._next = Table(*followers(train, size, 1), popularity)
        self._near = Table(both, near, popularity)
        self._popular = np.log((popularity.counts + 1) / (popularity.counts + 1).sum())

    def popular(self, count: int) -> NDArray[np.float64]:
        """Returns the logarithms of the events' shares of the training split, with 1 added to each count: float64
        (count, V)."""
        return np.tile(self._popular, (count, 1))

    def shares(self, sessions: list[NDArray[np.int64]], part: str) -> NDArray[np.float64]:
        """Returns the distribution of one of PARTS but the model, or zeros where it has no counts: float64 (sessions,
        V). sessions: the events of each session so far."""
        found = np.zeros((len(sessions), self._size))
        for row, session in zip(found, sessions, strict=True):
            if part == "next":
                self._next.add_row(row, session[-1], 1.0)
            elif part == "near":
                self._near.add_row(row, session[-1], 1.0)
            elif part == "before":
                for lag, event in enumerate(session[-2 : -2 - LAGS : -1], start=1):
                    self._near.add_row(row, event, 1 / lag)
            else:
                recent = session[-OWN:]
                np.add.at(row, recent, 1 / np.arange(len(recent), 0, -1))
        totals = found.sum(1, keepdims=True)
        found /= np.where(totals > 0, totals, 1.0)
        return found


def mixed(
    tables: Transitions, weights: Weights, sessions: list[NDArray[np.int64]], model: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the logarithms of the mixture's probabilities: float64 (n, V). model: float64 (n, V), the
    log-probabilities of the model."""
    shares_of = np.array(weights)[lengths_of(sessions)]
    left, total = shares_of[:, 0].copy(), np.zeros(model.shape)
    for column, part in enumerate(PARTS[1:], start=1):
        shares = tables.shares(sessions, part)
        empty = ~shares.any(1)
        left[empty] += shares_of[empty, column]
        shares *= shares_of[:, column, None]
        total += shares
    total += left[:, None] * np.exp(model)
    with np.errstate(divide="ignore"):
        return np.log(total, out=total)


def lengths_of(sessions: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns the row of the weights of each session."""
    return np.array([min(len(session), LENGTHS) - 1 for session in sessions], np.int64)


def fit(parts: NDArray[np.float64], rows: NDArray[np.int64], used: Collection[str] = PARTS) -> Weights:
    """Returns the weights under which the next events have the largest likelihood. parts: float64 (n, PARTS), the
    probability of the next event by each part, with the model's in place of a part without counts. rows: int64 (n,),
    `lengths_of` the sessions. used: the parts whose weight may be more than 0."""
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
    return tuple(table)
