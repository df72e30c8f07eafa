"""Evaluates a model of events: perplexity and rankings, in the recurrent mode and with a window of a session's last k
tokens.

As in serving, every session starts from the zero state, and a window never extends beyond the start of its session.
While a session has at most k tokens, its predictions are the same in both modes. Perplexity is over all predicted
tokens: the events, the end of each session (`<eos>`), and, unless the start is "zero", the first event. Rankings and
window perplexities are computed at positions spread evenly through the split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wane.models.cache_mixture import CacheMixture
from wane.models.cache_statistics import cache_statistics
from wane.models.manifest import CacheModel
from wane.models.networks import Network
from wane.models.parity import log_softmax
from wane.training.baselines import Baseline, baselines_of
from wane.training.cache import sequence_before
from wane.training.data import Corpus
from wane.training.evaluate import POSITIONS, ROWS, WINDOWS, Advance, SplitLosses, spread_positions, window_hidden
from wane.training.group import ALONE
from wane.training.lanes import SessionLanes
from wane.training.losses.sampled_softmax import LOGITS_AT_ONCE, full_losses
from wane.training.ranking import RankingMetrics, Rankings, best_of, metrics_of, ranks_of
from wane.training.sessions import Sessions

WIDTH, CHUNK = 64, 128
"""The number of sessions in a batch, and the largest number of tokens of each session in a batch."""

RECURRENT, WITHOUT_CACHE = "recurrent", "recurrent, without the cache"


def sessions_of(corpus: Corpus, split: str) -> Sessions:
    """Returns the sessions of a split."""
    return Sessions(corpus.streams[split], corpus.vocabulary.eos_id, corpus.start)


@torch.inference_mode()
def session_losses(
    network: Network, sessions: Sessions, kept: NDArray[np.int64] | None = None, advance: Advance | None = None
) -> tuple[NDArray[np.float64], Tensor]:
    """Runs the network over all sessions, each from the zero state.

    Returns two results. The first is -log p of the token after each input: float64 (len(stream) - 1,), NaN where
    nothing is predicted. The second is the output layer's input after each of the positions `kept`: float32 (n, H).
    kept: int64 (n,), in ascending order.
    """
    device = network.embedding.weight.device
    lanes = SessionLanes(ALONE, sessions, WIDTH, CHUNK, None)
    losses = np.full(len(sessions.stream) - 1, np.nan)
    row_of = np.full(len(losses), -1)
    if kept is not None:
        row_of[kept] = np.arange(len(kept))
    after = torch.zeros(0 if kept is None else len(kept), network.architecture.hidden, device=device)
    state = None
    for step in range(lanes.steps):
        batch = lanes.batch(step, device)
        hidden, state = network(batch.inputs, None if batch.fresh else state)
        hidden, positions = batch.chosen(hidden), batch.chosen_positions()
        losses[positions] = full_losses(network, hidden, batch.chosen(batch.targets)).double().numpy(force=True)
        row = row_of[positions]
        hit = np.flatnonzero(row >= 0)
        after[torch.from_numpy(row[hit])] = hidden[torch.from_numpy(hit)]
        if advance is not None:
            advance(len(positions))
    return losses, after


class _Judge:
    """Computes the losses and the ranking metrics of a method at sampled positions of a split."""

    def __init__(self, network: Network, corpus: Corpus, sessions: Sessions, positions: NDArray[np.int64]) -> None:
        self._network, self._sessions, self._positions = network, sessions, positions
        stream = sessions.stream
        self._size = corpus.vocabulary.size
        self._excluded = list(corpus.vocabulary.unlisted)
        given = stream[positions] != sessions.eos_id
        next_event = given & (stream[positions + 1] != sessions.eos_id)
        self.positions = int(next_event.sum())
        self._ranked = next_event & ~np.isin(stream[positions + 1], self._excluded)
        inside = (stream[:-1] != sessions.eos_id) & (stream[1:] != sessions.eos_id)
        ends = sessions.end_of(positions)
        rests = (stream[at + 1 : end] for at, end in zip(positions, ends, strict=True))
        self._rest = [rest[~np.isin(rest, self._excluded)] for rest in rests]
        self.rows = max(1, min(ROWS, LOGITS_AT_ONCE // self._size))
        self._split_targets = int(inside.sum())

    def missed_share(self, missed: int) -> float:
        """Returns the share of the split's next events that were left out of the stream. missed: the number of events
        that were left out."""
        return missed / max(1, missed + self._split_targets)

    def of_model(
        self, hidden: Tensor, cache: CacheModel | None, missed_share: float
    ) -> tuple[NDArray[np.float64], RankingMetrics]:
        """Returns the model's -log p of the token after each sampled position, float64 (n,), and its ranking metrics.
        hidden: (n, H), the output layer's input at these positions."""
        stream, targets = self._sessions.stream, self._sessions.stream[self._positions + 1]
        losses: list[NDArray[np.float64]] = []
        next_ranks: list[NDArray[np.int64]] = []
        best_ranks: list[NDArray[np.int64]] = []
        mixture = None if cache is None else CacheMixture(cache, self._size)
        for first in range(0, len(targets), self.rows):
            some = slice(first, first + self.rows)
            logits = self._network.logits(hidden[some]).float().numpy(force=True)
            if mixture is None or cache is None:
                scores = log_softmax(logits)
            else:
                known = [
                    sequence_before(stream, int(at), cache.length, self._sessions.eos_id)
                    for at in self._positions[some]
                ]
                newest = np.array([(len(one) - 1) % cache.length for one in known])
                found = mixture.shares(np.stack([mixture.ring(one, len(one)) for one in known]), newest)
                scores = mixture.log_probabilities(logits, found)
            losses.append(-scores[np.arange(len(scores)), targets[some]])
            ranked = np.flatnonzero(self._ranked[some])
            self._rank(scores[ranked], ranked + first, next_ranks, best_ranks)
        return np.concatenate(losses), self._metrics(next_ranks, best_ranks, missed_share)

    def of_baseline(self, baseline: Baseline, missed_share: float) -> RankingMetrics:
        """Returns the metrics of a baseline."""
        next_ranks: list[NDArray[np.int64]] = []
        best_ranks: list[NDArray[np.int64]] = []
        stream, ranked = self._sessions.stream, np.flatnonzero(self._ranked)
        first_event = self._sessions.begin_of(self._positions) + (self._sessions.start == "token")
        for first in range(0, len(ranked), self.rows):
            some = ranked[first : first + self.rows]
            sessions = [stream[first_event[at] : self._positions[at] + 1] for at in some]
            self._rank(baseline.scores(sessions), some, next_ranks, best_ranks)
        return self._metrics(next_ranks, best_ranks, missed_share)

    def _rank(
        self,
        scores: NDArray[np.float64],
        some: NDArray[np.int64],
        next_ranks: list[NDArray[np.int64]],
        best_ranks: list[NDArray[np.int64]],
    ) -> None:
        """Appends the ranks of the next events to `next_ranks`, and the smallest ranks among the sessions' remaining
        events to `best_ranks`. some: int64 (n,), the indices of the positions. scores: float64 (n, V), the scores of
        all tokens at these positions."""
        targets = self._sessions.stream[self._positions[some] + 1]
        best = best_of(scores, [self._rest[index] for index in some])
        next_ranks.append(ranks_of(scores, targets, self._excluded))
        best_ranks.append(ranks_of(scores, best, self._excluded))

    def _metrics(
        self, next_ranks: list[NDArray[np.int64]], best_ranks: list[NDArray[np.int64]], missed_share: float
    ) -> RankingMetrics:
        none = np.zeros(0, np.int64)
        ranks, best = np.concatenate([none, *next_ranks]), np.concatenate([none, *best_ranks])
        return metrics_of(ranks, best, self.positions, missed_share)


