"""Tests of the paper's experiments: readers, windows, spans, resumed trainings, and the whole program on generated
data."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from research.paper import __main__ as program
from research.paper import atis, characters, jsb, words
from research.paper.corpora import Corpus
from research.paper.generated import generate
from research.paper.network import PaperNetwork
from research.paper.spans import span_f1, spans
from research.paper.tables import smallest_k
from research.paper.task import CELLS, Task
from research.paper.training import Run, Training, evaluate, padded, train
from wane.training.errors import DataError

DATA = Path(os.environ.get("WANE_DATA", "missing"))
needs_data = pytest.mark.skipif(not (DATA / "jsb").is_dir(), reason="set WANE_DATA to a folder with jsb, atis and ptb")
TASKS = [task.small() for task in program.TASKS.values()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder)
    return folder


def corpus_of(task: Task, data: Path) -> Corpus:
    return task.read(data / task.folder, False)


@needs_data
@pytest.mark.parametrize("module", [jsb, atis, characters, words])
def test_the_real_files_have_the_published_sizes(module: Any) -> None:
    corpus = module.read(DATA / module.TASK.folder)
    assert corpus.hashes == module.FILES
    assert corpus.outputs == {"jsb": 88, "atis": 130, "ptb": 50, "words": 33_278}[corpus.name]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_another_file_is_refused_by_its_hash(task: Task, data: Path) -> None:
    with pytest.raises(DataError, match="SHA-256"):
        task.read(data / task.folder, True)


def test_faults_of_files_are_named(tmp_path: Path) -> None:
    generate(tmp_path)
    (tmp_path / "jsb" / "JSB_Chorales.mat").write_bytes(b"no piano rolls")
    with pytest.raises(DataError, match=r"JSB_Chorales\.mat"):
        jsb.read(tmp_path / "jsb", False)
    with (tmp_path / "atis" / "test").open("a", encoding="utf-8") as file:
        file.write("to:O denver <=> flight\n")
    with pytest.raises(DataError, match="to:O denver"):
        atis.read(tmp_path / "atis", False)
    (tmp_path / "atis" / "test").write_text("to:B-unheard <=> flight\n", encoding="utf-8")
    with pytest.raises(DataError, match="B-unheard"):
        atis.read(tmp_path / "atis", False)
    with pytest.raises(DataError, match="No such file"):
        words.read(tmp_path / "ptb" / "missing", False)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_window_is_read_from_the_zero_state(cell: Any, bidirectional: bool, data: Path) -> None:
    task = program.TASKS["atis"].small()
    corpus = corpus_of(task, data)
    network = PaperNetwork(corpus, cell, task.recipe.shapes[cell], bidirectional).eval()
    sequences = corpus.splits["train"][:5]
    inputs, _, lengths = padded(sequences)
    found = network.features(inputs, lengths, 3)
    hidden = task.recipe.shapes[cell].hidden
    for index, (sequence, _) in enumerate(sequences):
        for end in range(len(sequence)):
            forwards, _ = network.forwards(network.embedded(sequence[max(0, end - 2) : end + 1, None]))
            torch.testing.assert_close(found[end, index, :hidden], forwards[-1, 0])
            if network.backwards is not None:
                later = sequence[end : end + 3].flip(0)
                backwards, _ = network.backwards(network.embedded(later[:, None]))
                torch.testing.assert_close(found[end, index, hidden:], backwards[-1, 0])
    whole = network.features(inputs, lengths, None)
    torch.testing.assert_close(network.features(inputs, lengths, len(inputs)), whole)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_window_of_everything_has_the_loss_of_the_whole_input(task: Task, data: Path) -> None:
    corpus = corpus_of(task, data)
    network = PaperNetwork(corpus, "rnn_tanh", task.recipe.shapes["rnn_tanh"], False)
    network.project(0.9)
    found = evaluate(network, corpus, "test", (1, 24))
    assert found["by_k"][24] == pytest.approx(found["loss"], rel=1e-5)
    assert found["by_k"][1] != pytest.approx(found["loss"], rel=1e-5)


def test_the_weights_are_the_best_in_the_window_of_the_training(data: Path, tmp_path: Path) -> None:
    task = atis.TASK.small()
    corpus = corpus_of(task, data)
    training = Training(corpus, task.recipe, Run("atis", "lstm", False, 2), tmp_path)
    training.finish(lambda: None)
    found = evaluate(training.network, corpus, "valid", (2,))
    assert training.best == found["by_k"][2] != found["loss"]


def test_spans_follow_conlleval() -> None:
    assert spans(["B-city", "I-city", "O", "I-time", "B-time", "I-city"]) == {
        ("city", 0, 2),
        ("time", 3, 4),
        ("time", 4, 5),
        ("city", 5, 6),
    }
    expected = [["B-city", "I-city", "O"], ["O", "B-time"]]
    predicted = [["B-city", "O", "O"], ["O", "B-time"]]
    assert span_f1(predicted, expected) == pytest.approx(0.5)  # one of two, and one of two
    assert span_f1([["O"]], [["B-city"]]) == 0


@pytest.mark.parametrize("cell", CELLS)
def test_a_stable_network_is_contractive_by_the_certificate(cell: Any, data: Path) -> None:
    for task in TASKS:
        corpus = corpus_of(task, data)
        network = PaperNetwork(corpus, cell, task.recipe.shapes[cell], task.bidirectional)
        for direction in network.directions:
            with torch.no_grad():
                direction.cell.get_parameter("weight_hh_l0").mul_(5)
        before = network.factor()
        assert before is None or before > 1
        network.project(0.9)
        after = network.factor()
        assert after is not None
        assert after <= 0.9


@pytest.mark.parametrize("name", ["jsb", "words"])
def test_an_interrupted_training_ends_as_an_uninterrupted_one(name: str, data: Path, tmp_path: Path) -> None:
    task = program.TASKS[name].small()
    corpus, run = corpus_of(task, data), Run(name, "lstm", True, None)
    whole = train(corpus, task.recipe, run, tmp_path / "whole", lambda: None)
    part = tmp_path / "part"
    part.mkdir()
    first = Training(corpus, replace(task.recipe, epochs=1), run, part)
    first._snapshot_at = Training(corpus, task.recipe, run, tmp_path / "other")._snapshot_at
    first.finish(lambda: None)
    resumed = train(corpus, task.recipe, run, part, lambda: None)
    for field in ("test", "valid", "factor", "epochs"):
        assert resumed[field] == whole[field]
    again: list[None] = []
    assert train(corpus, task.recipe, run, part, lambda: again.append(None)) == json.loads(
        (part / f"{run.name}.json").read_bytes()
    )
    assert len(again) == task.recipe.epochs


def test_the_smallest_k_is_the_start_of_all_good_windows() -> None:
    assert smallest_k({"loss": 1.0, "by_k": {"1": 1.2, "2": 1.005, "4": 1.02, "8": 1.001, "16": 1.0}}) == 8
    assert smallest_k({"loss": 1.0, "by_k": {"1": 1.2, "2": 1.1}}) is None


def test_all_experiments_run_on_generated_data(tmp_path: Path) -> None:
    page = tmp_path / "paper.md"
    page.write_text(program.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    assert program.main(["all", "--smoke", "--page", str(page), "--figures", str(tmp_path)]) == 0
    for name in (*program.TASKS, *program.FIGURES):
        assert (tmp_path / f"paper_{name}.json").exists()
        assert f"<!-- {name} -->\n\n| " in page.read_text(encoding="utf-8")
    for name in program.FIGURES:
        assert (tmp_path / f"paper_{name}.png").stat().st_size > 5000
