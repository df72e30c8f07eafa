"""The words of WikiText-2 (Merity et al. 2016, arXiv 1609.07843): predicts the next one.

The files are `train.txt`, `valid.txt` and `test.txt`.
"""

from __future__ import annotations

import math
from pathlib import Path

from research.paper.corpora import SPLITS, Corpus, Files, check_sizes, stream
from research.paper.network import Shape
from research.paper.task import CELLS, Task
from research.paper.training import Recipe

FILES = {
    "train.txt": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "valid.txt": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "test.txt": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}
SIZES = (2_088_628, 217_646, 245_569)  # words, with one <eos> a line


def read(folder: Path, checked: bool = True) -> Corpus:
    """Reads WikiText-2's words. The most frequent words of the training split have the smallest numbers, as adaptive
    softmax requires. Raises DataError."""
    files = Files(folder, FILES if checked else None)
    words = {
        split: [word for line in files.lines(f"{split}.txt") for word in (*line.split(), "<eos>")] for split in SPLITS
    }
    check_sizes("WikiText-2", [len(some) for some in words.values()], SIZES if checked else None)
    return stream("words", words, files)


TASK = Task(
    "words",
    "WikiText-2, words",
    "wikitext-2",
    read,
    "perplexity",
    lambda split: math.exp(split["loss"]),
    Recipe(
        dict.fromkeys(CELLS, Shape(256, 256, (2_000, 10_000), dropout=0.2)),
        learning_rate=2e-3,
        batch=20,
        epochs=2,
        patience=2,
        project_every=10,
    ),
    seeds=1,
    windows=(35,),
    source={
        ("rnn_tanh", False): "146.7",
        ("rnn_tanh", True): "143.5",
        ("lstm", False): "92.3 (final paper: 95.7, recalled)",
        ("lstm", True): "95.1 (final paper: 113.2, recalled)",
    },
    differs="width 256, adaptive softmax, two epochs (a processor), so the source's figures are anchors",
    full=Recipe(
        dict.fromkeys(CELLS, Shape(700, 700, dropout=0.5)),
        learning_rate=1e-3,
        batch=20,
        epochs=40,
        patience=4,
        project_every=10,
    ),
)
