"""Metrics of a ranking of events, with their confidence intervals and a paired test.

At a position of a session, a method ranks all events of the vocabulary. `<eos>` and `<unk>` are never ranked. The rank
of an event is 1 plus the number of events with a higher score, and of events with the same score and a smaller id. (Ids
are in the order of popularity.) With r the rank of the session's next event, at each position:

    recall@k      1 if r <= k, else 0
    MRR@k         1 / r if r <= k, else 0
    NDCG@k        1 / log2(r + 1) if r <= k, else 0
    hit rate@k    1 if any of the session's remaining events has a rank <= k, else 0
    popularity@k  the mean share of the first k events, each relative to the most frequent event of the training split

Each is the mean over positions, and coverage@k is the share of all events that are among the first k of at least one
position. Recall and MRR of the next event are those of GRU4Rec (Hidasi et al. 2016, arXiv 1511.06939). NDCG is DCG
divided by the ideal DCG, which is 1 because only the next event is relevant. For the next event alone, hit rate and
recall would be the same number. Hit rate is therefore computed for all of the session's remaining events, as in the
second protocol of Ludewig and Jannach (2018, arXiv 1803.09587), which also defines coverage and popularity.

The protocols say which positions are judged, and which events are ranked:

    next           every position of a session with a next event; all events
    next_other     every position of a session with a next event; all events but the session's event there
    leave_one_out  the position before a session's last event; all events but those that the session had before

The first known event of a session is only an input: its own rank counts in no metric. A position whose next event the
vocabulary lacks counts 0 in the first four metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wane.models.layer_registry import Frozen
from wane.training.config import Protocol

CUTOFFS = (1, 5, 10, 20)
"""The values of k in the metrics."""

LISTED = CUTOFFS[-1]
"""The number of events of a list."""

UNRANKED = np.iinfo(np.int64).max
"""The rank of an event that is not ranked."""

GAINS = ("recall", "mrr", "ndcg", "hit_rate")
"""The metrics that are means over positions of a gain, and so have intervals and tests."""

RESAMPLES = 1000
"""The number of bootstrap samples of an interval, and of random signs of a test."""

ROWS_AT_ONCE = 100
"""The number of bootstrap samples that are held in memory."""

SEED = 0

ByCutoff = dict[int, float]


class RankingMetrics(Frozen):
    """The metrics of one method on one split, by k. `intervals`: for each metric that is a mean of gains, the 2.5th and
    the 97.5th percentile of its bootstrap distribution over sessions, by k."""

    recall: ByCutoff
    mrr: ByCutoff
    ndcg: ByCutoff
    hit_rate: ByCutoff
    coverage: ByCutoff
    popularity: ByCutoff
    intervals: dict[str, dict[int, tuple[float, float]]]


class Difference(Frozen):
    """The model's metric minus a baseline's. `p`: the share of random signs of the sessions' differences whose sum is
    at least as far from 0 as that of the differences themselves (Smucker et al. 2007, a two-sided paired randomisation
    test)."""

    difference: float
    p: float = Field(ge=0, le=1)


class Rankings(Frozen):
    """The metrics of all methods on one split, by the method's name: the model's modes first, then the baselines.

    `positions`: the number of judged positions. `sessions`: the number of sessions with such a position.
    `missed_share`: the share of the split's next events that the vocabulary lacks and that were left out of the stream.
    They count as misses. `tests`: for each baseline, the model's differences by metric and k.
    """

    protocol: Protocol = "next"
    positions: int = Field(ge=0)
    sessions: int = Field(default=0, ge=0)
    missed_share: float = Field(ge=0, le=1)
    methods: dict[str, RankingMetrics]
    tests: dict[str, dict[str, dict[int, Difference]]] = Field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether there is a next event, which may be unknown. Otherwise the metrics are 0 but mean nothing."""
        return self.positions > 0 or self.missed_share > 0


