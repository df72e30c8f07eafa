"""Transition tables of a model of events: what followed an event in the sessions of the training split, and what was
near it. `CacheMixture` mixes them with the network and the cache.

With x_1 .. x_t, the session's events so far, and m(y), the mixture of network and cache,

    p(y) = w_0 m(y) + w_1 next(y | x_t) + w_2 near(y | x_t) + w_3 sum_i near(y | x_(t-i)) / i + w_4 own(y)

- next(y | x): the number of times that y directly followed x, divided by the sum of the row of x.
- near(y | x): the same of the events within REACH places of x, before or after it, each by 1 / distance. The events
  before it may count less (`training/rankings/transitions.py`).
- The sum is over the LAGS events before the last one, and normalised.
- own(y): the session's last OWN events, each weighted by 1 / its age, and normalised.

A part without entries leaves its weight to m. The weights depend on the number of events, up to LENGTHS. The tables
read nothing but the session's last OWN events. So like the cache they change neither a bound nor a proof of the
network's state, and a window with these events adds the same probabilities as an uninterrupted run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LAGS, OWN, LENGTHS = 8, 20, 4
REACH = 10
PARTS = ("model", "next", "near", "before", "own")
TENSORS = ("next.edges", "next.events", "next.counts", "near.edges", "near.events", "near.counts")
MOST_ENTRIES = 200
"""The largest number of entries in the row of an event."""

Weights = tuple[tuple[float, float, float, float, float], ...]
"""The weights of PARTS for sessions of 1, 2, .. LENGTHS or more events."""


class TransitionsError(Exception):
    """The tensors are no transition tables. The message says why."""


class Added(NamedTuple):
    """What the tables add to the distributions of B rows, in any order. model: float64 (B), the weight of the mixture
    of network and cache. row: int64 (n); event: int64 (n); probability: float64 (n). An event may occur several times
    in a row; its probabilities then add up."""

    model: NDArray[np.float64]
    row: NDArray[np.int64]
    event: NDArray[np.int64]
    probability: NDArray[np.float64]


def recent_events(
    stream: NDArray[np.int64], at: NDArray[np.int64], first: NDArray[np.int64], empty: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the last OWN events of a session after each of B positions of a stream, the latest first, int64 (B, OWN),
    and their numbers, int64 (B). at, first: int64 (B), the positions, and those of the sessions' first events. empty:
    the id that stands for no event."""
    places = at[:, None] - np.arange(OWN)
    inside = places >= first[:, None]
    return np.where(inside, stream[np.maximum(places, 0)], empty), inside.sum(1)


