"""The characters of Penn Treebank (Marcus et al. 1993, as Mikolov et al. 2010 prepared it): predicts the next one.

The files are `train.txt`, `valid.txt` and `test.txt` with 10,000 distinct words.
"""

from __future__ import annotations

import math
from pathlib import Path

from research.paper.corpora import SPLITS, Corpus, Files, check_sizes, stream
from research.paper.network import Shape
from research.paper.task import CELLS, Task
from research.paper.training import Recipe

FILES = {
    "train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
SIZES = (929_589, 73_760, 82_430)  # words, with one <eos> a line


def read(folder: Path, checked: bool = True) -> Corpus:
    """Reads Penn Treebank's characters. A line's end is a character. Raises DataError."""
    files = Files(folder, FILES if checked else None)
    lines = {split: files.lines(f"{split}.txt") for split in SPLITS}
    sizes = [sum(len(line.split()) + 1 for line in some) for some in lines.values()]
    check_sizes("Penn Treebank", sizes, SIZES if checked else None)
    return stream("ptb", {split: "\n".join([*some, ""]) for split, some in lines.items()}, files)


TASK = Task(
    "ptb",
    "Penn Treebank, characters",
    "ptb",
    read,
    "bits a character",
    lambda split: float(split["loss"]) / math.log(2),
    Recipe(
        dict.fromkeys(CELLS, Shape(32, 256)),
        learning_rate=2e-3,
        batch=32,
        epochs=2,
        patience=2,
        chunk=50,
        project_every=10,
    ),
    seeds=1,
    windows=(),
    source={
        ("rnn_tanh", False): "1.8 (recalled)",
        ("rnn_tanh", True): "1.9 (recalled)",
        ("lstm", False): "1.4 (recalled)",
        ("lstm", True): "1.9 (recalled)",
    },
    differs="width 256 and two epochs (a processor); the characters of Mikolov's word-level files, with sentence ends",
    full=Recipe(
        dict.fromkeys(CELLS, Shape(128, 1024)),
        learning_rate=1e-3,
        batch=32,
        epochs=30,
        patience=4,
        chunk=150,
        project_every=10,
    ),
)
