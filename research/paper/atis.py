"""ATIS (Hemphill et al. 1990): predicts the slot tag of each word of a request for flights.

The files are `train`, `valid`, `test` and `vocab.slot` of atis-2 in
github:sz128/slot_filling_and_intent_detection_of_SLU.
"""

from __future__ import annotations

from pathlib import Path

import torch

from research.paper.corpora import SPLITS, Corpus, Files, check_sizes, numbered
from research.paper.network import Shape
from research.paper.task import CELLS, Task
from research.paper.training import Recipe
from wane.training.errors import DataError

UNKNOWN = "<unk>"

FILES = {
    "train": "d8c90e774ec11ac4bf2058a353ff5353e66dd34257a2f95c3a460947943c4e78",
    "valid": "69e4c537b516ee831f239a43c9c22dc9cb51d96aefae7d683746fc98e2f97ca1",
    "test": "7b336b6a4ab34196d0f9eac8b17514f5d22e43746fbbe50bfecf22dc64460881",
    "vocab.slot": "89227be1a1434c14f37c920e1ec8470ab0564aabfe86684c87c08da6e63c81e8",
}
SIZES = ((4_478, 50_497), (500, 5_703), (893, 9_164))  # sentences, words


def read(folder: Path, checked: bool = True) -> Corpus:
    """Reads ATIS. The target of each word is its slot tag. A word that the training split lacks is UNKNOWN. Raises
    DataError."""
    files = Files(folder, FILES if checked else None)
    tags = tuple(dict.fromkeys(line for line in files.lines("vocab.slot") if line))
    sentences = {
        split: [_words_and_tags(files, split, line) for line in files.lines(split) if line] for split in SPLITS
    }
    sizes = [(len(split), sum(map(len, split))) for split in sentences.values()]
    check_sizes("ATIS", sizes, SIZES if checked else None)
    words = numbered([UNKNOWN, *(word for sentence in sentences["train"] for word, _ in sentence)])
    numbers = numbered(tags)
    missing = {tag for split in sentences.values() for sentence in split for _, tag in sentence} - numbers.keys()
    if missing:
        raise DataError(f"{folder / 'vocab.slot'}: lacks the tag {min(missing)}")
    splits = {
        split: [
            (
                torch.tensor([words.get(word, words[UNKNOWN]) for word, _ in sentence]),
                torch.tensor([numbers[tag] for _, tag in sentence]),
            )
            for sentence in some
        ]
        for split, some in sentences.items()
    }
    return Corpus("atis", len(words), len(tags), splits, files.hashes, tags)


def _words_and_tags(files: Files, split: str, line: str) -> list[tuple[str, str]]:
    words, separator, _ = line.partition(" <=> ")
    pairs = [pair.rpartition(":") for pair in words.split()]
    if not separator or not all(word and tag for word, _, tag in pairs):
        raise DataError(f"{files.folder / split}: not of the form 'word:tag word:tag <=> intent': {line[:80]!r}")
    return [(word, tag) for word, _, tag in pairs]


TASK = Task(
    "atis",
    "ATIS slot filling",
    "atis",
    read,
    "span F1, %",
    lambda split: float(split["f1"]),
    Recipe(
        dict.fromkeys(CELLS, Shape(64, 100, dropout=0.5)),
        learning_rate=3e-3,
        batch=32,
        epochs=30,
        patience=6,
        project_every=10,
    ),
    seeds=3,
    windows=(1, 2, 4, 8),
    bidirectional=True,
    source={
        ("rnn_tanh", False): "94.7 (recalled)",
        ("rnn_tanh", True): "94.7 (recalled)",
        ("lstm", False): "95.1 (recalled)",
        ("lstm", True): "94.6 (recalled)",
    },
    differs="embeddings of 64, width 100 in each direction, dropout 0.5, Adam; the source's figures stand "
    "beside the networks of two directions",
)
