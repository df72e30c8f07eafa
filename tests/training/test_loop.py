from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path

import pytest
import torch

from models.manifest import Cell
from tests.training.corpora import experiment, text_corpus
from training.config import ModelConfig, TrainingConfig
from training.errors import ResumeError
from training.loop import Trainer, learning_rate, load_best

CELLS: list[Cell] = ["linear", "rnn_tanh", "rnn_relu", "gru", "lstm", "gated"]


def records(folder: Path) -> list[dict[str, float]]:
    """A run's log without its timings."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "wall_s"} for line in lines]


@pytest.mark.parametrize("regime", ["recurrent", "truncated"])
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_a_run_that_was_stopped_goes_on_with_the_losses_of_one_that_was_not(
    tmp_path: Path, regime: str, stop: int
) -> None:
    corpus, chosen = text_corpus(), experiment(regime=regime)
    whole = [progress.loss for progress in Trainer(chosen, corpus, tmp_path / "whole").run()]
    assert len(whole) == 8
    list(islice(Trainer(chosen, corpus, tmp_path / "cut").run(), stop))
    torch.manual_seed(99)
    resumed = Trainer(chosen, corpus, tmp_path / "cut")
    start = resumed.step
    assert start == stop - stop % 2
    assert [progress.loss for progress in resumed.run()] == whole[start:]
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    for name, tensor in load_best(tmp_path / "whole").items():
        assert torch.equal(tensor, load_best(tmp_path / "cut")[name])


@pytest.mark.parametrize("regime", ["recurrent", "truncated"])
@pytest.mark.parametrize("contraction", [None, 0.9], ids=["unconstrained", "stable"])
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_learns_in_both_regimes(tmp_path: Path, cell: Cell, contraction: float | None, regime: str) -> None:
    model = ModelConfig(cell=cell, hidden=24, layers=2, contraction=contraction)
    chosen = experiment(model, regime=regime, steps=60, learning_rate=2e-2, evaluate_every=60, checkpoint_every=60)
    losses = [progress.loss for progress in Trainer(chosen, text_corpus(), tmp_path).run()]
    uniform = math.log(300)
    assert sum(losses[-5:]) / 5 < uniform - 1.0


def test_the_truncated_regime_starts_every_chunk_from_the_zero_state(tmp_path: Path) -> None:
    corpus = text_corpus()
    losses = {
        regime: [p.loss for p in Trainer(experiment(regime=regime), corpus, tmp_path / regime).run()]
        for regime in ("recurrent", "truncated")
    }
    assert losses["recurrent"][0] == losses["truncated"][0]
    assert losses["recurrent"][1] != losses["truncated"][1]


def test_two_seeds_give_two_runs(tmp_path: Path) -> None:
    corpus = text_corpus()
    first, second = (next(Trainer(experiment(seed=seed), corpus, tmp_path / str(seed)).run()).loss for seed in (1, 2))
    assert first != second


def test_a_run_of_another_experiment_is_not_gone_on_with(tmp_path: Path) -> None:
    corpus = text_corpus()
    list(islice(Trainer(experiment(), corpus, tmp_path).run(), 2))
    with pytest.raises(ResumeError, match=r"holds a run with training\.learning_rate = 0\.002, not 0\.5"):
        Trainer(experiment(learning_rate=0.5), corpus, tmp_path)


def test_a_run_may_be_made_longer(tmp_path: Path) -> None:
    corpus = text_corpus()
    list(Trainer(experiment(schedule="constant", steps=4), corpus, tmp_path).run())
    steps = [p.step for p in Trainer(experiment(schedule="constant", steps=6), corpus, tmp_path).run()]
    assert steps == [5, 6]


def test_a_loss_that_is_not_finite_stops_the_run_and_says_what_to_change(tmp_path: Path) -> None:
    model = ModelConfig(cell="linear", hidden=16, layers=2)
    trainer = Trainer(experiment(model, optimizer="sgd", learning_rate=1e30), text_corpus(), tmp_path)
    with pytest.raises(FloatingPointError, match="try a smaller learning_rate"):
        list(trainer.run())


def test_best_weights_are_those_of_the_lowest_validation_loss(tmp_path: Path) -> None:
    trainer = Trainer(experiment(steps=40, learning_rate=0.05), text_corpus(), tmp_path)
    list(trainer.run())
    losses = {r["step"]: r["valid_loss"] for r in records(tmp_path) if "valid_loss" in r}
    best = min(losses, key=lambda step: losses[step])
    assert (trainer.best_step, trainer.best_loss) == (best, losses[best])
    assert torch.load(tmp_path / "best.pt", weights_only=True)["step"] == best


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"holds no best\.pt"):
        load_best(tmp_path)


def rates(**keys: object) -> list[float]:
    config = TrainingConfig.model_validate({"steps": 10, "learning_rate": 1.0, "warmup": 2} | keys)
    return [round(learning_rate(config, step, 5 if config.schedule == "plateau" else None), 4) for step in range(10)]


def test_the_schedules_are_what_they_say() -> None:
    assert rates(schedule="constant") == [0.5] + [1.0] * 9
    assert rates(schedule="inverse_time") == [0.5, 1.0, *[round(1 / t, 4) for t in range(1, 9)]]
    cosine = rates(schedule="cosine")
    assert cosine[2] == 1.0
    assert cosine[6] == 0.5
    assert cosine == sorted(cosine[:2]) + sorted(cosine[2:], reverse=True)
    assert rates(schedule="plateau", decay_steps=5) == [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0]


def test_plateau_decays_once_validation_stops_improving_and_then_ends(tmp_path: Path) -> None:
    chosen = experiment(
        schedule="plateau", steps=400, decay_steps=8, patience=2, learning_rate=0.1, evaluate_every=4, warmup=0
    )
    trainer = Trainer(chosen, text_corpus(), tmp_path)
    steps = [progress.step for progress in trainer.run()]
    decay = next(r for r in records(tmp_path) if "decay_start" in r)
    assert decay["stalled"] is True
    assert steps[-1] == decay["step"] + 8 < 400
    assert decay["step"] - max(s for s in _best_steps(tmp_path) if s <= decay["step"]) >= 8


def _best_steps(folder: Path) -> list[float]:
    return [r["step"] for r in records(folder) if r.get("valid_loss", math.inf) == r.get("best_loss")]
