"""Random models against their certificates: is any bound ever passed, and how tight are they?

    python -m benchmarks.certificates [--models N] [--workers N] [--output FILE] [--figure FILE]

Models of every cell, plain and residual, one to three layers, with weights scaled across the boundary of stability; for
each, random and adversarial histories (`benchmarks/histories.py`), run in float64 and step by step in float32 to the
end and from the zero state over the last tokens. At every k the distance must stay within e_k plus the a priori
rounding of two runs in that dtype. Models over a front have no such rounding term and are held, in float64 only, to
e_k + 1e-9. The results so far are kept in FILE; run again, it goes on from there.
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

from benchmarks.histories import climbed_histories, distances, greedy_histories, random_histories
from models.certificate.layers import build_layers
from models.certificate.rounding import UNITS, worst_case
from models.certificate.stack import Stack, state_error_curve
from models.manifest import Architecture, Cell
from models.reference import Reference
from models.weights import Weights, weight_shapes

matplotlib.use("Agg")
from matplotlib import pyplot

CELLS: tuple[Cell, ...] = ("linear", "rnn_tanh", "rnn_relu", "gru", "lstm", "gated")
PAST, LAST = 24, 24
RANDOM, CLIMBED, ROUNDS = 12, 4, 3
SHOWN = (1, 2, 4, 8, 16, 24)
FRONT_ROUNDING = 1e-9
BATCH = 100
DTYPES = {"float64": np.float64, "float32": np.float32}


def random_model(seed: int) -> tuple[Architecture, Weights]:
    """One model; cells take turns."""
    generator = np.random.default_rng(seed)
    cell = CELLS[seed % len(CELLS)]
    residual = bool(generator.random() < 0.4)
    layers = int(generator.choice([1, 1, 2, 3]))
    hidden = int(generator.integers(2, 13))
    fields: dict[str, object] = {"cell": cell, "layers": layers, "hidden": hidden, "embedding": hidden}
    fields["vocabulary_size"] = int(generator.integers(3, 9))
    if residual:
        fields |= {"block": "residual", "norm_epsilon": float(generator.choice([1e-5, 0.01, 0.25]))}
        fields["feed_forward"] = int(generator.choice([0, 8]))
        if generator.random() < 0.25:
            fields["front"] = {"blocks": 1, "kernel_size": int(generator.integers(2, 4)), "feed_forward": 6}
        if generator.random() < 0.25:
            fields["units"] = int(generator.integers(2, 13))
    if cell == "gated" and generator.random() < 0.7:
        fields["gate_caps"] = tuple(generator.uniform(0.3, 0.98, layers).tolist())
    architecture = Architecture.model_validate(fields)
    recurrent, driven = 10 ** generator.uniform(-1.3, 0.4), 10 ** generator.uniform(-1, 0.5)
    between = 10 ** generator.uniform(-1.5, 0)
    weights = {}
    for name, shape in weight_shapes(architecture).items():
        values = generator.normal(size=shape)
        if "weight_hh" in name:
            values *= recurrent / np.sqrt(shape[1])
        elif ".cell." in name and len(shape) == 2:
            values *= driven / np.sqrt(shape[1])
        elif "norm.weight" in name:
            values = 1 + 0.3 * values
        elif name != "embedding.weight":
            values *= between / np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32)
    return architecture, weights


def examine(seed: int) -> dict[str, object]:
    """One model, all its histories."""
    architecture, weights = random_model(seed)
    layers = build_layers(architecture, weights)
    factors = [layer.bound.factor for layer in layers]
    bounded = all(np.isfinite(reach).all() for layer in layers for reach in layer.bound.reach)
    found: dict[str, object] = {
        "cell": architecture.cell,
        "stack": "front" if architecture.front else f"{architecture.block}, {'one' if len(layers) == 1 else 'more'}",
        "stable": max(factors) < 1,
        "claims": bounded,
        "histories": 0,
        "violations": 0,
    }
    generator = np.random.default_rng([seed, 1])
    exact = Reference(architecture, weights)
    size = architecture.vocabulary_size
    random = random_histories(generator, size, RANDOM, PAST, LAST)
    greedy = greedy_histories(exact, size, PAST, LAST)
    climbed = climbed_histories(exact, generator, random[:CLIMBED], PAST, ROUNDS)
    histories = np.concatenate([random, greedy, climbed])
    found["histories"] = len(histories)
    if not bounded:
        return found
    stack = Stack(architecture, weights, layers)
    curve = state_error_curve(stack, LAST)
    for name, dtype in DTYPES.items():
        rounding = worst_case(architecture, weights, stack, name)  # type: ignore[arg-type]
        if rounding is None:
            if name == "float32":
                continue
            rounding = FRONT_ROUNDING
        reference = exact if name == "float64" else Reference(architecture, weights, dtype)
        apart = distances(reference, histories[:, :PAST], histories[:, PAST:])
        found["violations"] += int((~(apart <= curve + rounding)).sum())  # type: ignore[operator]
        found[f"{name}_passed_without_rounding"] = int((apart > curve).sum())
        if name == "float64" and found["stable"]:
            told = curve > 100 * max(rounding, UNITS["float64"])
            for kind, rows in (("random", slice(RANDOM)), ("adversarial", slice(RANDOM, None))):
                share = np.where(told, apart[rows].max(axis=0) / curve, np.nan)
                found[kind] = [None if np.isnan(share[k - 1]) else float(share[k - 1]) for k in SHOWN]
    return found


def report(console: Console, results: list[dict[str, object]]) -> None:
    """The figures, as tables."""
    table = Table(title="Models and histories")
    for heading in ("cell", "models", "contractive", "no claim", "histories", "pairs held to a bound", "violations"):
        table.add_column(heading, justify="right")
    for cell in (*CELLS, "all"):
        rows = [each for each in results if cell in (each["cell"], "all")]
        held = [each for each in rows if each["claims"]]
        table.add_row(
            cell,
            f"{len(rows):,}",
            f"{sum(bool(each['stable']) for each in rows):,}",
            f"{len(rows) - len(held):,}",
            f"{sum(int(str(each['histories'])) for each in rows):,}",
            f"{sum(int(str(each['histories'])) for each in held):,}",
            f"{sum(int(str(each['violations'])) for each in rows):,}",
        )
    console.print(table)
    for name in DTYPES:
        key = f"{name}_passed_without_rounding"
        passed = sum(int(str(each.get(key, 0))) for each in results)
        console.print(f"{name}: {passed:,} distances were above e_k alone, without its rounding term")
    table = Table(title="Observed / bound of contractive models, float64: median (max)")
    table.add_column("cell, histories")
    for k in SHOWN:
        table.add_column(f"k = {k}", justify="right")
    for (cell, kind), shares in tightness(results).items():
        cells = [f"{np.median(each):.2g} ({max(each):.3g})" if each else "-" for each in shares]
        table.add_row(f"{cell}, {kind}", *cells)
    console.print(table)


def tightness(results: list[dict[str, object]]) -> dict[tuple[str, str], list[list[float]]]:
    """Observed over bound by cell and kind of history, then by k: one number a model."""
    shares: dict[tuple[str, str], list[list[float]]] = defaultdict(lambda: [[] for _ in SHOWN])
    for cell in CELLS:
        for kind in ("random", "adversarial"):
            for each in results:
                values = each.get(kind)
                if each["cell"] == cell and isinstance(values, list):
                    for place, value in zip(shares[cell, kind], values, strict=True):
                        if value is not None:
                            place.append(value)
    return shares


def draw(results: list[dict[str, object]], file: Path) -> None:
    """Median, and the tenth to the ninetieth percentile, of observed / bound by k."""
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 5.6), sharex=True, sharey=True, layout="constrained")
    shares = tightness(results)
    for axis, cell in zip(axes.flat, CELLS, strict=True):
        for kind, colour, shift in (("random", "tab:blue", 0.97), ("adversarial", "tab:red", 1.03)):
            present = [(k, values) for k, values in zip(SHOWN, shares[cell, kind], strict=True) if values]
            ks = np.array([k for k, _ in present]) * shift
            middle = np.array([np.median(values) for _, values in present])
            low, high = (np.array([np.quantile(values, q) for _, values in present]) for q in (0.1, 0.9))
            axis.errorbar(ks, middle, [middle - low, high - middle], fmt="o-", ms=4, color=colour, label=kind, lw=1)
        axis.axhline(1, color="black", lw=1)
        axis.set(xscale="log", yscale="log", title=f"{cell} ({len(shares[cell, 'random'][0]):,} models)")
        axis.set_xticks(SHOWN, [str(k) for k in SHOWN])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0, 0].legend(loc="lower left")
    figure.supxlabel("k, tokens since the cut")
    figure.supylabel("largest distance observed / bound: median, 10 % to 90 %")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def main() -> None:
    """Goes on from what the output file holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", type=int, default=5400)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/certificates.json"))
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/certificates.png"))
    arguments = parser.parse_args()
    console = Console()
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
    raise SystemExit(1 if any(each["violations"] for each in results) else 0)


if __name__ == "__main__":
    main()
