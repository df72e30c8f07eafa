"""Metrics of a ranking of events: recall@k, MRR@k, NDCG@k and hit rate@k.

At a position of a session, a method ranks all events of the vocabulary. `<eos>` and `<unk>` are never ranked. The rank
of an event is 1 plus the number of events with a higher score, and of events with the same score and a smaller id. (Ids
are in the order of popularity.) With r the rank of the session's next event, at each position:

    recall@k    1 if r <= k, else 0
    MRR@k       1 / r if r <= k, else 0
    NDCG@k      1 / log2(r + 1) if r <= k, else 0
    hit rate@k  1 if any of the session's remaining events has a rank <= k, else 0

Each metric is the mean over positions. Recall and MRR of the next event are those of GRU4Rec (Hidasi et al. 2016, arXiv
1511.06939). NDCG is DCG divided by the ideal DCG, which is 1 because only the next event is relevant. For the next
event alone, hit rate and recall would be the same number. Hit rate is therefore computed for all of the session's
remaining events, as in the second protocol of Ludewig and Jannach (2018, arXiv 1803.09587).

The first known event of a session is only an input: its own rank counts in no metric. A position whose next event the
vocabulary lacks counts 0 in every metric.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wane.models.layer_registry import Frozen

CUTOFFS = (1, 5, 10, 20)
"""The values of k in the metrics."""


class RankingMetrics(Frozen):
    """The metrics of one method on one split, by k."""

    recall: dict[int, float]
    mrr: dict[int, float]
    ndcg: dict[int, float]
    hit_rate: dict[int, float]


class Rankings(Frozen):
    """The metrics of all methods on one split, by the method's name: the model's modes first, then the baselines.

    `positions`: the number of sampled positions with a next event. `missed_share`: the share of the split's next events
    that the vocabulary lacks and that were left out of the stream. They count as misses.
    """

    positions: int = Field(ge=0)
    missed_share: float = Field(ge=0, le=1)
    methods: dict[str, RankingMetrics]

    @property
    def measured(self) -> bool:
        """Whether there is a next event, which may be unknown. Otherwise the metrics are 0 but mean nothing."""
        return self.positions > 0 or self.missed_share > 0


def ranks_of(scores: NDArray[np.floating], ids: NDArray[np.int64], excluded: list[int]) -> NDArray[np.int64]:
    """Returns the rank of one event per row, from 1: int64 (n,). scores: (n, V). ids: int64 (n,), the event of each
    row. excluded: the ids that are not ranked."""
    own = np.take_along_axis(scores, ids[:, None], 1)
    before = scores > own
    before |= (scores == own) & (np.arange(scores.shape[1]) < ids[:, None])
    before[:, excluded] = False
    found: NDArray[np.int64] = 1 + before.sum(1)
    return found


def best_of(scores: NDArray[np.floating], choices: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns, for each row, the id with the highest score among the row's `choices`: int64 (n,). If several ids have
    this score, returns the smallest."""
    best = np.empty(len(choices), np.int64)
    for row, ids in enumerate(choices):
        own = scores[row, ids]
        best[row] = ids[own == own.max()].min()
    return best


def metrics_of(
    next_ranks: NDArray[np.int64], best_ranks: NDArray[np.int64], positions: int, missed_share: float
) -> RankingMetrics:
    """Computes the metrics. next_ranks: int64 (n,), the ranks of the next events. best_ranks: int64 (n,), the smallest
    rank among the remaining events of each session. positions: the number of sampled positions, at least n. A position
    without a rank counts 0. missed_share: the share of the split's next events that were left out of the stream. They
    also count 0."""
    whole = (1 - missed_share) / max(1, positions)

    def mean(ranks: NDArray[np.int64], gains: NDArray[np.float64]) -> dict[int, float]:
        return {k: float(gains[ranks <= k].sum() * whole) for k in CUTOFFS}

    return RankingMetrics(
        recall=mean(next_ranks, np.ones(len(next_ranks))),
        mrr=mean(next_ranks, 1 / next_ranks),
        ndcg=mean(next_ranks, 1 / np.log2(next_ranks + 1)),
        hit_rate=mean(best_ranks, np.ones(len(best_ranks))),
    )
