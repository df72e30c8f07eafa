"""Checks the certificates of random models: whether a bound is violated, and how tight the bounds are.

    python -m research.certificates [--models N] [--workers N] [--output FILE] [--figure FILE]

The models have every kind of cell, plain and residual blocks, and one to three layers. Their weights are scaled so that
some models are contractive and others are not.

Most checks compare two runs that read the same last tokens. The first run has read other tokens (the past) before. The
second run starts from the zero state. Their distance is the 2-norm distance of `hidden`, the input of the output layer.
Three kinds of bounds are checked:

- The curve e_k: the certificate's bound of the distance after k common tokens. The tokens are random and adversarial
  histories (`research/histories.py`, `research/adversary.py`). The distance is computed in float64 and in float32. If
  the cell's bounds cover all reachable states, some first runs start from initial states that gradient ascent has
  found. At every k the distance must be at most e_k plus the a priori rounding bound of two runs in that dtype. Models
  with convolution blocks before the recurrent layers have no such rounding bound. They are checked in float64 only,
  against e_k + 1e-9.
- The served rounding: the certificate's bound of the rounding of the exported float32 graphs. The `step` graph of every
  contractive model is exported, and its rounding is measured as for a bundle. Two float32 runs over thousands of common
  tokens (repeated tokens, cycles, the adversary's histories, random tokens) must differ by at most e_k plus this
  rounding. The first run must differ from the same run in exact arithmetic by at most half of this rounding.
- The bounds of single windows, in float64. The second run reads only the window. The first runs read different pasts
  before the window: the pasts of all histories of the first check, and pasts that are adversarial to this window. The
  first run's `hidden` must be within the window's radius. Every lead (difference between two logits) must change by at
  most the direction proof's bound of this change. Every proved top-1 token must be the first run's most probable one.
  The total variation between the two predicted distributions must be at most the direction proof's bound of this total
  variation.

The file of `--output` contains the results so far. If the program is started again, it skips the models in this file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from research.bound_check import DTYPES, LAST, OF_WINDOWS, PAST, SHOWN, examine
from wane.models.layer_registry import FADING

matplotlib.use("Agg")
from matplotlib import pyplot

BATCH = 100
KINDS = {"random": ("tab:blue", 0.95), "adversarial": ("tab:red", 1.0), "state": ("tab:green", 1.05)}


def violations(found: dict[str, object]) -> int:
    """Returns the total number of bound violations of one model."""
    of_windows: dict[str, int] = found["request"]  # type: ignore[assignment]
    served = int(str(found.get("served_above", 0)))
    return int(str(found["violations"])) + served + sum(of_windows[key] for key in OF_WINDOWS)


def report(console: Console, results: list[dict[str, object]]) -> None:
    """Prints all results as tables."""
    table = Table(title="Models and histories")
    for heading in (
        "cell",
        "models",
        "contractive",
        "without e_k",
        "histories",
        "pairs checked against e_k",
        "pairs from initial states",
        "violations",
    ):
        table.add_column(heading, justify="right")
    for cell in (*FADING, "all"):
        rows = [each for each in results if cell in (each["cell"], "all")]
        held = [each for each in rows if each["claims"]]
        table.add_row(
            cell,
            f"{len(rows):,}",
            f"{sum(bool(each['stable']) for each in rows):,}",
            f"{len(rows) - len(held):,}",
            f"{sum(int(str(each['histories'])) for each in rows):,}",
            f"{sum(int(str(each['histories'])) for each in held):,}",
            f"{sum(int(str(each['states'])) for each in held):,}",
            f"{sum(int(str(each['violations'])) for each in rows):,}",
        )
    console.print(table)
    for name in DTYPES:
        key = f"{name}_passed_without_rounding"
        passed = sum(int(str(each.get(key, 0))) for each in results)
        console.print(f"{name}: {passed:,} distances exceeded e_k alone (the limit is e_k plus the rounding term)")
    report_served(console, results)
    report_windows(console, results)
    table = Table(title="Observed / bound of contractive models, float64: median (max)")
    table.add_column("cell, histories")
    for k in SHOWN:
        table.add_column(f"k = {k}", justify="right")
    for (cell, kind), shares in tightness(results).items():
        cells = [f"{np.median(each):.2g} ({max(each):.3g})" if each else "-" for each in shares]
        table.add_row(f"{cell}, {kind}", *cells)
    console.print(table)


def report_served(console: Console, results: list[dict[str, object]]) -> None:
    """Prints the observed rounding of float32 runs of the exported step graph, divided by the served rounding term."""
    table = Table(title="Served rounding, float32 graphs, thousands of steps. Observed / served: median (max)")
    for heading in ("cell", "errors accumulated over", "models", "pairs", "violations", "one run", "two runs"):
        table.add_column(heading, justify="right")
    for cell in (*FADING, "all"):
        for sequences in ("all", "own") if cell != "all" else ("all", "own", None):
            rows = [each for each in results if cell in (each["cell"], "all") and "served_pairs" in each]
            rows = [each for each in rows if sequences in (each["served_sequences"], None)]
            shares = []
            for key in ("served_of_one", "served_of_two"):
                values = [float(str(each[key])) for each in rows if each[key] is not None]
                shares.append(f"{np.median(values):.2g} ({max(values):.3g})" if values else "-")
            pairs, above = (sum(int(str(each[f"served_{key}"])) for each in rows) for key in ("pairs", "above"))
            along = {"all": "all sequences", "own": "the answer's own run", None: ""}[sequences]
            table.add_row(cell, along, f"{len(rows):,}", f"{pairs:,}", f"{above:,}", *shares)
    console.print(table)


def report_windows(console: Console, results: list[dict[str, object]]) -> None:
    """Prints the results of the checks of windows."""
    table = Table(title="Windows, float64. Observed / bound of contractive models: median (max)")
    headings = (
        "windows",
        "pairs",
        "proved",
        *("violations: radius", "lead", "top-1", "variation"),
        "observed / bound: radius",
        "lead",
        "variation",
    )
    for heading in ("cell", *headings):
        table.add_column(heading, justify="right")
    for cell in (*FADING, "all"):
        rows = [each for each in results if cell in (each["cell"], "all")]
        counts: dict[str, int] = defaultdict(int)
        for each in rows:
            for key, count in each["request"].items():  # type: ignore[attr-defined]
                counts[key] += count
        shares = []
        for key in ("radius", "lead", "variation"):
            values = [each["tightest"][key] for each in rows if each["stable"]]  # type: ignore[index]
            present = [value for value in values if value > 0]
            shares.append(f"{np.median(present):.2g} ({max(present):.6g})" if present else "-")
        keys = ("windows", "window_pairs", "proved", *OF_WINDOWS)
        table.add_row(cell, *(f"{counts[key]:,}" for key in keys), *shares)
    console.print(table)


def tightness(results: list[dict[str, object]]) -> dict[tuple[str, str], list[list[float]]]:
    """Returns the ratios of the observed distance to the bound, by cell and kind of history. Each value has one list
    for each k in SHOWN, and this list has one ratio per model."""
    shares: dict[tuple[str, str], list[list[float]]] = defaultdict(lambda: [[] for _ in SHOWN])
    for cell in FADING:
        for kind in KINDS:
            for each in results:
                values = each.get(kind)
                if each["cell"] == cell and isinstance(values, list):
                    for place, value in zip(shares[cell, kind], values, strict=True):
                        if value is not None:
                            place.append(value)
    return shares


def draw(results: list[dict[str, object]], file: Path) -> None:
    """Plots the ratio of the observed distance to the bound as a function of k: the median over models, and the range
    from the 10th to the 90th percentile."""
    figure, axes = pyplot.subplots(2, 4, figsize=(13, 5.6), sharex=True, sharey=True, layout="constrained")
    shares = tightness(results)
    for axis, cell in zip(axes.flat, FADING, strict=True):
        for kind, (colour, shift) in KINDS.items():
            present = [(k, values) for k, values in zip(SHOWN, shares[cell, kind], strict=True) if values]
            if not present:
                continue
            ks = np.array([k for k, _ in present]) * shift
            middle = np.array([np.median(values) for _, values in present])
            low, high = (np.array([np.quantile(values, q) for _, values in present]) for q in (0.1, 0.9))
            axis.errorbar(ks, middle, [middle - low, high - middle], fmt="o-", ms=4, color=colour, label=kind, lw=1)
        axis.axhline(1, color="black", lw=1)
        axis.set(xscale="log", yscale="log", title=f"{cell} ({len(shares[cell, 'random'][0]):,} models)")
        axis.set_xticks(SHOWN, [str(k) for k in SHOWN])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0, 1].legend(loc="lower left")
    figure.supxlabel("k, number of common last tokens")
    figure.supylabel("largest observed distance / bound: median, 10th to 90th percentile")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def main() -> None:
    """Checks the models that the output file does not contain yet, then prints and plots all results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", type=int, default=5400)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/certificates.json"))
    parser.add_argument("--figure", type=Path, default=Path("research/figures/certificates.png"))
    arguments = parser.parse_args()
    console = Console(width=140)
    results: list[dict[str, object]] = []
    if arguments.output.exists():
        results = json.loads(arguments.output.read_text())["models"]
        console.print(f"{arguments.output} has {len(results):,} models already")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with ProcessPoolExecutor(arguments.workers) as pool:
        seeds = range(len(results), arguments.models)
        examined = pool.map(examine, seeds, chunksize=10)
        for each in track(examined, "models", total=len(seeds), console=console):
            results.append(each)
            if len(results) % BATCH == 0 or len(results) == arguments.models:
                arguments.output.write_text(json.dumps({"past": PAST, "last": LAST, "models": results}))
    console.print(f"{time.monotonic() - started:.0f} s")
    report(console, results)
    draw(results, arguments.figure)
    raise SystemExit(1 if any(violations(each) for each in results) else 0)


if __name__ == "__main__":
    main()
