"""Tests of the perplexities of the model on words, and of their table in the model card."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.page import with_tables
from research import words
from tests.training.corpora import experiment
from wane.training.config import ModelConfig
from wane.training.data import load_corpus
from wane.training.evaluate import evaluate_split
from wane.training.loop import Trainer
from wane.training.run import open_run
from wane.training.run_folder import RunFolder

ROOT = Path(__file__).parents[2]


def test_a_run_has_its_curve_and_its_perplexities_a_word(tmp_path: Path) -> None:
    model = ModelConfig(cell="gated", hidden=16, block="residual", contraction=0.9)
    chosen = experiment(model, averaged=0.5)
    chosen = chosen.model_copy(
        update={"data": chosen.data.model_copy(update={"vocabulary": "words", "vocabulary_size": 200})}
    )
    corpus = load_corpus(chosen.data)
    list(Trainer(chosen, corpus, RunFolder(tmp_path)).run())
    found = words.measure(tmp_path, None, lambda tokens: None)
    assert [point["step"] for point in found["curve"]] == [4, 8]
    assert found["curve"][-1]["valid"] == pytest.approx(found["perplexities"]["valid"][0], rel=1e-2)
    trained = open_run(tmp_path, None)
    losses = evaluate_split(trained.network, corpus, "test", [8], 10)
    assert losses.words == losses.tokens
    assert found["perplexities"]["test"][0] == pytest.approx(math.exp(losses.recurrent), rel=1e-6)
    assert found["perplexities"]["test"][512] < found["perplexities"]["test"][0]


def test_the_model_card_has_the_table_of_the_stored_perplexities() -> None:
    document = json.loads((ROOT / words.FIGURES).read_bytes())
    card = (ROOT / words.CARD).read_text(encoding="utf-8")
    assert with_tables(card, {words.TABLE: words.table(document)}, "the model card") == card
    assert document["curve"][-1]["step"] >= document["best_step"] > 0
