from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from tests.models.caches import random_cache
from tests.training.corpora import experiment, text_corpus
from wane.models.cache_statistics import cache_statistics
from wane.models.manifest import CacheModel
from wane.models.reference.cache import mixture
from wane.training.cache import CacheTraining, fit_cache, sequence_before, unfitted_cache
from wane.training.config import ModelConfig
from wane.training.evaluate import evaluate_split
from wane.training.loop import Trainer
from wane.training.run_folder import RunFolder

LENGTH = 12
CACHED = ModelConfig(cell="gated", hidden=16, block="residual", feed_forward=8, contraction=0.9, cache=LENGTH)


def sampled(cache: CacheModel, size: int, count: int) -> np.ndarray:
    """Returns a random token stream. Every token is drawn from the mixture of the cache and a network that predicts
    uniformly."""
    random, stream = np.random.default_rng(0), [0]
    for _ in range(count):
        uniform = np.full(size, 1 / size)
        history = stream[1:]
        drawn = mixture(cache, uniform, history) if history else uniform
        stream.append(int(random.choice(size, p=drawn / drawn.sum())))
    return np.array(stream)


def test_a_fit_finds_the_weights_from_which_the_stream_was_drawn() -> None:
    weights = tuple((0.3 + 0.3 * (row < 6), 0.2, 0.2 * (row >= 6), 0.0) for row in range(36))
    cache = CacheModel(length=LENGTH, weights=tuple((1 - sum(row[1:]), *row[1:]) for row in weights))
    size = 8
    stream = sampled(cache, size, 20_000)
    statistics = cache_statistics(stream, LENGTH)
    network = np.full(len(stream) - 1, np.log(size))
    found = fit_cache(statistics, network)
    loss = -statistics.log_probabilities(found, -network).mean()
    assert loss <= -statistics.log_probabilities(cache, -network).mean() + 1e-4
    assert loss < np.log(size) - 0.05
    often = np.bincount(statistics.rows, minlength=36) > 1000
    assert often.sum() > 3
    for row in np.flatnonzero(often):
        assert found.weights[row][2] == pytest.approx(cache.weights[row][2], abs=0.06)


def test_counts_that_hardly_improve_the_loss_get_no_weight() -> None:
    random = np.random.default_rng(1)
    stream = random.integers(0, 500, 5_000)
    found = fit_cache(cache_statistics(stream, LENGTH), np.full(len(stream) - 1, np.log(500)))
    assert not any(weights[1] for weights in found.weights)


@pytest.mark.parametrize("start", [None, 0])
def test_the_losses_and_the_mixture_equal_the_oracle_s(start: int | None) -> None:
    random = np.random.default_rng(2)
    stream = random.integers(0, 8, 200)
    cache = random_cache(Random(3), LENGTH)
    training = CacheTraining({"train": stream}, 8, cache, start, torch.device("cpu"))
    positions = np.arange(199)
    network = random.dirichlet(np.ones(8), 199)
    came = network[positions, stream[1:]]
    losses = training.losses("train", positions, torch.from_numpy(-np.log(came)))
    weights, added = training.shares("train", positions)
    for at in positions:
        history = sequence_before(stream, int(at), LENGTH, start).tolist()
        expected = mixture(cache, network[at], history) if history else network[at]
        assert losses[at].item() == pytest.approx(-np.log(expected[stream[at + 1]]), abs=1e-5)
        assert weights[at].item() * network[at] + added[at].numpy() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("regime", ["recurrent", "truncated"])
def test_a_resumed_run_with_a_cache_has_the_losses_of_an_uninterrupted_run(tmp_path: Path, regime: str) -> None:
    corpus, chosen = text_corpus(), experiment(CACHED, regime=regime)
    whole = [progress.loss for progress in Trainer(chosen, corpus, RunFolder(tmp_path / "whole")).run()]
    list(islice(Trainer(chosen, corpus, RunFolder(tmp_path / "cut")).run(), 6))
    resumed = Trainer(chosen, corpus, RunFolder(tmp_path / "cut"))
    assert resumed.cache is not None and resumed.cache.model != unfitted_cache(LENGTH)
    assert [progress.loss for progress in resumed.run()] == whole[6:]
    one, other = (RunFolder(tmp_path / name).load("best.pt") for name in ("whole", "cut"))
    assert one["cache"] == other["cache"] and one["valid_loss"] == other["valid_loss"]


def test_the_best_weights_are_those_with_the_lowest_loss_of_the_mixture(tmp_path: Path) -> None:
    corpus, folder = text_corpus(), RunFolder(tmp_path)
    trainer = Trainer(experiment(CACHED, steps=60, learning_rate=1e-2, evaluate_every=20), corpus, folder)
    losses = [progress.valid_loss for progress in trainer.run() if progress.valid_loss is not None]
    assert trainer.cache is not None and trainer.best_loss == min(losses)
    found = evaluate_split(trainer.network, corpus, "valid", [1, 8], cache=trainer.cache.model)
    assert found.without_cache is not None and found.recurrent < found.without_cache
    # The trainer splits the text into several parts (lanes) and evaluates each lane from the zero state. So its loss
    # differs from the loss of `evaluate_split`.
    assert trainer.best_loss == pytest.approx(found.recurrent, abs=0.1)
    assert found.window[8] == pytest.approx(found.recurrent_at_positions, abs=0.5)


def test_the_proof_loss_of_a_mixture_without_a_cache_equals_that_of_the_network(tmp_path: Path) -> None:
    chosen = experiment(CACHED, proof={"weight": 0.1, "ramp": 1})
    trainer = Trainer(chosen, text_corpus(), RunFolder(tmp_path))
    next(trainer.run())
    assert trainer.pressure is not None
    network_alone, proved = trainer.pressure(10)
    size, lanes = trainer.corpus.vocabulary.size, trainer.train_lanes.count
    mixed, of_mixture = trainer.pressure(10, (torch.ones(lanes), torch.zeros(lanes, size)))
    assert mixed.item() == pytest.approx(network_alone.item(), rel=1e-4)
    assert of_mixture == proved
    first = trainer.pressure(10, (torch.full((lanes,), 0.05), torch.eye(size)[:lanes] * 0.95))
    assert first[1] == 1.0, "a token is not proved, although the cache gives it nearly all of the probability"
