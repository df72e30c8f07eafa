"""Evaluates a model of events: perplexity and rankings, in the recurrent mode and with a window of a session's last k
tokens.

As in serving, every session starts from the zero state, and a window never extends beyond the start of its session.
While a session has at most k tokens, its predictions are the same in both modes. Perplexity is over all predicted
tokens: the events, the end of each session (`<eos>`), and, unless the start is "zero", the first event. Rankings and
window perplexities are computed at positions spread evenly through the split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wane.models.cache_mixture import CacheMixture
from wane.models.cache_statistics import cache_statistics
from wane.models.manifest import CacheModel
from wane.models.networks import Network
from wane.models.parity import log_softmax
from wane.models.transitions import OWN, PARTS, Transitions, Weights
from wane.training.cache import sequence_before
from wane.training.config import Protocol
from wane.training.data import Corpus
from wane.training.errors import RunError
from wane.training.evaluate import POSITIONS, ROWS, WINDOWS, Advance, SplitLosses, spread_positions, window_hidden
from wane.training.group import ALONE
from wane.training.lanes import SessionLanes
from wane.training.losses.sampled_softmax import LOGITS_AT_ONCE, full_losses
from wane.training.rankings.baselines import Baseline, baselines_of
from wane.training.rankings.metrics import Judged, Rankings, Scorer, judged_of, ranks_in
from wane.training.rankings.transitions import BACKWARDS, Counts, TransitionWeights, fit, lengths_of, mixed
from wane.training.sessions import Sessions

WIDTH, CHUNK = 64, 128
"""The number of sessions in a batch, and the largest number of tokens of each session in a batch."""

LEFT_OUT: dict[Protocol, slice] = {"next": slice(0), "next_other": slice(-1, None), "leave_one_out": slice(None)}
"""For each protocol, which of a session's events so far are not ranked."""

RECURRENT, WITHOUT_CACHE = "recurrent", "without the cache"
WITHOUT_TRANSITIONS, TRANSITIONS_ALONE = "without transitions", "transitions alone"


def sessions_of(corpus: Corpus, split: str) -> Sessions:
    """Returns the sessions of a split."""
    return Sessions(corpus.streams[split], corpus.vocabulary.eos_id, corpus.start)


@torch.inference_mode()
def session_losses(
    network: Network,
    sessions: Sessions,
    kept: NDArray[np.int64] | None = None,
    advance: Advance | None = None,
    predicted: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.float64], Tensor]:
    """Runs the network over all sessions, each from the zero state.

    Returns two results. The first is -log p of the token after each input: float64 (len(stream) - 1,), NaN where
    nothing is predicted, or outside the positions `predicted`, if they are given. The second is the output layer's
    input after each of the positions `kept`: float32 (n, H). kept: int64 (n,), in ascending order.
    """
    device = network.embedding.weight.device
    lanes = SessionLanes(ALONE, sessions, WIDTH, CHUNK, None)
    losses = np.full(len(sessions.stream) - 1, np.nan)
    is_predicted = np.full(len(losses), predicted is None)
    if predicted is not None:
        is_predicted[predicted] = True
    row_of = np.full(len(losses), -1)
    if kept is not None:
        row_of[kept] = np.arange(len(kept))
    after = torch.zeros(0 if kept is None else len(kept), network.architecture.hidden, device=device)
    state = None
    for step in range(lanes.steps):
        batch = lanes.batch(step, device)
        hidden, state = network(batch.inputs, None if batch.fresh else state)
        hidden, positions = batch.chosen(hidden), batch.chosen_positions()
        own = np.flatnonzero(is_predicted[positions])
        if len(own):
            some, targets = hidden[torch.from_numpy(own)], batch.chosen(batch.targets)[torch.from_numpy(own)]
            losses[positions[own]] = full_losses(network, some, targets).double().numpy(force=True)
        row = row_of[positions]
        hit = np.flatnonzero(row >= 0)
        after[torch.from_numpy(row[hit])] = hidden[torch.from_numpy(hit)]
        if advance is not None:
            advance(len(positions))
    return losses, after


def hidden_after(network: Network, sessions: Sessions, kept: NDArray[np.int64]) -> Tensor:
    """Returns the second result of `session_losses`, without computing a loss."""
    return session_losses(network, sessions, kept, predicted=kept[:0])[1]