class Table:
    """A sparse matrix of counts (V, V). edges: int64 (V + 1), where each row begins in `events` and `counts`; the row
    of the id V, which stands for no event, is empty. Within a row, the events ascend."""

    def __init__(
        self, edges: NDArray[np.integer[Any]], events: NDArray[np.integer[Any]], counts: NDArray[np.floating[Any]]
    ) -> None:
        self.edges = np.append(edges, edges[-1]).astype(np.int64)
        self.events = events.astype(np.int64)
        self.counts = counts.astype(np.float64)
        self._size = len(self.edges) - 1
        rows = np.repeat(np.arange(self._size), np.diff(self.edges))
        self.sums = np.bincount(rows, self.counts, self._size)
        self._keys = rows * self._size + self.events
        self.longest = int(np.diff(self.edges).max(initial=0))
        """The number of entries in the longest row."""

    def entries(self, event: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the entries of the rows of n events: for each entry, the index of its row among the n, and the
        entry's index."""
        first, count = self.edges[event], self.edges[event + 1] - self.edges[event]
        of = np.repeat(np.arange(len(event)), count)
        before = np.cumsum(count) - count
        return of, np.arange(len(of)) + (first - before)[of]

    def count_of(self, event: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the table's count of each pair of events, float64, of the arguments' shape. The count of a pair
        without an entry is 0."""
        if not len(self._keys):
            return np.zeros(event.shape)
        keys = event * self._size + other
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[place] == keys, self.counts[place], 0.0)


class Transitions:
    """The tables of a model of V events, and their weights."""

    def __init__(self, weights: Weights, following: Table, near: Table) -> None:
        self.weights = np.array(weights, np.float64)
        self.following, self.near = following, near

    @property
    def most_added(self) -> int:
        """The largest number of events of one session to which the tables add a probability."""
        return self.following.longest + (1 + LAGS) * self.near.longest + OWN

    @property
    def least_model(self) -> float:
        """The smallest weight of the mixture of network and cache."""
        return float(self.weights[:, 0].min())

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Returns the tensors of the file, which `read` reads."""
        tables = ("next", self.following), ("near", self.near)
        return {
            f"{name}.{field}": values
            for name, table in tables
            for field, values in (
                ("edges", table.edges[:-1].astype(np.uint32)),
                ("events", table.events.astype(np.uint32)),
                ("counts", table.counts.astype(np.float32)),
            )
        }

    @classmethod
    def read(cls, weights: Weights, tensors: Mapping[str, NDArray[Any]], size: int) -> Transitions:
        """Checks the tensors of a file for a vocabulary of `size` events. Raises TransitionsError."""
        if sorted(tensors) != sorted(TENSORS):
            raise TransitionsError(
                f"the tensors are {', '.join(sorted(tensors))}, expected {', '.join(sorted(TENSORS))}"
            )
        tables = []
        for name in ("next", "near"):
            edges, events, counts = (tensors[f"{name}.{field}"] for field in ("edges", "events", "counts"))
            for field, values, dtype in (
                ("edges", edges, "uint32"),
                ("events", events, "uint32"),
                ("counts", counts, "float32"),
            ):
                if values.dtype != dtype or values.ndim != 1:
                    raise TransitionsError(
                        f"{name}.{field} is {values.dtype} {list(values.shape)}, expected {dtype} in one dimension"
                    )
            steps = np.diff(edges.astype(np.int64))
            if len(edges) != size + 1 or edges[0] != 0 or edges[-1] != len(events) or (steps < 0).any():
                raise TransitionsError(f"{name}.edges does not cut {len(events)} entries into {size} rows")
            if steps.max(initial=0) > MOST_ENTRIES:
                raise TransitionsError(f"{name} has a row of {steps.max()} entries, at most {MOST_ENTRIES} are allowed")
            if len(counts) != len(events):
                raise TransitionsError(f"{name}.counts has {len(counts)} entries, {name}.events {len(events)}")
            inside = np.ones(len(events), np.bool_)
            inside[edges[:-1][steps > 0]] = False  # the first entry of a row has none before it
            before = np.concatenate([[-1], events.astype(np.int64)])[:-1]
            if len(events) and (events.max() >= size or (inside & (events <= before)).any()):
                raise TransitionsError(f"{name}.events is not ascending within each row and below {size}")
            if not (np.isfinite(counts).all() and (counts > 0).all()):
                raise TransitionsError(f"{name}.counts has an entry that is not a positive number")
            tables.append(Table(edges, events, counts))
        return cls(weights, *tables)

    def _coefficients(
        self, recent: NDArray[np.int64], known: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Returns the weight of the mixture of network and cache, (B); the factors of the counts of the last event's
        row of `following`, (B), and of the last 1 + LAGS events' rows of `near`, (B, 1 + LAGS); and the probabilities
        that the last OWN events add to themselves, (B, OWN). recent: (B, OWN), the last events, the latest first, and V
        where there is none. known: (B), the number of events, at most OWN."""
        batch = len(recent)
        weights = self.weights[np.clip(known, 1, LENGTHS) - 1]
        by_lag = 1 / np.arange(1, LAGS + 1)
        sums = np.empty((batch, 3))
        sums[:, 0], sums[:, 1] = self.following.sums[recent[:, 0]], self.near.sums[recent[:, 0]]
        sums[:, 2] = (self.near.sums[recent[:, 1 : 1 + LAGS]] * by_lag).sum(1)
        has = sums > 0
        factors = np.where(has, weights[:, 1:4], 0.0) / np.where(has, sums, 1.0)
        ages = np.where(np.arange(OWN) < known[:, None], 1 / np.arange(1, OWN + 1), 0.0)
        total = ages.sum(1)
        own = weights[:, 4, None] * ages / np.where(total > 0, total, 1.0)[:, None]
        model = weights[:, 0] + np.where(has, 0.0, weights[:, 1:4]).sum(1) + np.where(total > 0, 0.0, weights[:, 4])
        near = np.concatenate([factors[:, 1:2], factors[:, 2:3] * by_lag], axis=1)
        return model, factors[:, 0], near, own

    def added(self, recent: NDArray[np.int64], known: NDArray[np.int64]) -> Added:
        """Returns what the tables add to B distributions. recent, known: see `_coefficients`."""
        lags = 1 + LAGS
        model, of_following, of_near, own = self._coefficients(recent, known)
        row, entry = self.following.entries(recent[:, 0])
        place, near = self.near.entries(recent[:, :lags].ravel())
        seen = np.flatnonzero(own.ravel() > 0)
        probabilities = (
            of_following[row] * self.following.counts[entry],
            of_near.ravel()[place] * self.near.counts[near],
            own.ravel()[seen],
        )
        return Added(
            model,
            np.concatenate([row, place // lags, seen // OWN]),
            np.concatenate([self.following.events[entry], self.near.events[near], recent.ravel()[seen]]),
            np.concatenate(probabilities),
        )

    def parts_of(
        self, recent: NDArray[np.int64], known: NDArray[np.int64], event: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns, for B rows, the weight of the mixture of network and cache, and the probability that the tables add
        to one event: float64 (B) each. event: int64 (B)."""
        model, of_following, of_near, own = self._coefficients(recent, known)
        others = np.broadcast_to(event[:, None], (len(event), 1 + LAGS))
        added = of_following * self.following.count_of(recent[:, 0], event)
        added += (of_near * self.near.count_of(recent[:, : 1 + LAGS], others)).sum(1)
        added += (own * (recent == event[:, None])).sum(1)
        return model, added
