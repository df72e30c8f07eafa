"""Trains and exports models of events. Compares their rankings with those of the baselines and, on generated clicks,
with the best possible recall and perplexity."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from rich.console import Console

from examples.clickstream import Shop, generate, optimum, write
from tests.training.corpora import write_events
from wane.cli import main
from wane.models.layer_registry import Kind
from wane.models.manifest import Certificate, Start
from wane.training.config import DataConfig, Experiment, ModelConfig, TrainingConfig
from wane.training.evaluate_events import evaluate_events
from wane.training.rankings.metrics import Rankings
from wane.training.run import Trained, describe_certificate, open_run, train

DATA = os.environ.get("WANE_DATA")
BASELINES = ("popularity", "last item", "Markov", "V-SkNN")


def trained(folder: Path, data: Path, model: ModelConfig, start: Start = "token", **training: object) -> Trained:
    """Trains a model on events, with every event in the vocabulary. Discards the console output. Returns the trained
    run."""
    keys = {"batch": 64, "chunk": 64, "learning_rate": 1e-2, "warmup": 20, "threads": 1}
    experiment = Experiment(
        name="tiny",
        model=model,
        data=DataConfig(kind="events", path=data, start=start),
        training=TrainingConfig.model_validate(keys | {"evaluate_every": training["steps"]} | training),
    )
    train(experiment, None, folder, None, "none", Console(quiet=True))
    return open_run(folder, None)


def shop(folder: Path, leave: float) -> tuple[Path, float, float]:
    """Writes generated clicks of a shop. Returns the path of their file, and the best possible recall@20 and perplexity
    on the test split."""
    of = Shop(aisles=12, items=12, popular=40, leave=leave)
    clicks = generate(of, 3000, 1)
    write(of, clicks, folder)
    best = optimum(of, clicks.last(0.05))
    return folder / "clicks.csv", best.recall[20], best.perplexity


def rankings(run: Trained) -> tuple[float, Rankings]:
    """Returns the perplexity and the ranking metrics of the run on the test split, over all positions."""
    losses, found = evaluate_events(run.network, run.corpus, "test", (1, 2), 10**6, cache=run.cache)
    return float(np.exp(losses.recurrent)), found


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["gated", "gru"])
def test_recurrent_models_beat_every_baseline_where_memory_matters(tmp_path: Path, cell: Kind) -> None:
    data, best_recall, best_perplexity = shop(tmp_path, Shop.leave)
    block: Literal["plain", "residual"] = "residual" if cell == "gated" else "plain"
    run = trained(tmp_path / "run", data, ModelConfig(cell=cell, hidden=48, block=block), steps=400)
    perplexity, found = rankings(run)
    recall = {name: metrics.recall[20] for name, metrics in found.methods.items()}
    assert recall["recurrent"] >= max(recall[name] for name in BASELINES)
    assert recall["recurrent"] > recall["window 1"]
    assert best_recall - 0.05 < recall["recurrent"] < best_recall + 0.01
    assert best_perplexity * 0.99 < perplexity < best_perplexity * 1.3


@pytest.mark.slow
def test_a_table_of_pairs_is_the_best_method_where_only_the_last_click_matters(tmp_path: Path) -> None:
    data, best_recall, _ = shop(tmp_path, 0.0)
    run = trained(tmp_path / "run", data, ModelConfig(cell="gru", hidden=48), steps=150)
    _, found = rankings(run)
    mrr = {name: metrics.mrr[20] for name, metrics in found.methods.items()}
    assert mrr["Markov"] >= max(mrr.values()) - 0.005
    assert found.methods["Markov"].recall[20] == pytest.approx(best_recall, abs=0.01)


@pytest.mark.slow
def test_the_sampled_softmax_learns_the_same_ranking(tmp_path: Path) -> None:
    data, best_recall, _ = shop(tmp_path, Shop.leave)
    model = ModelConfig(cell="gru", hidden=48, embedding=64, tied=False)
    run = trained(tmp_path / "run", data, model, "zero", steps=400, negatives=64)
    recall = {name: metrics.recall[20] for name, metrics in rankings(run)[1].methods.items()}
    assert recall["recurrent"] >= max(recall[name] for name in BASELINES)
    assert recall["recurrent"] > best_recall - 0.06


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    """A folder with the slot tags of the words in ATIS (spoken flight requests). It has one file per split. Each
    session of a file has the tags of one request."""
    if DATA is None or not (Path(DATA) / "atis").exists():
        pytest.skip("set WANE_DATA to a folder with atis/train, atis/valid and atis/test")
    folder = tmp_path / "atis"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        lines = (Path(DATA) / "atis" / split).read_text(encoding="utf-8").splitlines()
        tags = [[pair.rsplit(":", 1)[1] for pair in line.split(" <=> ")[0].split()] for line in lines]
        write_events(folder / f"{split}.jsonl", tags)
    return folder


@pytest.mark.slow
def test_a_gated_model_beats_every_baseline_on_the_slots_of_atis(tmp_path: Path, slots: Path) -> None:
    model = ModelConfig(cell="gated", hidden=32, block="residual", cache=16)
    run = trained(tmp_path / "run", slots, model, steps=200)
    assert run.corpus.hashes.keys() == {"train.jsonl", "valid.jsonl", "test.jsonl"}
    assert run.corpus.missed["test"] > 0
    _, found = rankings(run)
    assert found.missed_share > 0
    for k in (1, 5):
        recall = {name: metrics.recall[k] for name, metrics in found.methods.items()}
        assert recall["recurrent"] > max(recall[name] for name in BASELINES)


def test_a_run_on_events_is_evaluated_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = Shop(aisles=2, items=4, popular=4)
    write(of, generate(of, 200, 3), tmp_path)
    model = ModelConfig(cell="gru", hidden=8, contraction=0.5)
    trained(tmp_path / "run", tmp_path / "clicks.csv", model, "zero", steps=6, batch=8)
    assert main(["evaluate", str(tmp_path / "run"), "--positions", "200"]) == 0
    printed = capsys.readouterr().out
    for text in ("V-SkNN", "last item", "window 8", "recall", "NDCG", "next events", "perplexity per event"):
        assert text in printed
    assert "per word" not in printed and "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    *by_cutoff, test = [line for line in printed.splitlines() if line.startswith("Markov ")]
    assert [len(re.findall(r"\d?\.\d{3}", row)) for row in by_cutoff] == [10] * 3  # six metrics and four intervals
    assert len(re.findall(r"[+-]\d\.\d{3} \(\d\.\d{3}\)", test)) == 4
    saved = json.loads((tmp_path / "run" / "rankings.json").read_text())
    assert saved.keys() == {"valid", "test"}
    assert set(saved["test"]["methods"]["Markov"]["recall"]) == {"1", "5", "10", "20"}
    assert main(["export", str(tmp_path / "run"), "--bundles", str(tmp_path / "bundles")]) == 0
    manifest = json.loads(next((tmp_path / "bundles").rglob("manifest.json")).read_text())
    assert (manifest["unknown"], manifest["start"]) == ("skip", "zero")
    assert "contractive" in capsys.readouterr().out


def test_the_difference_between_contractive_and_certified_is_explained() -> None:
    reason = "the bound is 0.2"
    loose = describe_certificate(Certificate(contractive=True, reason=reason, layers=(), error_bound=(1.0, 0.2)))
    assert loose == (
        "contractive (the state forgets its start), but not certified (which needs an error_bound of at most 0.001 for "
        "the largest window): the bound is 0.2"
    )
    tight = describe_certificate(Certificate(contractive=True, certified=True, layers=(), error_bound=(1.0, 1e-4)))
    assert tight == "contractive and certified: the error_bound of the largest window is at most 0.001"
    assert describe_certificate(Certificate(contractive=False, reason=reason, layers=())).startswith("not contractive")
