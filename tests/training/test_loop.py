from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.training.corpora import experiment, text_corpus
from wane.models.certificate import certify
from wane.models.layer_registry import FADING, KINDS, Kind
from wane.models.networks import Network
from wane.training.config import Experiment, ModelConfig, TrainingConfig
from wane.training.data import Corpus
from wane.training.errors import ResumeError
from wane.training.loop import Trainer
from wane.training.run_folder import RunFolder
from wane.training.schedule import learning_rate


def records(folder: Path) -> list[dict[str, float]]:
    """Returns a run's log without its timings."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "wall_s"} for line in lines]


def best_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = RunFolder(folder).load("best.pt")["weights"]
    return weights


@pytest.mark.parametrize("regime", ["recurrent", "truncated"])
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_run(tmp_path: Path, regime: str, stop: int) -> None:
    corpus, chosen = text_corpus(), experiment(regime=regime)
    whole = [progress.loss for progress in Trainer(chosen, corpus, RunFolder(tmp_path / "whole")).run()]
    assert len(whole) == 8
    list(islice(Trainer(chosen, corpus, RunFolder(tmp_path / "cut")).run(), stop))
    torch.manual_seed(99)
    resumed = Trainer(chosen, corpus, RunFolder(tmp_path / "cut"))
    start = resumed.step
    assert start == stop - stop % 2
    assert [progress.loss for progress in resumed.run()] == whole[start:]
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    for name, tensor in best_weights(tmp_path / "whole").items():
        assert torch.equal(tensor, best_weights(tmp_path / "cut")[name])


@pytest.mark.parametrize("regime", ["recurrent", "truncated"])
@pytest.mark.parametrize("contraction", [None, 0.9], ids=["unconstrained", "stable"])
@pytest.mark.parametrize("cell", FADING)
def test_every_cell_learns_in_both_regimes(tmp_path: Path, cell: Kind, contraction: float | None, regime: str) -> None:
    model = ModelConfig(cell=cell, hidden=24, layers=2, contraction=contraction)
    seldom = {"evaluate_every": 60, "checkpoint_every": 60, "project_every": 4}
    chosen = experiment(model, regime=regime, steps=60, learning_rate=2e-2, **seldom)
    losses = [progress.loss for progress in Trainer(chosen, text_corpus(), RunFolder(tmp_path)).run()]
    uniform = math.log(300)
    assert sum(losses[-5:]) / 5 < uniform - 1.0


@pytest.mark.parametrize("cell", [cell for cell in FADING if not KINDS[cell].input_gated])
def test_the_certificate_bounds_the_best_weights_of_a_stable_cell(tmp_path: Path, cell: Kind) -> None:
    model = ModelConfig(cell=cell, hidden=24, layers=2, contraction=0.8)
    chosen = experiment(model, steps=60, learning_rate=2e-2, evaluate_every=30, checkpoint_every=60, project_every=7)
    trainer = Trainer(chosen, text_corpus(), RunFolder(tmp_path))
    list(trainer.run())
    weights = {name: tensor.numpy() for name, tensor in best_weights(tmp_path).items()}
    factors = [layer.factor for layer in certify(trainer.network.architecture, weights, 8, None).layers]
    assert len(factors) == 2
    assert max(factors) <= 0.8


def test_the_best_weights_are_within_the_spectral_limit_between_projections(tmp_path: Path) -> None:
    model = ModelConfig(cell="gated", hidden=16, layers=2, block="residual", feed_forward=8, spectral_limit=0.5)
    trainer = Trainer(
        experiment(model, steps=20, project_every=7, learning_rate=2e-2), text_corpus(), RunFolder(tmp_path)
    )
    list(trainer.run())
    weights = best_weights(tmp_path)
    for layer in ("layers.0.", "layers.1."):
        gain, inner_gain = weights[layer + "norm.weight"], weights[layer + "feed_forward_norm.weight"]
        folded = [
            *(weights[layer + "cell.weight"] * gain).chunk(2),
            weights[layer + "feed_forward_in.weight"] * inner_gain,
        ]
        for matrix in (*folded, weights[layer + "mix.weight"], weights[layer + "feed_forward_out.weight"]):
            assert torch.linalg.matrix_norm(matrix, ord=2) <= 0.5


def test_keep_every_saves_the_same_weights_in_a_resumed_run(tmp_path: Path) -> None:
    corpus, chosen = text_corpus(), experiment(keep_every=3)
    list(Trainer(chosen, corpus, RunFolder(tmp_path / "whole")).run())
    list(islice(Trainer(chosen, corpus, RunFolder(tmp_path / "cut")).run(), 5))
    list(Trainer(chosen, corpus, RunFolder(tmp_path / "cut")).run())
    kept = [sorted(path.name for path in (tmp_path / run).glob("weights-*")) for run in ("whole", "cut")]
    assert kept == [["weights-0.pt", "weights-3.pt", "weights-6.pt"]] * 2
    for name in kept[0]:
        whole, cut = (RunFolder(tmp_path / run).load(name) for run in ("whole", "cut"))
        assert whole["step"] == cut["step"] == int(name[8:-3])
        for tensor, other in zip(whole["weights"].values(), cut["weights"].values(), strict=True):
            assert torch.equal(tensor, other)
    torch.manual_seed(chosen.training.seed)
    start = Network(chosen.model.architecture(corpus.vocabulary.size), chosen.model.dropout).weights()
    kept_start = RunFolder(tmp_path / "whole").load("weights-0.pt")["weights"]
    assert all(torch.equal(tensor, kept_start[name]) for name, tensor in start.items())


def handwritten_losses(chosen: Experiment, corpus: Corpus, steps: int) -> list[float]:
    """Computes the losses of the recurrent regime with plain SGD, without Wane's trainer. Resets the state at the start
    of every epoch."""
    torch.manual_seed(chosen.training.seed)
    network = Network(chosen.model.architecture(corpus.vocabulary.size)).train()
    batch, chunk = chosen.training.batch, chosen.training.chunk
    stream = torch.from_numpy(corpus.streams["train"])
    length = (len(stream) - 1) // batch
    losses: list[float] = []
    state = None
    for step in range(steps):
        start = step % (length // chunk) * chunk
        if start == 0:
            state = None
        rows = [stream[row * length + start : row * length + start + chunk + 1] for row in range(batch)]
        tokens = torch.stack(rows, dim=1)
        hidden, after = network(tokens[:-1], state)
        state = [tensor.detach() for tensor in after]
        logits = network.logits(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        norm = torch.sqrt(sum(((gradient**2).sum() for gradient in gradients), torch.zeros(())))
        scale = min(1.0, chosen.training.clip_norm / (norm.item() + 1e-6))
        with torch.no_grad():
            for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                parameter.sub_(chosen.training.learning_rate * scale * gradient)
        losses.append(loss.item())
    return losses


def test_training_matches_a_handwritten_loop_over_three_epochs(tmp_path: Path) -> None:
    corpus = text_corpus()
    model = ModelConfig(cell="lstm", hidden=12, layers=2)
    keys = {"steps": 80, "chunk": 64, "schedule": "constant", "warmup": 0, "evaluate_every": 100, "clip_norm": 0.2}
    chosen = experiment(model, optimizer="sgd", learning_rate=0.5, **keys)
    assert 20 < (len(corpus.streams["train"]) - 1) // 4 // 64 < 40
    losses = [progress.loss for progress in Trainer(chosen, corpus, RunFolder(tmp_path)).run()]
    assert losses == pytest.approx(handwritten_losses(chosen, corpus, 80), abs=1e-4)


def test_validation_runs_without_dropout_and_carries_the_state(tmp_path: Path) -> None:
    corpus = text_corpus()
    trainer = Trainer(experiment(steps=4), corpus, RunFolder(tmp_path))
    *_, last = trainer.run()
    stream = corpus.streams["valid"]
    length = (len(stream) - 1) // 4
    used = length // 8 * 8
    rows = [torch.from_numpy(stream[row * length : row * length + used + 1]) for row in range(4)]
    trainer.network.eval()
    with torch.no_grad():
        hidden, _ = trainer.network(torch.stack(rows, dim=1)[:-1])
        logits = trainer.network.logits(hidden)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.stack(rows, dim=1)[1:].flatten())
    assert last.valid_loss == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize("block", ["plain", "residual"])
def test_dropout_changes_training_but_not_evaluation(block: str) -> None:
    model = ModelConfig.model_validate({"cell": "lstm", "hidden": 16, "block": block, "dropout": 0.5})
    torch.manual_seed(1)
    network = Network(model.architecture(300), model.dropout)
    tokens = torch.arange(12).reshape(6, 2)
    once, again = (network.logits(network(tokens)[0]) for _ in range(2))
    assert not torch.equal(once, again)
    network.eval()
    once, again = (network.logits(network(tokens)[0]) for _ in range(2))
    assert torch.equal(once, again)


def test_weight_decay_does_not_apply_to_biases_and_gains(tmp_path: Path) -> None:
    trainer = Trainer(experiment(weight_decay=0.1), text_corpus(), RunFolder(tmp_path))
    for group in trainer.optimizer.param_groups:
        assert {parameter.ndim > 1 for parameter in group["params"]} == {group["weight_decay"] > 0}


def test_bf16_changes_the_loss_slightly(tmp_path: Path) -> None:
    corpus = text_corpus()
    losses = [
        next(Trainer(experiment(precision=precision), corpus, RunFolder(tmp_path / precision)).run()).loss
        for precision in ("float32", "bf16")
    ]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


def test_the_truncated_regime_starts_every_chunk_from_the_zero_state(tmp_path: Path) -> None:
    corpus = text_corpus()
    losses = {
        regime: [p.loss for p in Trainer(experiment(regime=regime), corpus, RunFolder(tmp_path / regime)).run()]
        for regime in ("recurrent", "truncated")
    }
    assert losses["recurrent"][0] == losses["truncated"][0]
    assert losses["recurrent"][1] != losses["truncated"][1]


def test_two_seeds_give_two_runs(tmp_path: Path) -> None:
    corpus = text_corpus()
    first, second = (
        next(Trainer(experiment(seed=seed), corpus, RunFolder(tmp_path / str(seed))).run()).loss for seed in (1, 2)
    )
    assert first != second


def test_a_run_of_another_experiment_is_not_resumed(tmp_path: Path) -> None:
    corpus = text_corpus()
    list(islice(Trainer(experiment(), corpus, RunFolder(tmp_path)).run(), 2))
    with pytest.raises(ResumeError, match=r"holds a run with training\.learning_rate = 0\.002, not 0\.5"):
        Trainer(experiment(learning_rate=0.5), corpus, RunFolder(tmp_path))


def test_a_run_can_be_extended(tmp_path: Path) -> None:
    corpus = text_corpus()
    list(Trainer(experiment(schedule="constant", steps=4), corpus, RunFolder(tmp_path)).run())
    steps = [p.step for p in Trainer(experiment(schedule="constant", steps=6), corpus, RunFolder(tmp_path)).run()]
    assert steps == [5, 6]


def test_a_loss_that_is_not_finite_stops_the_run_with_advice(tmp_path: Path) -> None:
    model = ModelConfig(cell="linear", hidden=16, layers=2)
    trainer = Trainer(experiment(model, optimizer="sgd", learning_rate=1e30), text_corpus(), RunFolder(tmp_path))
    with pytest.raises(FloatingPointError, match="try a smaller learning_rate"):
        list(trainer.run())


def test_the_best_weights_are_those_with_the_lowest_validation_loss(tmp_path: Path) -> None:
    trainer = Trainer(experiment(steps=40, learning_rate=0.05), text_corpus(), RunFolder(tmp_path))
    list(trainer.run())
    losses = {r["step"]: r["valid_loss"] for r in records(tmp_path) if "valid_loss" in r}
    best = min(losses, key=lambda step: losses[step])
    assert (trainer.best_step, trainer.best_loss) == (best, losses[best])
    assert torch.load(tmp_path / "best.pt", weights_only=True)["step"] == best


def test_the_error_names_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"has no best\.pt"):
        RunFolder(tmp_path).load("best.pt")


def rates(**keys: object) -> list[float]:
    config = TrainingConfig.model_validate({"steps": 10, "learning_rate": 1.0, "warmup": 2} | keys)
    return [round(learning_rate(config, step, 5 if config.schedule == "plateau" else None), 4) for step in range(10)]


def test_learning_rate_schedules() -> None:
    assert rates(schedule="constant") == [0.5] + [1.0] * 9
    assert rates(schedule="inverse_time") == [0.5, 1.0, *[round(1 / t, 4) for t in range(1, 9)]]
    cosine = rates(schedule="cosine")
    assert cosine[2] == 1.0
    assert cosine[6] == 0.5
    assert cosine == sorted(cosine[:2]) + sorted(cosine[2:], reverse=True)
    assert rates(schedule="plateau", decay_steps=5) == [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0]


def test_plateau_decays_when_validation_stops_improving(tmp_path: Path) -> None:
    chosen = experiment(
        schedule="plateau", steps=400, decay_steps=8, patience=2, learning_rate=0.1, evaluate_every=4, warmup=0
    )
    trainer = Trainer(chosen, text_corpus(), RunFolder(tmp_path))
    steps = [progress.step for progress in trainer.run()]
    decay = next(r for r in records(tmp_path) if "decay_start" in r)
    assert decay["stalled"] is True
    assert steps[-1] == decay["step"] + 8 < 400
    assert decay["step"] - max(s for s in _best_steps(tmp_path) if s <= decay["step"]) >= 8


def test_a_plateau_run_that_is_stopped_during_its_decay_resumes_the_decay(tmp_path: Path) -> None:
    corpus = text_corpus()
    chosen = experiment(schedule="plateau", steps=12, decay_steps=5, evaluate_every=4, checkpoint_every=3)
    whole = [(p.step, p.loss, p.learning_rate) for p in Trainer(chosen, corpus, RunFolder(tmp_path / "whole")).run()]
    list(islice(Trainer(chosen, corpus, RunFolder(tmp_path / "cut")).run(), 10))
    resumed = [(p.step, p.loss, p.learning_rate) for p in Trainer(chosen, corpus, RunFolder(tmp_path / "cut")).run()]
    assert resumed == whole[9:]
    assert next(r for r in records(tmp_path / "whole") if "decay_start" in r)["step"] == 7
    assert whole[-1][2] == 0.0


@pytest.mark.parametrize("key", ["test_share", "valid_share"])
def test_a_run_is_not_resumed_with_another_split(tmp_path: Path, key: str) -> None:
    corpus, chosen = text_corpus(), experiment()
    list(islice(Trainer(chosen, corpus, RunFolder(tmp_path)).run(), 2))
    other = chosen.model_copy(update={"data": chosen.data.model_copy(update={key: 0.2})})
    with pytest.raises(ResumeError, match=rf"holds a run with data\.{key} = 0\.05, not 0\.2"):
        Trainer(other, corpus, RunFolder(tmp_path))


def test_a_run_is_not_resumed_with_fewer_steps_than_done(tmp_path: Path) -> None:
    corpus = text_corpus()
    list(Trainer(experiment(), corpus, RunFolder(tmp_path)).run())
    with pytest.raises(ResumeError, match=r"is at step 8, past training\.steps = 6"):
        Trainer(experiment(steps=6), corpus, RunFolder(tmp_path))


def test_the_error_names_a_damaged_checkpoint(tmp_path: Path) -> None:
    corpus = text_corpus()
    list(islice(Trainer(experiment(), corpus, RunFolder(tmp_path)).run(), 2))
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ResumeError, match=r"checkpoint\.pt is damaged"):
        Trainer(experiment(), corpus, RunFolder(tmp_path))


def _best_steps(folder: Path) -> list[float]:
    return [r["step"] for r in records(folder) if r.get("valid_loss", math.inf) == r.get("best_loss")]