@dataclass(frozen=True, slots=True)
class Judged:
    """What one method ranked at n positions.

    next_ranks: int64 (n,), the rank of the next event. best_ranks: int64 (n,), the smallest rank among the session's
    remaining events. UNRANKED for an event that is not ranked. lists: int64 (n, LISTED), the first events; negative
    where the list has none, or one that the vocabulary lacks.
    """

    next_ranks: NDArray[np.int64]
    best_ranks: NDArray[np.int64]
    lists: NDArray[np.int64]

    def replaced(self, rows: NDArray[np.int64], others: Judged) -> Judged:
        """Returns the same with the `rows`, int64 (m,), of `others`."""
        found = Judged(self.next_ranks.copy(), self.best_ranks.copy(), self.lists.copy())
        found.next_ranks[rows], found.best_ranks[rows], found.lists[rows] = (
            others.next_ranks,
            others.best_ranks,
            others.lists,
        )
        return found

    @classmethod
    def joined(cls, parts: list[Judged]) -> Judged:
        """Returns the positions of all parts, one part after another."""
        none = np.zeros(0, np.int64)
        return cls(
            np.concatenate([none, *(part.next_ranks for part in parts)]),
            np.concatenate([none, *(part.best_ranks for part in parts)]),
            np.concatenate([np.zeros((0, LISTED), np.int64), *(part.lists for part in parts)]),
        )

    def gains(self) -> NDArray[np.float64]:
        """Returns the gains at each position: float64 (n, GAINS x CUTOFFS), the cutoffs of each metric together."""
        near = np.minimum(self.next_ranks, LISTED + 1)
        ones = np.ones(len(near))
        of = ((near, ones), (near, 1 / near), (near, 1 / np.log2(near + 1)), (self.best_ranks, ones))
        columns = [np.where(ranks <= k, values, 0.0) for ranks, values in of for k in CUTOFFS]
        return np.stack(columns, 1)


