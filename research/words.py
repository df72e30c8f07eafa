"""The certified model on words beside the literature: its perplexities with and without caches, and its curve.

    python -m research.words RUN --data FOLDER
    python -m research.words --render

RUN is the run folder of an experiment on the words of WikiText-2, such as training/experiments/word-gated-stable.toml,
and FOLDER has WikiText-2's word-level files. The caches' weights are fitted to the validation split
(`training/bundle.py`). With `--render` the program only makes the model card's table from the JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.page import markdown, put
from benchmarks.summary import BUNDLES, digits, provenance, write_json
from wane.models.bundle_checks import read_manifest
from wane.training.bundle import fit_lengths
from wane.training.data import Corpus
from wane.training.evaluate import Advance
from wane.training.plots import plot_log
from wane.training.run import open_run

LENGTHS = (512, 2048)
CARD, FIGURES, TABLE = Path("models/bundles/README.md"), Path("research/figures/words.json"), "words"

LITERATURE: tuple[tuple[str, dict[int, float]], ...] = (
    ("LSTM, Grave et al. 2017 (arXiv 1612.04426; its cache has 2,000 words)", {0: 99.3, 2048: 68.9}),
    ("LSTM, Miller and Hardt 2019 (arXiv 1805.10369)", {0: 92.3}),
    ("stable LSTM, the same", {0: 95.1}),
    ("RNN, the same", {0: 146.7}),
    ("stable RNN, the same", {0: 143.5}),
)
"""Published perplexities a word of WikiText-2's test split, by the length of the cache; 0: without a cache."""

SHIPPED = (("gated-stable", 0), ("gated-stable-64", 512))
"""Shipped models, and the length of each one's cache."""


def measure(run: Path, data: Path | None, advance: Advance) -> dict[str, Any]:
    """Returns the perplexities a word of a run's best weights by split and length of the cache (0: without a cache),
    and its curve: the perplexity of the validation split at each evaluation."""
    trained = open_run(run, data)
    corpus = trained.corpus
    fits = fit_lengths(trained.network, corpus, list(LENGTHS), advance)
    config = trained.experiment.training
    epoch = (len(corpus.streams["train"]) - 1) // config.batch // config.chunk
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "model": trained.experiment.name,
        "weights": sum(tensor.numel() for tensor in trained.network.weights().values()),
        "experiment": trained.experiment.model_dump(mode="json", exclude={"data": {"path"}, "training": {"teacher"}}),
        "best_step": trained.best_step,
        "steps_an_epoch": epoch,
        "curve": [
            {
                "step": line["step"],
                "epochs": digits(line["step"] / epoch),
                "valid": per_word(corpus, "valid", line["valid_loss"]),
            }
            for line in lines
            if "valid_loss" in line
        ],
        "perplexities": {
            split: {
                length: per_word(corpus, split, (fits.losses[length] if length else fits.alone)[split])
                for length in (0, *LENGTHS)
            }
            for split in ("valid", "test")
        },
    }


def per_word(corpus: Corpus, split: str, loss: float) -> float:
    """Returns the perplexity a word, of a loss in nats a token."""
    return digits(math.exp(loss * (len(corpus.streams[split]) - 1) / corpus.words[split]))


def table(found: dict[str, Any]) -> list[str]:
    """Returns the model card's table: test perplexities a word."""
    rows = [
        [name, "", *(f"{figures[length]:.1f}" if length in figures else "" for length in (0, *LENGTHS))]
        for name, figures in LITERATURE
    ]
    for name, cache in SHIPPED:
        manifest = read_manifest(BUNDLES / name)
        assert manifest.quality is not None and (manifest.cache.length if manifest.cache else 0) == cache
        value = f"{manifest.quality.recurrent['test'].per_word:.1f}"
        cells = [value if length == cache else "" for length in (0, *LENGTHS)]
        rows.append([f"`{name}`, shipped, parts of words", contraction(manifest.provenance.config), *cells])
    epochs = found["best_step"] / found["steps_an_epoch"]
    cells = [f"{found['perplexities']['test'][str(length)]:.1f}" for length in (0, *LENGTHS)]
    rows.append([f"`{found['model']}`, {epochs:.1f} epochs", contraction(found["experiment"]), *cells])
    return markdown(["model", "gates at most", "no cache", *(f"cache of {length:,}" for length in LENGTHS)], rows)


def contraction(config: Any) -> str:
    """Returns the largest gate of an experiment's model."""
    return str(config["model"]["contraction"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN")
    parser.add_argument("--data", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, default=FIGURES)
    parser.add_argument("--page", type=Path, default=CARD)
    parser.add_argument("--render", action="store_true", help="only make the table from the JSON")
    options = parser.parse_args(arguments)
    if options.run is None and not options.render:
        parser.error("RUN is required without --render")
    console = Console(stderr=True)
    if not options.render:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("tokens", total=None)
            found = measure(options.run, options.data, partial(progress.advance, task))
        write_json(options.json, {**provenance("research.words", "torch", "numpy", bundles=[]), **found})
        plot_log(found["model"], options.run / "log.jsonl", options.json.with_suffix(".png"))
    put(options.page, TABLE, table(json.loads(options.json.read_bytes())))
    console.print(f"{options.json}, {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