@torch.inference_mode()
def evaluate_events(
    network: Network,
    corpus: Corpus,
    split: str,
    windows: Sequence[int] = WINDOWS,
    count: int = POSITIONS,
    advance: Advance | None = None,
    cache: CacheModel | None = None,
    baselines: dict[str, Baseline] | None = None,
) -> tuple[SplitLosses, Rankings]:
    """Evaluates one split. With a `cache`, a window's prediction uses the same cache contents as the recurrent run.
    `baselines`: the baselines to evaluate, by name; None for `baselines_of` the training split."""
    network.eval()
    sessions = sessions_of(corpus, split)
    inputs = sessions.inputs()
    positions = inputs[spread_positions(np.append(inputs, 0), count, 1)]
    judge = _Judge(network, corpus, sessions, positions)
    missed_share = judge.missed_share(corpus.missed.get(split, 0))
    alone, hidden = session_losses(network, sessions, positions, advance)
    alone = alone[inputs]
    whole = alone
    if cache is not None:
        statistics = cache_statistics(sessions.stream, cache.length, sessions.eos_id).at(inputs)
        whole = -statistics.log_probabilities(cache, -alone)
    methods: dict[str, RankingMetrics] = {}
    of_window: dict[int, float] = {}
    at_positions, methods[RECURRENT] = judge.of_model(hidden, cache, missed_share)
    if cache is not None:
        _, methods[WITHOUT_CACHE] = judge.of_model(hidden, None, missed_share)
    depth = positions - sessions.begin_of(positions) + 1
    for k in windows:
        late = np.flatnonzero(depth > k)
        cut = hidden.clone()
        for first in range(0, len(late), ROWS):
            some = late[first : first + ROWS]
            cut[torch.from_numpy(some)] = window_hidden(network, sessions.stream, k, positions[some])
            if advance is not None:
                advance(k * len(some))
        nats, methods[f"window {k}"] = (
            judge.of_model(cut, cache, missed_share) if len(late) else (at_positions, methods[RECURRENT])
        )
        of_window[k] = float(nats.mean())
    if baselines is None:
        baselines = baselines_of(sessions_of(corpus, "train"), corpus.vocabulary.size)
    methods |= {name: judge.of_baseline(baseline, missed_share) for name, baseline in baselines.items()}
    losses = SplitLosses(
        tokens=len(inputs),
        words=None,
        recurrent=float(whole.mean()),
        without_cache=None if cache is None else float(alone.mean()),
        positions=len(positions),
        recurrent_at_positions=float(at_positions.mean()),
        window=of_window,
    )
    return losses, Rankings(positions=judge.positions, missed_share=missed_share, methods=methods)
