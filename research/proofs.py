"""Compares the bundles' certificates with observations on a text, and counts the predictions that the certificates
prove.

    OMP_NUM_THREADS=1 python -m research.proofs --data FOLDER [--only NAME ...] [--positions N] [--fewer N]
    python -m research.proofs --render

FOLDER contains WikiText-2's word-level files. The positions are spread evenly over a split. At each position and for
windows of several lengths k, the program computes the window's state (the output layer's input) and prediction in
float64. It computes the same for a run that reads the whole split from its first token without interruption. It
compares the distance of the two states and the total variation of the two predictions with two kinds of bounds: the
certificate's curve, which holds for any tokens, and the request's bound, which holds for the window's tokens. It also
counts the proved top-1 tokens. The bounds are slow to compute for LSTMs, GRUs, several layers, and convolution blocks
before the recurrent layers. For these models, windows of other lengths than 64 tokens are measured at only `--fewer`
positions.

The results for each k of each bundle are written to the JSON file as soon as they are measured. A program that is
killed and started again does not repeat these measurements. After all measurements, the program makes the figure and
the tables of research/stability.md from the JSON file. With `--render`, it measures nothing. Measurements of outdated
weights or certificates are dropped.

Small matrices gain nothing from threads, so set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.page import put_all
from benchmarks.summary import bundles_of_text, digits
from research.proof_plots import plot
from research.proof_results import ModelFigures, Results
from research.proof_tables import tables
from research.prover import Prover, Tokens, never_interrupted
from wane.models.bundle import Bundle
from wane.models.bundle_checks import read_manifest
from wane.models.certificate.certify import CERTIFIED
from wane.models.manifest import Manifest
from wane.training.wikitext import read_wikitext_2

WINDOWS = (64, 16, 32, 128, 256)
FIRST, LONGEST = WINDOWS[0], max(WINDOWS)
SLOW = ("lstm", "gru")


def described(manifest: Manifest, tokens: int) -> ModelFigures:
    """Returns the bundle's results that are known from the manifest, without measurements."""
    certificate, quality, last = manifest.certificate, manifest.quality, manifest.max_window
    shown = sorted({*np.geomspace(1, last, 60).astype(int).tolist(), *(k for k in WINDOWS if k <= last)})
    return ModelFigures(
        weights=manifest.files[manifest.weights],
        cell=manifest.architecture.family,
        layers=certificate.layers,
        certified=certificate.certified,
        max_window=last,
        tokens=tokens,
        smallest_window=certificate.smallest_window(CERTIFIED),
        perplexity=quality.window["valid"].recurrent.per_token if quality else None,
        window_perplexity={k: p.per_token for k, p in quality.window["valid"].by_k.items()} if quality else {},
        curve={k: digits(certificate.state_error[k - 1]) for k in shown} if certificate.state_error else {},
        rounding=certificate.rounding.between_runs if certificate.rounding else None,
    )


def read_stream(bundle: Bundle, folder: Path, split: str) -> Tokens:
    """Returns the token ids of a split, (tokens), as training reads it: with `<eos>` before every line and after the
    last line."""
    vocabulary = bundle.vocabulary
    flat = [vocabulary.eos_id]
    for sequence in vocabulary.encode_lines(read_wikitext_2(folder)[0][split]):
        flat += [*sequence, vocabulary.eos_id]
    return np.array(flat, dtype=np.int64)


def measure(
    bundle: Bundle, stream: Tokens, split: str, positions: int, fewer: int, path: Path, progress: Progress
) -> None:
    """Measures one bundle, and adds the results to the JSON at `path`. Skips measurements that the JSON already
    contains."""
    name, results = bundle.manifest.name, read(path, split)
    figures = described(bundle.manifest, len(stream)).with_windows_of(results.models.get(name))
    positions = min(positions, len(stream) - LONGEST)
    architecture = bundle.manifest.architecture
    slow = architecture.family in SLOW or len(architecture.layers) > 1

    def asked(k: int) -> int:
        return min(fewer, positions) if slow and k != FIRST else positions

    missing = [
        k
        for k in WINDOWS
        if k <= figures.max_window and (k not in figures.windows or figures.windows[k].positions < asked(k))
    ]
    if missing:
        prover = Prover(bundle)
        never = never_interrupted(prover.reference, stream, LONGEST, positions, progress)
        for k in missing:
            found = prover.figures(stream, never.fewer(asked(k)), k, progress)
            figures = figures.model_copy(update={"windows": dict(sorted({**figures.windows, k: found}.items()))})
            read(path, split).having(name, figures).write(path)
            progress.console.print(f"{name}, k = {k}: {found.proved}, {found.violations} violations")
    read(path, split).having(name, figures).write(path)


def read(path: Path, split: str) -> Results:
    """Reads the JSON file, or returns empty results if there is none. The file is read again before every update,
    because other processes may add other bundles' results."""
    return Results.read(path) if path.exists() else Results(split=split)


def current(results: Results, bundles: Path) -> Results:
    """Returns only the results that were measured with the bundles' current weights and manifests. Keeps the results of
    bundles that are not in the folder."""
    models = {}
    for name, before in sorted(results.models.items()):
        if not (bundles / name).is_dir():
            models[name] = before
        else:
            figures = described(read_manifest(bundles / name), before.tokens).with_windows_of(before)
            if figures.windows:
                models[name] = figures
    return results.model_copy(update={"models": models})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, default=Path("models/bundles"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these bundles")
    parser.add_argument("--data", type=Path, metavar="FOLDER")
    parser.add_argument("--split", choices=("valid", "test"), default="valid")
    parser.add_argument("--positions", type=int, default=5000)
    parser.add_argument(
        "--fewer",
        type=int,
        default=1000,
        help="number of positions for models whose bounds are slow to compute, except for windows of 64 tokens",
    )
    parser.add_argument("--json", type=Path, default=Path("research/figures/proofs.json"))
    parser.add_argument("--figure", type=Path, default=Path("research/figures/proofs.png"))
    parser.add_argument("--page", type=Path, default=Path("research/stability.md"))
    parser.add_argument("--render", action="store_true", help="only make the figure and the tables from the JSON file")
    options = parser.parse_args(arguments)
    if options.data is None and not options.render:
        parser.error("--data FOLDER with WikiText-2 is required without --render")
    if min(options.positions, options.fewer) < 1:
        parser.error("--positions and --fewer must be at least 1")
    there = sorted(path.name for path in bundles_of_text(options.bundles))
    if unknown := set(options.only or ()) - set(there):
        parser.error(f"--only: {options.bundles} has no bundle {', '.join(sorted(unknown))}, only {', '.join(there)}")

    if (kept := read(options.json, options.split).split) != options.split:
        parser.error(f"--split: {options.json} has results of the split {kept}; choose another file with --json")
    console = Console(stderr=True)
    if not options.render:
        with Progress(console=console, transient=True) as progress:
            for name in options.only or there:
                bundle = Bundle.read(options.bundles / name)
                stream = read_stream(bundle, options.data, options.split)
                measure(bundle, stream, options.split, options.positions, options.fewer, options.json, progress)
    results = current(read(options.json, options.split), options.bundles)
    results.write(options.json)
    plot(results, options.figure)
    put_all(options.page, tables(results))
    console.print(f"{options.json}, {options.figure}, {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
