"""The sequences of the paper's experiments, and the files that they are read from.

A reader checks the SHA-256 of every file and the sizes of the splits. The data are not part of the project.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wane.training.errors import DataError

SPLITS = ("train", "valid", "test")
KEYS = 88
"""The number of keys of a piano, and of entries of a chord."""

Sequences = list[tuple[Tensor, Tensor]]
"""For each sequence, the inputs (T) int64 or (T, KEYS) float32, and the targets in the same form."""


@dataclass(frozen=True)
class Corpus:
    """The sequences of each split.

    inputs: the number of distinct input tokens; None if the inputs are chords. outputs: the number of classes or keys.
    tags: the names of the classes, if they are slot tags. hashes: the SHA-256 of each file.
    """

    name: str
    inputs: int | None
    outputs: int
    splits: Mapping[str, Sequences]
    hashes: Mapping[str, str]
    tags: tuple[str, ...] = ()

    @property
    def is_stream(self) -> bool:
        """Whether each split is one long sequence."""
        return len(self.splits["train"]) == 1


class Files:
    """Reads the files of a corpus. `known`: the SHA-256 of each file; None to accept any."""

    def __init__(self, folder: Path, known: Mapping[str, str] | None) -> None:
        self.folder, self.hashes = folder, dict[str, str]()
        self._known = known

    def read(self, name: str) -> bytes:
        """Returns the bytes of a file. Raises DataError if it cannot be read or is another file."""
        path = self.folder / name
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        self.hashes[name] = hashlib.sha256(raw).hexdigest()
        if self._known is not None and self.hashes[name] != self._known[name]:
            raise DataError(f"{path}: SHA-256 is {self.hashes[name]}, expected {self._known[name]}")
        return raw

    def lines(self, name: str) -> list[str]:
        """Returns the lines of a text file, stripped."""
        return [line.strip() for line in self.read(name).decode("utf-8").removesuffix("\n").split("\n")]


def check_sizes(corpus: str, sizes: Sequence[object], known: Sequence[object] | None) -> None:
    """Raises DataError if the sizes of the splits are not the known ones."""
    if known is not None and tuple(sizes) != tuple(known):
        raise DataError(f"{corpus}: the splits have the sizes {tuple(sizes)}, expected {tuple(known)}")


def numbered(names: Iterable[str]) -> dict[str, int]:
    """Returns the position of each distinct name."""
    return {name: index for index, name in enumerate(dict.fromkeys(names))}


def stream(name: str, texts: Mapping[str, Sequence[str]], files: Files) -> Corpus:
    """Returns a corpus of one sequence for each split. The target of each symbol is the next one. `texts`: the symbols
    of each split."""
    counts: dict[str, int] = {}
    for split in SPLITS:
        for symbol in texts[split]:
            counts[symbol] = counts.get(symbol, 0) + (split == "train")
    numbers = numbered(sorted(counts, key=lambda symbol: (-counts[symbol], symbol)))
    splits: dict[str, Sequences] = {}
    for split, text in texts.items():
        ids = torch.tensor([numbers[symbol] for symbol in text])
        splits[split] = [(ids[:-1], ids[1:])]
    return Corpus(name, len(numbers), len(numbers), splits, files.hashes)
