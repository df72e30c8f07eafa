from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.training.corpora import experiment, text_corpus
from wane.models.networks import LockedDropout, Network
from wane.training.config import Experiment, ModelConfig, TeacherConfig
from wane.training.errors import ConfigError, ResumeError, RunError
from wane.training.loop import Trainer
from wane.training.losses.teacher import Teacher
from wane.training.run_folder import RunFolder

STUDENT = ModelConfig(cell="gated", hidden=12, block="residual", feed_forward=8, dropout=0.2)


def taught(run: Path, **keys: Any) -> Experiment:
    """Returns an experiment whose teacher is the run in the folder `run`."""
    return experiment(STUDENT, **{"teacher": {"run": str(run), "weight": 0.6, "temperature": 2.0}, **keys})


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    model = ModelConfig(cell="lstm", hidden=16, dropout=0.3, locked=True, weight_dropout=0.5, embedding_dropout=0.1)
    keys = {"activation_penalty": 0.2, "slowness_penalty": 0.1, "steps": 40, "evaluate_every": 20}
    list(Trainer(experiment(model, learning_rate=2e-2, **keys), text_corpus(), RunFolder(folder)).run())
    return folder


def test_the_loss_is_the_mixture_of_the_targets_and_of_the_teacher_s_predictions(teacher_run: Path) -> None:
    corpus, lanes = text_corpus(), 4
    teacher = Teacher(TeacherConfig(run=teacher_run, weight=0.6, temperature=2.0), corpus, lanes, torch.device("cpu"))
    trainer = Trainer(experiment(STUDENT), corpus, RunFolder(teacher_run.parent / "unused"))
    network = RunFolder(teacher_run).network(corpus.vocabulary.size)[0]
    state = None
    for step in range(3):
        batch = trainer.train_lanes.batch(step, torch.device("cpu"))
        logits = torch.randn(*batch.targets.shape, corpus.vocabulary.size)
        found = teacher.losses(batch, logits, carried=step > 0)
        with torch.no_grad():
            hidden, state = network(batch.inputs, state)
            p = torch.softmax(network.logits(hidden) / 2, -1)
        log_q = torch.log_softmax(logits / 2, -1)
        divergence = (p * (p.log() - log_q)).sum(-1)
        hard = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        expected = 0.4 * hard.view_as(divergence) + 0.6 * 4 * divergence
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_taught_run_that_is_resumed_has_the_losses_of_an_uninterrupted_run(tmp_path: Path, teacher_run: Path) -> None:
    corpus, chosen = text_corpus(), taught(teacher_run)
    whole = [progress.loss for progress in Trainer(chosen, corpus, RunFolder(tmp_path / "whole")).run()]
    list(islice(Trainer(chosen, corpus, RunFolder(tmp_path / "cut")).run(), 5))
    resumed = Trainer(chosen, corpus, RunFolder(tmp_path / "cut"))
    assert [progress.loss for progress in resumed.run()] == whole[4:]


def test_a_taught_run_is_not_resumed_with_another_teacher(tmp_path: Path, teacher_run: Path) -> None:
    """The teacher's folder has other weights. The refused run is left as it is."""
    copy, corpus = tmp_path / "teacher", text_corpus()
    shutil.copytree(teacher_run, copy)
    chosen, folder = taught(copy), RunFolder(tmp_path / "run")
    list(islice(Trainer(chosen, corpus, folder).run(), 5))
    kept = (folder.path / "checkpoint.pt").read_bytes()
    best = RunFolder(copy).load("best.pt")
    best["weights"]["head.bias"][0] += 1
    RunFolder(copy).save("best.pt", best)
    with pytest.raises(ResumeError, match=r"whose teacher had other weights \(SHA-256 [0-9a-f]{64}\)"):
        Trainer(chosen, corpus, folder)
    assert (folder.path / "checkpoint.pt").read_bytes() == kept
    shutil.copytree(teacher_run, copy, dirs_exist_ok=True)
    assert Trainer(chosen, corpus, folder).step == 4


def test_a_student_comes_closer_to_its_teacher(tmp_path: Path, teacher_run: Path) -> None:
    chosen = taught(
        teacher_run, steps=60, learning_rate=2e-2, evaluate_every=60, teacher={"run": str(teacher_run), "weight": 0.99}
    )
    losses = [progress.loss for progress in Trainer(chosen, text_corpus(), RunFolder(tmp_path)).run()]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path, teacher_run: Path) -> None:
    with pytest.raises(RunError, match="has another vocabulary"):
        Trainer(taught(teacher_run), text_corpus(320), RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"negatives": 5}, "needs the full softmax"), ({"teacher": {"run": "x", "weight": 1.5}}, "teacher.weight")],
)
def test_a_teacher_s_keys_are_checked(keys: dict[str, Any], message: str) -> None:
    record = taught(Path("runs/x")).model_dump(mode="json")
    record["training"] |= keys
    with pytest.raises(ConfigError, match=message):
        Experiment.parse(Path("mine.toml"), record)


def test_a_teacher_s_run_is_relative_to_the_experiment_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\n[model]\ncell = "gru"\nhidden = 8\n[data]\nkind = "text"\n[training]\nsteps = 3\n'
        '[training.teacher]\nrun = "../runs/big"\n'
    )
    read = Experiment.read(tmp_path / "mine.toml").training.teacher
    assert read is not None and read.run == tmp_path.parent / "runs" / "big"


def test_locked_dropout_has_one_mask_for_all_tokens_of_a_sequence() -> None:
    torch.manual_seed(1)
    dropout = LockedDropout(0.5)
    y = dropout(torch.ones(6, 3, 40))
    assert torch.equal(y, y[:1].expand_as(y))
    assert 0 < int((y[0] == 0).sum()) < 120 and not torch.equal(y[0, 0], y[0, 1])
    assert torch.equal(dropout.eval()(torch.ones(2, 3, 4)), torch.ones(2, 3, 4))


def test_weight_dropout_drops_entries_of_the_recurrent_matrix_in_training_only() -> None:
    torch.manual_seed(2)
    model = ModelConfig(cell="lstm", hidden=8).architecture(30)
    network, plain = Network(model, weight_dropout=0.9999), Network(model)
    plain.load_state_dict(network.state_dict())
    tokens = torch.randint(30, (5, 2))
    torch.testing.assert_close(network.eval()(tokens)[0], plain.eval()(tokens)[0])
    with torch.no_grad():
        plain.layers[0].cell.weight_hh_l0.zero_()  # type: ignore[union-attr, operator]
    torch.testing.assert_close(network.train()(tokens)[0], plain(tokens)[0])


def test_the_penalties_are_the_mean_squares_of_activations_and_of_their_changes(tmp_path: Path) -> None:
    trainer = Trainer(
        experiment(STUDENT, activation_penalty=2.0, slowness_penalty=3.0), text_corpus(), RunFolder(tmp_path)
    )
    hidden = torch.randn(7, 4, 12)
    changes = torch.stack([hidden[t + 1] - hidden[t] for t in range(6)])
    expected = 2 * (hidden**2).mean() + 3 * (changes**2).mean()
    torch.testing.assert_close(trainer._penalty(hidden), expected)