Scores = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Returns the scores of all events, float64 (m, V), at some judged positions, int64 (m,)."""


class Judge:
    """Ranks the next event at the judged positions of a split, by a method after another.

    positions: int64 (n,), the judged positions: all of the protocol, or some, spread evenly over the split. left_out:
    which of the session's events so far are not ranked.
    """

    def __init__(self, network: Network, corpus: Corpus, split: str, count: int | None = None) -> None:
        """count: the largest number of positions; None for all."""
        self._network, self.sessions = network, (sessions := sessions_of(corpus, split))
        self.protocol = corpus.protocol
        self.left_out = LEFT_OUT[corpus.protocol]
        stream, eos = sessions.stream, sessions.eos_id
        self._excluded = list(corpus.vocabulary.unlisted)
        self.inputs = sessions.last_inputs() if corpus.last_only else sessions.inputs()
        self.positions = self.inputs
        if count is not None:
            self.positions = self.inputs[spread_positions(np.append(self.inputs, 0), count, 1)]
        targets = stream[self.positions + 1]
        self.judged = np.flatnonzero((stream[self.positions] != eos) & (targets != eos))
        at = self.positions[self.judged]
        self._first_event = self.first_events(at)
        self._at, self._targets = at, stream[at + 1]
        rests = (stream[one + 1 : end] for one, end in zip(at, sessions.end_of(at), strict=True))
        known = ~np.isin(self._targets, self._excluded)
        self._rests = [
            rest[~np.isin(rest, self._excluded)] if one else rest[:0] for rest, one in zip(rests, known, strict=True)
        ]
        self.rows = max(1, min(ROWS, LOGITS_AT_ONCE // corpus.vocabulary.size))
        every = self.inputs
        inside = int(np.count_nonzero((stream[every] != eos) & (stream[every + 1] != eos)))
        missed = corpus.missed.get(split, 0)
        self.missed_share = missed / max(1, missed + inside)
        counts = np.bincount(corpus.streams["train"], minlength=corpus.vocabulary.size).astype(np.float64)
        counts[[eos, *self._excluded]] = 0
        events = corpus.vocabulary.size - len({eos, *self._excluded})
        self._scorer = Scorer(sessions.begin_of(at), counts, events, self.missed_share)

    def of_model(
        self, hidden: Tensor, cache: CacheMixture | None, rows: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.float64], Judged]:
        """Returns the model's -log p of the token after each position, float64 (m,), and its ranks at those that are
        judged. rows: int64 (m,), the indices of the positions, in ascending order; None for all. hidden: (m, H), the
        output layer's input at these positions."""
        rows = np.arange(len(self.positions)) if rows is None else rows
        index = np.full(len(self.positions), -1)
        index[self.judged] = np.arange(len(self.judged))
        stream, losses, found = self.sessions.stream, [np.zeros(0)], []
        for first in range(0, len(rows), self.rows):
            some = rows[first : first + self.rows]
            at = self.positions[some]
            scores = self._log_probabilities(hidden[first : first + self.rows], at, cache)
            losses.append(-scores[np.arange(len(scores)), stream[at + 1]])
            chosen = np.flatnonzero(index[some] >= 0)
            found.append(self._judge(scores[chosen], index[some[chosen]]))
        return np.concatenate(losses), Judged.joined(found)

    def _log_probabilities(
        self, hidden: Tensor, at: NDArray[np.int64], mixture: CacheMixture | None
    ) -> NDArray[np.float64]:
        """Returns the model's log-probabilities after the positions `at` of the stream: float64 (m, V). hidden: (m, H),
        the output layer's input there."""
        logits = self._network.logits(hidden).float().numpy(force=True)
        if mixture is None:
            return log_softmax(logits)
        stream, eos = self.sessions.stream, self.sessions.eos_id
        known = [sequence_before(stream, int(one), mixture.length, eos) for one in at]
        newest = np.array([(len(one) - 1) % mixture.length for one in known])
        shares = mixture.shares(np.stack([mixture.ring(one, len(one)) for one in known]), newest)
        return mixture.log_probabilities(logits, shares)

    @torch.inference_mode()
    def recurrent(self, cache: CacheMixture | None) -> Judged:
        """Returns the ranks of the model in the recurrent mode."""
        return self.of_model(hidden_after(self._network.eval(), self.sessions, self.positions), cache)[1]

    def of_scores(self, scores: Scores, advance: Advance | None = None) -> Judged:
        """Returns the ranks of a method that has a score for every event."""
        found = []
        for some in self._pieces():
            found.append(self._judge(scores(some), some))
            if advance is not None:
                advance(len(some))
        return Judged.joined(found)

    def of_targets(self, scores: Scores) -> NDArray[np.float64]:
        """Returns the scores of the next events, float64 (n,)."""
        pieces = [scores(some)[np.arange(len(some)), self._targets[some]] for some in self._pieces()]
        return np.concatenate([np.zeros(0), *pieces])

    def of_baseline(self, baseline: Baseline, advance: Advance | None = None) -> Judged:
        """Returns the ranks of a baseline."""
        return self.of_scores(lambda some: baseline.scores(self.known(some)), advance)

    @property
    def count(self) -> int:
        """The number of judged positions with a next event."""
        return len(self.judged)

    def sessions_to_replay(self) -> Iterator[tuple[NDArray[np.int64], dict[int, int]]]:
        """Yields each session with a judged position: its events up to the last of these, and for each number of events
        after which a position is judged, the index of this position."""
        edges = np.flatnonzero(np.diff(self._first_event, prepend=-1, append=-1))
        for first, end in pairwise(edges.tolist()):
            begin = self._first_event[first]
            places = {int(self._at[row] - begin) + 1: row for row in range(first, end)}
            yield self.sessions.stream[begin : self._at[end - 1] + 1], places

    def of_lists(self, lists: NDArray[np.int64]) -> Judged:
        """Returns the ranks of a method of which only the lists are known: int64 (judged positions, LISTED)."""
        known = [rest[:0] if not len(rest) else self._targets[row : row + 1] for row, rest in enumerate(self._rests)]
        return Judged(ranks_in(lists, known), ranks_in(lists, self._rests), lists)

    def fit_transitions(
        self, counts: Counts, model: NDArray[np.float64], used: Collection[str] = PARTS
    ) -> tuple[Weights, float]:
        """Fits the weights of a mixture with the `used` parts of transition tables to the judged positions. Returns
        them, and the mean of -log p of the next events, in nats. model: float64 (n,), the model's log-probabilities of
        the next events."""
        parts, rows = [np.zeros((0, len(PARTS)))], [np.zeros(0, np.int64)]
        for some in self._pieces():
            sessions = self.known(some)
            parts.append(counts.parts(sessions, np.exp(model[some]), self._targets[some]))
            rows.append(lengths_of(sessions))
        return fit(np.concatenate(parts), np.concatenate(rows), used)

    def with_transitions(self, tables: Transitions, model: Scores) -> Scores:
        """Returns the log-probabilities of the mixture of a model with transition tables."""
        return lambda some: mixed(tables, self.known(some), model(some))

    def first_events(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the position of the first event of the session at each of some positions of the stream."""
        return self.sessions.begin_of(positions) + (self.sessions.start == "token")

    def scores(self, hidden: Tensor, cache: CacheMixture | None) -> Scores:
        """Returns the function of a model's log-probabilities, float64 (m, V), at some judged positions. hidden:
        (n, H), the output layer's input at all positions."""
        return lambda some: self._log_probabilities(hidden[self.judged[some]], self._at[some], cache)

    def _pieces(self) -> Iterator[NDArray[np.int64]]:
        every = np.arange(len(self.judged))
        yield from (every[first : first + self.rows] for first in range(0, len(every), self.rows))

    def known(self, some: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Returns the session's events up to each of some judged positions."""
        return [self.sessions.stream[self._first_event[row] : self._at[row] + 1] for row in some]

    def rankings(self, methods: dict[str, Judged], baselines: Collection[str]) -> Rankings:
        """Returns the metrics of all methods. The first method is tested against each of the `baselines`."""
        model = next(iter(methods.values()))
        return Rankings(
            protocol=self.protocol,
            positions=self._scorer.positions,
            sessions=self._scorer.sessions,
            missed_share=self.missed_share,
            methods={name: self._scorer.metrics(judged) for name, judged in methods.items()},
            tests={name: self._scorer.test(model, methods[name]) for name in baselines},
        )

    def _judge(self, scores: NDArray[np.float64], some: NDArray[np.int64]) -> Judged:
        """Ranks the events at some judged positions. scores: float64 (m, V), changed by this call."""
        scores[:, self._excluded] = -np.inf
        for row, seen in enumerate(self.known(some)):
            scores[row, seen[self.left_out]] = -np.inf
        return judged_of(scores, self._targets[some], [self._rests[index] for index in some])


@torch.inference_mode()
def evaluate_events(
    network: Network,
    corpus: Corpus,
    split: str,
    windows: Sequence[int] = WINDOWS,
    count: int | None = POSITIONS,
    advance: Advance | None = None,
    cache: CacheModel | None = None,
    baselines: dict[str, Baseline] | None = None,
    transitions: tuple[Counts, TransitionWeights] | None = None,
) -> tuple[SplitLosses, Rankings]:
    """Evaluates one split at `count` positions, or at all if it is None. With a `cache`, a window's prediction uses the
    same cache contents as the recurrent run. `baselines`: the baselines to evaluate, by name; None for `baselines_of`
    the training split. `transitions`: the tables that are mixed with the model, and their weights."""
    network.eval()
    judge = Judge(network, corpus, split, count)
    sessions, inputs, positions = judge.sessions, judge.inputs, judge.positions
    alone, hidden = session_losses(network, sessions, positions, advance, inputs)
    alone = alone[inputs]
    whole = alone
    mixture = mixture_of(cache, corpus.vocabulary.size, transitions)
    if mixture is not None:
        statistics = cache_statistics(sessions.stream, mixture.length, sessions.eos_id)
        whole = -mixture.score(statistics, sessions.stream, inputs, judge.first_events(inputs), -alone)
    methods: dict[str, Judged] = {}
    of_window: dict[int, float] = {}
    at_positions, methods[RECURRENT] = judge.of_model(hidden, mixture)
    if cache is not None:
        _, methods[WITHOUT_CACHE] = judge.of_model(hidden, None)
    if transitions is not None:
        counts, fitted = transitions
        _, methods[WITHOUT_TRANSITIONS] = judge.of_model(hidden, mixture_of(cache, corpus.vocabulary.size))
        tables = counts.weighted(fitted.alone)
        methods[TRANSITIONS_ALONE] = judge.of_scores(judge.with_transitions(tables, popularity_of(counts)))
    depth = positions - sessions.begin_of(positions) + 1
    index = np.searchsorted(judge.judged, np.arange(len(positions)))
    for k in windows:
        late = np.flatnonzero(depth > k)
        cut = hidden[torch.from_numpy(late)]
        for first in range(0, len(late), ROWS):
            some = late[first : first + ROWS]
            cut[first : first + ROWS] = window_hidden(network, sessions.stream, k, positions[some])
            if advance is not None:
                advance(k * len(some))
        nats, changed = judge.of_model(cut, mixture, late)
        methods[f"window {k}"] = methods[RECURRENT].replaced(index[late[np.isin(late, judge.judged)]], changed)
        of_window[k] = float((at_positions.sum() + nats.sum() - at_positions[late].sum()) / max(1, len(positions)))
    if baselines is None:
        baselines = baselines_of(sessions_of(corpus, "train"), corpus.vocabulary.size)
    methods |= {name: judge.of_baseline(baseline, advance) for name, baseline in baselines.items()}
    losses = SplitLosses(
        tokens=len(inputs),
        words=None,
        recurrent=float(whole.mean()),
        without_cache=None if mixture is None else float(alone.mean()),
        positions=len(positions),
        recurrent_at_positions=float(at_positions.mean()),
        window=of_window,
    )
    return losses, judge.rankings(methods, list(baselines))


def mixture_of(
    cache: CacheModel | None, size: int, transitions: tuple[Counts, TransitionWeights] | None = None
) -> CacheMixture | None:
    """Returns the mixture with a cache and transition tables, if there are any. size: V. Raises RunError."""
    if transitions is None:
        return None if cache is None else CacheMixture(cache, size)
    counts, fitted = transitions
    return CacheMixture(cache_of(cache), size, counts.weighted(fitted.with_model))


def cache_of(cache: CacheModel | None) -> CacheModel:
    """Returns the cache of a model with transition tables: one that adds nothing if the model has none. Raises RunError
    if the cache is too short."""
    if cache is None:
        return CacheModel.none(OWN)
    if cache.length < OWN:
        raise RunError(f"transition tables read the last {OWN} events, but the model's cache has {cache.length}")
    return cache


def popularity_of(counts: Counts) -> Scores:
    """Returns the scores of popularity, which stand in a model's place in the mixture of transition tables alone."""
    return lambda some: counts.popular(len(some))


@torch.inference_mode()
def fit_transitions(network: Network, corpus: Corpus, count: int, cache: CacheModel | None) -> TransitionWeights:
    """Fits the mixtures with transition tables to `count` positions of the validation split: the weights, and how much
    an event before another counts, which is chosen for the mixture with the model."""
    network.eval()
    judge, train = Judge(network, corpus, "valid", count), sessions_of(corpus, "train")
    hidden = hidden_after(network, judge.sessions, judge.positions)
    size = corpus.vocabulary.size
    model = judge.of_targets(judge.scores(hidden, mixture_of(cache, size)))
    tried = []
    for backwards in BACKWARDS:
        counts = Counts(train, size, backwards)
        weights, loss = judge.fit_transitions(counts, model)
        alone, _ = judge.fit_transitions(counts, judge.of_targets(popularity_of(counts)))
        tried.append((loss, TransitionWeights(with_model=weights, alone=alone, backwards=backwards)))
    return min(tried, key=lambda one: one[0])[1]