class Scorer:
    """Computes the metrics of methods at the same n positions. sessions: int64 (n,), the index of each position's
    session. counts: (V,), the number of occurrences of each event in the training split, 0 for what is not ranked.
    events: the number of events that can be ranked. missed_share: the share of next events that have no position; each
    of them counts 0. Intervals take this share as fixed."""

    def __init__(
        self, sessions: NDArray[np.int64], counts: NDArray[np.float64], events: int, missed_share: float
    ) -> None:
        _, self._sessions = np.unique(sessions, return_inverse=True)
        self.sessions = int(self._sessions.max(initial=-1)) + 1
        self.positions = len(sessions)
        self._shares = counts / max(1, counts.max(initial=0))
        self._events, self._found = max(1, events), 1 - missed_share
        self._lengths = np.bincount(self._sessions, minlength=self.sessions).astype(np.float64)

    def metrics(self, judged: Judged) -> RankingMetrics:
        """Returns the metrics of one method."""
        sums = self._sums(judged)
        means = sums.sum(0) * (self._found / max(1, self.positions))
        low, high = self._interval(sums)
        values = {name: {k: float(means[at]) for k, at in columns.items()} for name, columns in _columns().items()}
        intervals = {
            name: {k: (float(low[at]), float(high[at])) for k, at in columns.items()}
            for name, columns in _columns().items()
        }
        return RankingMetrics(
            **values, coverage=self._coverage(judged), popularity=self._popularity(judged), intervals=intervals
        )

    def test(self, model: Judged, baseline: Judged) -> dict[str, dict[int, Difference]]:
        """Returns the model's differences to a baseline, by metric and k."""
        apart = self._sums(model) - self._sums(baseline)
        sums = apart.sum(0)
        random, beyond, done = np.random.default_rng(SEED), np.zeros(len(sums)), 0
        while done < RESAMPLES and self.positions:
            count = min(ROWS_AT_ONCE, RESAMPLES - done)
            signs = random.integers(0, 2, (count, len(apart)), np.int8) * 2.0 - 1
            beyond += (np.abs(signs @ apart) >= np.abs(sums) - 1e-9).sum(0)
            done += count
        means, p = sums * (self._found / max(1, self.positions)), (beyond + 1) / (done + 1)
        return {
            name: {k: Difference(difference=float(means[at]), p=float(p[at])) for k, at in columns.items()}
            for name, columns in _columns().items()
        }

    def _sums(self, judged: Judged) -> NDArray[np.float64]:
        """Returns the sums of the gains of each session: float64 (sessions, GAINS x CUTOFFS)."""
        gains = judged.gains()
        columns = [np.bincount(self._sessions, column, self.sessions) for column in gains.T]
        return np.stack(columns, 1)

    def _interval(self, sums: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the 2.5th and the 97.5th percentile of each mean over bootstrap samples of the sessions."""
        if not self.positions:
            return np.zeros(sums.shape[1]), np.zeros(sums.shape[1])
        random, means = np.random.default_rng(SEED), []
        for first in range(0, RESAMPLES, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, RESAMPLES - first)
            drawn = random.integers(0, self.sessions, (count, self.sessions))
            drawn += np.arange(count)[:, None] * self.sessions
            weights = np.bincount(drawn.ravel(), minlength=count * self.sessions).reshape(count, -1).astype(np.float64)
            means.append(weights @ sums / (weights @ self._lengths)[:, None] * self._found)
        low, high = np.percentile(np.concatenate(means), [2.5, 97.5], axis=0)
        return low, high

    def _coverage(self, judged: Judged) -> ByCutoff:
        lists = judged.lists
        return {k: len(np.unique(lists[:, :k][lists[:, :k] >= 0])) / self._events for k in CUTOFFS}

    def _popularity(self, judged: Judged) -> ByCutoff:
        listed = judged.lists >= 0
        shares = np.where(listed, self._shares[np.maximum(judged.lists, 0)], 0.0)
        return {k: float(shares[:, :k].sum() / max(1, listed[:, :k].sum())) for k in CUTOFFS}


def _columns() -> dict[str, dict[int, int]]:
    """Returns the column of each metric and k in `Judged.gains`."""
    count = len(CUTOFFS)
    return {name: {k: count * row + at for at, k in enumerate(CUTOFFS)} for row, name in enumerate(GAINS)}


def judged_of(scores: NDArray[np.floating], targets: NDArray[np.int64], rests: list[NDArray[np.int64]]) -> Judged:
    """Ranks events by their scores. scores: (n, V), -inf for events that are not ranked. targets: int64 (n,), the next
    events. rests: the remaining events of each session that can be ranked, the next one among them."""
    best = best_of(scores, rests)
    return Judged(ranks_of(scores, targets), ranks_of(scores, best), first_of(scores))


def ranks_of(scores: NDArray[np.floating], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the rank of one event per row, from 1, or UNRANKED if its score is -inf: int64 (n,). scores: (n, V). ids:
    int64 (n,), the event of each row."""
    own = np.take_along_axis(scores, ids[:, None], 1)
    before = scores > own
    before |= (scores == own) & (np.arange(scores.shape[1]) < ids[:, None])
    return np.where(np.isneginf(own[:, 0]), UNRANKED, 1 + before.sum(1))


def best_of(scores: NDArray[np.floating], choices: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns, for each row, the id with the highest score among the row's `choices`: int64 (n,). If several ids have
    this score, returns the smallest. Without a choice, returns the first id."""
    best = np.zeros(len(choices), np.int64)
    for row, ids in enumerate(choices):
        if len(ids):
            own = scores[row, ids]
            best[row] = ids[own == own.max()].min()
    return best


def ranks_in(lists: NDArray[np.int64], choices: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns the smallest rank in each row's list among the row's `choices`, or UNRANKED if the list has none of them:
    int64 (n,). lists: int64 (n, LISTED)."""
    ranks = np.full(len(lists), UNRANKED)
    for row, (ids, wanted) in enumerate(zip(lists, choices, strict=True)):
        if len(places := np.flatnonzero(np.isin(ids, wanted))):
            ranks[row] = places[0] + 1
    return ranks


def first_of(scores: NDArray[np.floating]) -> NDArray[np.int64]:
    """Returns the ids with the LISTED highest scores of each row, in the order of their ranks: int64 (n, LISTED), -1
    where no more events are ranked."""
    count = min(LISTED, scores.shape[1])
    lists = np.full((len(scores), LISTED), -1)
    least = -np.partition(-scores, count - 1, axis=1)[:, count - 1]
    for row, (values, bound) in enumerate(zip(scores, least, strict=True)):
        above = np.flatnonzero(values > bound)
        equal = np.flatnonzero(values == bound)[: count - len(above)] if np.isfinite(bound) else above[:0]
        ids = np.concatenate([above[np.lexsort((above, -values[above]))], equal])
        lists[row, : len(ids)] = ids
    return lists
