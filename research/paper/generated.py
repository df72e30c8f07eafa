"""Writes small random corpora in the formats of the real files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from research.paper.corpora import KEYS, SPLITS


def generate(folder: Path, seed: int = 0) -> None:
    """Writes small random corpora in the formats of the real files, into the folders `jsb`, `atis`, `ptb` and
    `wikitext-2`."""
    from scipy.io import savemat

    random = np.random.default_rng(seed)
    for name in ("jsb", "atis", "ptb", "wikitext-2"):
        (folder / name).mkdir(parents=True, exist_ok=True)

    def rolls(count: int) -> Any:
        cells = np.empty((1, count), object)
        for index in range(count):
            chord = random.integers(0, KEYS, 4)
            roll = np.zeros((int(random.integers(6, 12)), KEYS), np.uint8)
            for step, row in enumerate(roll):
                row[(chord + step) % KEYS] = 1
            cells[0, index] = roll
        return cells

    savemat(folder / "jsb" / "JSB_Chorales.mat", {"traindata": rolls(12), "validdata": rolls(3), "testdata": rolls(3)})
    tags = ("O", "B-city", "I-city")
    (folder / "atis" / "vocab.slot").write_text("\n".join(tags) + "\n", encoding="utf-8")
    for split, count in zip(SPLITS, (40, 8, 8), strict=True):
        sentences = [
            " ".join(
                "to:O new:B-city york:I-city" if random.random() < 0.5 else f"word{random.integers(9)}:O"
                for _ in range(random.integers(1, 5))
            )
            for _ in range(count)
        ]
        text = "".join(f"{sentence} <=> flight\n" for sentence in sentences)
        (folder / "atis" / split).write_text(text, encoding="utf-8")
        for text_folder in ("ptb", "wikitext-2"):
            lines = [
                " " + " ".join(f"w{number}" for number in random.integers(0, 12, random.integers(3, 9))) + " \n"
                for _ in range(count * 2)
            ]
            (folder / text_folder / f"{split}.txt").write_text("".join(lines), encoding="utf-8")
