"""Fits caches of several lengths to the shipped bundles, and writes the table of perplexities into the model card.

    python -m research.caches --data FOLDER [--only NAME ...]
    python -m research.caches --render

FOLDER contains WikiText-2's word-level files. For each bundle and each length N, the weights of the mixture
(`models/cache_mixture.py`) are fitted to the network's predictions on the validation split. The network is not trained
again. The table shows the perplexity per token of the test split. It also shows by how many percent the perplexity of
windows of k tokens, with the same cache, differs from the recurrent perplexity. These two perplexities are those of the
same positions, spread evenly over the test split.

The results of each bundle are written to the JSON file as soon as they are measured. With `--render` the program only
makes the table from the JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from benchmarks.page import markdown, put
from benchmarks.summary import bundles_of_text, digits, provenance, write_json
from wane.models.cache_statistics import cache_statistics
from wane.models.layer_registry import Frozen
from wane.models.manifest import CacheModel
from wane.training.bundle import LENGTHS, corpus_of, network_of, open_bundle
from wane.training.cache import cache_start, fit_cache
from wane.training.data import Corpus
from wane.training.evaluate import POSITIONS, Advance, recurrent_losses, spread_positions, window_losses

WINDOWS = (64, 128)
SPLITS = ("valid", "test")
CARD, FIGURES, TABLE = Path("models/bundles/README.md"), Path("research/figures/caches.json"), "caches"

Losses = NDArray[np.float64]


class Perplexities(Frozen):
    """Perplexities per token of the test split, with a cache of one length or without a cache.

    `recurrent`: the perplexity of the whole split. `windows`: by k, the perplexity of windows of k tokens divided by
    the perplexity of the recurrent run at the same positions.
    """

    recurrent: float
    windows: dict[int, float]


Results = dict[str, dict[int, Perplexities]]
"""The perplexities of each bundle by the cache's length in tokens. The length 0 stands for the network alone."""


class _Losses:
    """A network's losses, -log p in nats per token: of each split's recurrent run, and of windows of the test split."""

    def __init__(self, path: Path, data: Path, advance: Advance) -> None:
        bundle = open_bundle(path)
        network = network_of(bundle)
        self.corpus: Corpus = corpus_of(bundle, data)
        self.recurrent: dict[str, Losses] = {
            split: recurrent_losses(network, self.corpus.streams[split], advance).double().numpy(force=True)
            for split in SPLITS
        }
        stream = self.corpus.streams["test"]
        self.positions = spread_positions(stream, POSITIONS, max(WINDOWS))
        self.windows: dict[int, Losses] = {
            k: window_losses(network, stream, k, self.positions, advance).double().numpy(force=True) for k in WINDOWS
        }

    def with_cache(self, length: int) -> Perplexities:
        """Returns the perplexities of the mixture with a cache of `length` tokens, fitted on the validation split; of
        the network alone for the length 0."""
        if not length:
            return self._perplexities(self.recurrent["test"], self.windows)
        start = cache_start(self.corpus.vocabulary)
        fitted: CacheModel = fit_cache(
            cache_statistics(self.corpus.streams["valid"], length, start), self.recurrent["valid"]
        )
        test = cache_statistics(self.corpus.streams["test"], length, start)
        at = test.at(self.positions)
        windows = {k: -at.log_probabilities(fitted, -losses) for k, losses in self.windows.items()}
        return self._perplexities(-test.log_probabilities(fitted, -self.recurrent["test"]), windows)

    def _perplexities(self, recurrent: Losses, windows: dict[int, Losses]) -> Perplexities:
        here = float(recurrent[self.positions].mean())
        return Perplexities(
            recurrent=digits(math.exp(recurrent.mean())),
            windows={k: digits(math.exp(losses.mean() - here)) for k, losses in windows.items()},
        )


def measure(path: Path, data: Path, advance: Advance) -> dict[int, Perplexities]:
    """Returns the perplexities of one bundle by the cache's length."""
    losses = _Losses(path, data, advance)
    return {length: losses.with_cache(length) for length in (0, *LENGTHS)}


def table(results: Results) -> list[str]:
    """Returns the model card's table. Each bundle has one row for the recurrent run and one row per window."""
    rows = []
    for name, lengths in sorted(results.items()):
        rows.append([f"`{name}`", *(f"{found.recurrent:.2f}" for found in lengths.values())])
        rows += [
            [
                f"`{name}` as a window of {k}, against recurrent",
                *(f"{found.windows[k] - 1:+.2%}".replace("%", " %") for found in lengths.values()),
            ]
            for k in WINDOWS
        ]
    return markdown(["bundle", "no cache", *(f"N = {length:,}" for length in LENGTHS)], rows)


def read(path: Path) -> Results:
    """Reads the results in the JSON file. Returns no results if there is no file."""
    models = json.loads(path.read_bytes())["models"] if path.exists() else {}
    return {
        name: {int(length): Perplexities.model_validate(found) for length, found in lengths.items()}
        for name, lengths in models.items()
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, default=Path("models/bundles"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these bundles")
    parser.add_argument("--data", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, default=FIGURES)
    parser.add_argument("--page", type=Path, default=CARD)
    parser.add_argument("--render", action="store_true", help="only make the table from the JSON")
    options = parser.parse_args(arguments)
    if options.data is None and not options.render:
        parser.error("--data FOLDER with WikiText-2 is required without --render")
    there = sorted(path.name for path in bundles_of_text(options.bundles))
    if unknown := set(options.only or ()) - set(there):
        parser.error(f"--only: {options.bundles} has no {', '.join(sorted(unknown))}, only {', '.join(there)}")
    console = Console(stderr=True)
    if not options.render:
        with Progress(console=console, transient=True) as progress:
            for name in options.only or there:
                task = progress.add_task(name, total=None)
                found = measure(options.bundles / name, options.data, partial(progress.advance, task))
                progress.remove_task(task)
                models = dict(sorted({**read(options.json), name: found}.items()))
                made = provenance("research.caches", "torch", "numpy", bundles=models)
                write_json(options.json, {**made, "models": models})
    put(options.page, TABLE, table(read(options.json)))
    console.print(f"{options.json}, {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
