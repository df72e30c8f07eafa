"""Small corpora and experiments for the training tests."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from wane.models.layer_registry import Kind
from wane.models.manifest import Start
from wane.training.config import DataConfig, Experiment, ModelConfig, TrainingConfig
from wane.training.data import Corpus, load_corpus

REAL_TEXT = Path(__file__).parents[2] / "LICENSE"


def text_corpus(size: int = 300) -> Corpus:
    """Returns a corpus of the licence's text with a small byte-level vocabulary."""
    return load_corpus(DataConfig(kind="text", path=REAL_TEXT, vocabulary_size=size))


def experiment(model: ModelConfig | None = None, **training: object) -> Experiment:
    """Returns a tiny experiment on the licence's text. `training`: keys of the table `[training]` that replace the
    defaults of this function."""
    keys = {"steps": 8, "batch": 4, "chunk": 8, "warmup": 2, "evaluate_every": 4, "checkpoint_every": 2, "threads": 1}
    return Experiment(
        name="tiny",
        model=model or ModelConfig(cell="gated", hidden=16, layers=2, block="residual", feed_forward=8, dropout=0.2),
        data=DataConfig(kind="text", path=REAL_TEXT, vocabulary_size=300),
        training=TrainingConfig.model_validate(keys | training),
    )


def write_events(path: Path, sequences: list[list[str]]) -> Path:
    """Writes each sequence of event names as one line of JSON to `path`. Returns `path`."""
    path.write_text("".join(json.dumps(sequence) + "\n" for sequence in sequences))
    return path


def event_corpus(count: int = 120, start: Start = "token", unknown: int = 0) -> Corpus:
    """Returns a corpus of `count` random sessions. Nine different events occur in them. In the last `unknown` sessions,
    each known event is followed by an event that is not in the vocabulary."""
    random = np.random.default_rng(8)
    sequences = [[f"e{event}" for event in random.integers(9, size=random.integers(1, 12))] for _ in range(count)]
    for sequence in sequences[count - unknown :]:
        sequence[:] = [name for event in sequence for name in (event, f"new-{event}")]
    with tempfile.TemporaryDirectory() as folder:
        path = write_events(Path(folder) / "events.jsonl", sequences)
        return load_corpus(DataConfig(kind="events", path=path, start=start, valid_share=0.2, test_share=0.2))


def event_experiment(cell: Kind = "gru", cache: int | None = None, **training: object) -> Experiment:
    """Returns a tiny experiment on events. `training`: keys of the table `[training]` that replace the defaults of this
    function."""
    keys = {"steps": 8, "batch": 4, "chunk": 5, "warmup": 2, "evaluate_every": 4, "checkpoint_every": 2, "threads": 1}
    return Experiment(
        name="tiny",
        model=ModelConfig(cell=cell, hidden=8, cache=cache),
        data=DataConfig(kind="events"),
        training=TrainingConfig.model_validate(keys | training),
    )
