from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.corpora import experiment, text_corpus
from tests.training.test_loop import best_weights, records
from wane.models.networks import Network
from wane.training.config import ModelConfig
from wane.training.loop import Trainer
from wane.training.run_folder import RunFolder
from wane.training.weight_average import WeightAverage

KEYS: dict[str, Any] = {"schedule": "constant", "averaged": 0.5, "keep_every": 1, "steps": 8, "learning_rate": 0.05}


def test_the_saved_weights_are_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    chosen = experiment(evaluate_every=8, **KEYS)
    trainer = Trainer(chosen, text_corpus(), RunFolder(tmp_path))
    list(trainer.run())
    kept = [RunFolder(tmp_path).load(f"weights-{step}.pt")["weights"] for step in (5, 6, 7, 8)]
    for name, saved in best_weights(tmp_path).items():
        mean = torch.stack([weights[name] for weights in kept]).mean(0)
        torch.testing.assert_close(saved, mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(trainer.network.state_dict()[name], kept[-1][name]), "training goes on with its own weights"
    assert not torch.equal(best_weights(tmp_path)["embedding.weight"], kept[-1]["embedding.weight"])


@pytest.mark.parametrize("stop", [4, 7])
def test_a_resumed_run_has_the_same_average(tmp_path: Path, stop: int) -> None:
    chosen, corpus = experiment(**KEYS), text_corpus()
    list(Trainer(chosen, corpus, RunFolder(tmp_path / "whole")).run())
    list(islice(Trainer(chosen, corpus, RunFolder(tmp_path / "cut")).run(), stop))
    list(Trainer(chosen, corpus, RunFolder(tmp_path / "cut")).run())
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    for name, tensor in best_weights(tmp_path / "whole").items():
        assert torch.equal(tensor, best_weights(tmp_path / "cut")[name])


@pytest.mark.parametrize(("steps", "counts"), [(20, [0, 0, *range(1, 11)]), (10, [1, 2])])
def test_a_run_that_is_continued_averages_its_own_last_steps(tmp_path: Path, steps: int, counts: list[int]) -> None:
    corpus = text_corpus()
    first = Trainer(experiment(**KEYS), corpus, RunFolder(tmp_path))
    assert [first.average.count for _ in first.run()] == [0, 0, 0, 0, 1, 2, 3, 4]
    trainer = Trainer(experiment(**KEYS | {"steps": steps}), corpus, RunFolder(tmp_path))
    assert [trainer.average.count for _ in trainer.run()] == counts


def test_an_average_of_no_weights_changes_nothing() -> None:
    network = torch.nn.Linear(2, 2)
    before = network.weight.detach().clone()
    with WeightAverage(network).in_place():
        assert torch.equal(network.weight, before)
    assert torch.equal(network.weight, before)


def test_embedding_dropout_drops_all_occurrences_of_a_token_in_training_only() -> None:
    torch.manual_seed(3)
    architecture = ModelConfig(cell="gated", hidden=8).architecture(50)
    network = Network(architecture, embedding_dropout=0.4)
    tokens = torch.arange(50).repeat(4, 1).T  # every token in four lanes
    rows = network._embedded(tokens)
    dropped = (rows == 0).all(-1)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert 5 < int(dropped[:, 0].sum()) < 35
    kept = ~dropped[:, 0]
    torch.testing.assert_close(rows[kept, 0], network.embedding.weight[kept] / 0.6)
    assert torch.equal(network.eval()._embedded(tokens)[:, 0], network.embedding.weight)
