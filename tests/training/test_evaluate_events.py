"""Compares the evaluation of events with runs that read one session at a time, from the zero state."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.corpora import event_corpus
from wane.models.manifest import Start
from wane.models.networks import Network
from wane.models.reference.cache import mixture
from wane.training.cache import unfitted_cache
from wane.training.config import ModelConfig
from wane.training.data import Corpus
from wane.training.evaluate import quality
from wane.training.evaluate_events import evaluate_events
from wane.training.plots import plot_rankings
from wane.training.rankings.metrics import CUTOFFS

BASELINES = (
    "popularity",
    "last item",
    "Markov",
    "association rules",
    "sequential rules",
    "item to item",
    "V-SkNN",
    "VMIS-kNN",
)


def network(corpus: Corpus) -> Network:
    torch.manual_seed(3)
    return Network(ModelConfig(cell="gru", hidden=7).architecture(corpus.vocabulary.size)).eval()


def sessions(corpus: Corpus, split: str = "test") -> list[list[int]]:
    """Returns the token ids of the events of each session."""
    stream = corpus.streams[split]
    edges = np.flatnonzero(stream == corpus.vocabulary.eos_id)
    return [part[1:].tolist() for part in np.split(stream, edges[1:])[:-1]]


def predicted(model: Network, tokens: list[int]) -> np.ndarray:
    """Returns the log-probabilities that the model predicts after `tokens`, which it reads from the zero state: float64
    (V,)."""
    with torch.inference_mode():
        hidden, _ = model(torch.tensor(tokens)[:, None])
        found: np.ndarray = torch.log_softmax(model.logits(hidden[-1, 0]).double(), -1).numpy()
    return found


def expected(model: Network, corpus: Corpus, k: int | None) -> tuple[float, dict[int, float], int]:
    """Returns the mean loss over all predicted tokens, the recall for each of CUTOFFS, and the number of positions with
    a next event. k: the length of the windows; None for the recurrent mode."""
    eos = corpus.vocabulary.eos_id
    losses, ranks = [], []
    for events in sessions(corpus):
        known = [eos, *events] if corpus.start == "token" else events
        targets = [*events, eos] if corpus.start == "token" else [*events[1:], eos]
        for at, target in enumerate(targets, start=1):
            scores = predicted(model, known[:at] if k is None else known[max(0, at - k) : at])
            losses.append(-scores[target])
            if target != eos and known[at - 1] != eos:
                ranks.append(sum(scores[index] > scores[target] for index in range(len(scores)) if index != eos))
    total = len(ranks) + corpus.missed["test"]
    return float(np.mean(losses)), {cut: sum(rank < cut for rank in ranks) / total for cut in CUTOFFS}, len(ranks)


@pytest.mark.parametrize("start", ["token", "zero"])
@pytest.mark.parametrize("unknown", [0, 10])
def test_losses_and_recall_equal_those_of_single_sessions(start: Start, unknown: int) -> None:
    corpus = event_corpus(60, start, unknown)
    assert (corpus.missed["test"] > 0) == (unknown > 0)
    model = network(corpus)
    found, rankings = evaluate_events(model, corpus, "test", (1, 3, 50), 10**6)
    loss, recall, positions = expected(model, corpus, None)
    assert found.recurrent == pytest.approx(loss, abs=1e-5)
    assert found.recurrent_at_positions == pytest.approx(loss, abs=1e-5)
    assert rankings.methods["recurrent"].recall == pytest.approx(recall)
    assert rankings.positions == positions
    for k in (1, 3):
        loss, recall, _ = expected(model, corpus, k)
        assert found.window[k] == pytest.approx(loss, abs=1e-5)
        assert rankings.methods[f"window {k}"].recall == pytest.approx(recall)
    assert found.window[50] == pytest.approx(found.recurrent, abs=1e-6)
    assert list(rankings.methods)[-8:] == list(BASELINES)


@pytest.mark.parametrize("start", ["token", "zero"])
def test_the_mixture_with_a_cache_has_the_caches_oracle(start: Start) -> None:
    corpus = event_corpus(40, start)
    model, cache, eos = network(corpus), unfitted_cache(4), corpus.vocabulary.eos_id
    losses, hits, positions = [], 0, 0
    for events in sessions(corpus):
        known = [eos, *events] if start == "token" else events
        targets = [*events, eos] if start == "token" else [*events[1:], eos]
        for at, target in enumerate(targets, start=1):
            history = [token for token in known[:at] if token != eos]
            scores = np.log(mixture(cache, np.exp(predicted(model, known[:at])), history))
            losses.append(-scores[target])
            if target != eos and history:
                positions += 1
                hits += sum(scores[index] > scores[target] for index in range(len(scores)) if index != eos) < 5
    found, rankings = evaluate_events(model, corpus, "test", (50,), 10**6, cache=cache)
    assert found.recurrent == pytest.approx(float(np.mean(losses)), abs=1e-5)
    assert found.without_cache == pytest.approx(expected(model, corpus, None)[0], abs=1e-5)
    assert rankings.methods["recurrent"].recall[5] == pytest.approx(hits / positions)
    assert rankings.methods["without the cache"].recall == pytest.approx(expected(model, corpus, None)[1])


def test_fewer_positions_are_spread_over_the_split_and_plotted(tmp_path: Path) -> None:
    corpus = event_corpus(200)
    model = network(corpus)
    losses, rankings = evaluate_events(model, corpus, "test", (1, 4), 40)
    assert losses.positions == 40
    assert losses.tokens == len(corpus.streams["test"]) - 1
    assert 20 < rankings.positions < 40
    assert math.isfinite(losses.recurrent)
    plot_rankings("tiny", quality({"test": losses}), {"test": rankings}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
