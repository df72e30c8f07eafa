"""Compares the families of models that the sources compare, at equal weights and equal training.

    OMP_NUM_THREADS=1 nice -n 19 python -m research.families --data FOLDER --work FOLDER [--only NAME ...]
    python -m research.families --render

`--data` has WikiText-2's word-level files. For each experiment of training/experiments/families, the command trains a
run in the folder `--work` (it resumes a run that was begun), exports a bundle there, and measures it:

- perplexity a token of the test split, of the uninterrupted run and of windows of k tokens; the smallest k whose
  perplexity is within 1 % of the uninterrupted run's, for all larger measured k;
- bytes of a session's state;
- time of a step and of a window of 64 tokens alone, and tokens a second of steps in batches of 64: the graphs on one
  thread, without the server;
- share of positions at which a window of 64 tokens proves the most probable token, by an engine with `prove`;
- training tokens a second.

The results of each family are written to the JSON file as soon as they are measured, and a family whose weights are
already there is not measured again. Then the table and the plot are made from the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import Progress

from benchmarks.page import markdown, put
from benchmarks.summary import digits, provenance, write_json
from research.proofs import read_stream
from research.served_proofs import measure
from wane.models.bundle import Bundle
from wane.models.export.parity import OnnxGraphs
from wane.models.layer_registry import Frozen
from wane.models.weights import weight_shapes
from wane.training.config import Experiment, TrainingConfig
from wane.training.run import export_run, train

matplotlib.use("Agg")

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "training" / "experiments" / "families"
FIGURES, PLOT, PAGE = (
    ROOT / name for name in ("research/figures/families.json", "research/figures/families.png", "docs/families.md")
)
TABLE = "families"
WINDOW, BATCH, REPEATS = 64, 64, 200
WITHIN = 1.01

NEW_PAGE = """# Families of models at equal weights

Made by `python -m research.families`, which says what each column is.

![Perplexity against the time of a step](../research/figures/families.png)
"""


class Family(Frozen):
    """The figures of one family. by_k: the perplexities of windows. smallest_k: None if no measured k is within 1 %."""

    weights_hash: str
    weights: int
    reach: int | None
    perplexity: float
    by_k: dict[int, float]
    smallest_k: int | None
    state_bytes: int
    step_ms: float
    window_ms: float
    tokens_per_s: float
    proved: float | None
    training_tokens_per_s: float


def median_ms(call: Callable[[], object]) -> float:
    """Returns the median time of a call, in ms."""
    taken = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        call()
        taken.append(1000 * (time.perf_counter() - begun))
    return digits(float(np.median(taken[REPEATS // 10 :])))


def figures(path: Path, data: Path | None, positions: int, progress: Progress) -> Family:
    """Measures one bundle. Without `data`, the share proved is not measured."""
    bundle = Bundle.read(path)
    manifest, run = bundle.manifest, OnnxGraphs(bundle).run
    architecture, quality, made = manifest.architecture, manifest.quality, manifest.provenance
    assert quality is not None, "the export measures the quality: this is a bug"
    window = quality.window["test"]
    by_k = {k: digits(found.per_token) for k, found in sorted(window.by_k.items())}
    whole, smallest = window.recurrent.per_token, None
    for k, found in sorted(by_k.items(), reverse=True):
        if found > whole * WITHIN:
            break
        smallest = k
    random = np.random.default_rng(0)

    def step(rows: int) -> Callable[[], object]:
        feeds = {each.name: np.zeros((rows, *each.shape), np.float32) for each in manifest.state}
        tokens = random.integers(architecture.vocabulary_size, size=rows)
        return lambda: run("step", {"tokens": tokens, **feeds})

    one = {"tokens": random.integers(architecture.vocabulary_size, size=(1, WINDOW)), "lengths": np.array([WINDOW])}
    proved = None
    if data is not None and manifest.certificate.has_rounding and manifest.max_window >= WINDOW:
        stream = read_stream(bundle, data, "test")
        proved = asyncio.run(measure(path, WINDOW, stream, positions, 0, progress)).proved
    training = TrainingConfig.model_validate(made.config["training"])
    return Family(
        weights_hash=manifest.files[manifest.weights],
        weights=sum(map(math.prod, weight_shapes(architecture).values())),
        reach=None if architecture.fading else architecture.reach,
        perplexity=digits(quality.recurrent["test"].per_token),
        by_k=by_k,
        smallest_k=smallest,
        state_bytes=sum(4 * math.prod(each.shape) for each in manifest.state),
        step_ms=median_ms(step(1)),
        window_ms=median_ms(lambda: run("window", one)),
        tokens_per_s=digits(1000 * BATCH / median_ms(step(BATCH))),
        proved=proved,
        training_tokens_per_s=digits(made.steps * training.batch * training.chunk / made.train_wall_s),
    )


def read(path: Path) -> dict[str, Family]:
    """Returns the stored figures by family."""
    if not path.exists():
        return {}
    return TypeAdapter(dict[str, Family]).validate_python(json.loads(path.read_text())["families"])


def table(found: dict[str, Family]) -> list[str]:
    """Returns the page's table, best perplexity first."""
    names = (
        "family",
        "weights",
        "reach",
        "perplexity",
        "k = 64",
        "smallest k",
        "state",
        "step",
        "window",
        "tokens/s at 64",
        "proved at 64",
        "training tokens/s",
    )
    rows = []
    for name, one in sorted(found.items(), key=lambda each: each[1].perplexity):
        proved = "-" if one.proved is None else f"{one.proved:.1%}"
        at_64 = one.by_k.get(WINDOW)
        rows.append(
            [
                f"`{name}`",
                f"{one.weights:,}",
                "all" if one.reach is None else str(one.reach),
                f"{one.perplexity:.2f}",
                "-" if at_64 is None else f"{at_64:.2f}",
                str(one.smallest_k or "-"),
                f"{one.state_bytes:,} B",
                f"{one.step_ms:.3g} ms",
                f"{one.window_ms:.3g} ms",
                f"{one.tokens_per_s:,.0f}",
                proved,
                f"{one.training_tokens_per_s:,.0f}",
            ]
        )
    return markdown(names, rows)


def plot(found: dict[str, Family], path: Path) -> None:
    """Draws perplexity against the cost of a step."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, one in found.items():
        axes.scatter(one.step_ms, one.perplexity, color="tab:blue" if one.reach is None else "tab:orange")
        axes.annotate(name, (one.step_ms, one.perplexity), xytext=(4, 3), textcoords="offset points", fontsize=8)
    axes.set(xlabel="time of a step, ms (one thread)", ylabel="test perplexity a token", xscale="log")
    axes.set_title("Equal weights, equal training: recurrent (blue), finite memory (orange)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FOLDER")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the runs and bundles")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))
    )
    parser.add_argument("--positions", type=int, default=300, help="positions of the share proved")
    parser.add_argument("--json", type=Path, default=FIGURES)
    parser.add_argument("--render", action="store_true", help="only make the table and the plot from the JSON")
    options = parser.parse_args(arguments)
    if not options.render and (options.data is None or options.work is None):
        parser.error("--data FOLDER with WikiText-2 and --work FOLDER are required without --render")
    console = Console(stderr=True)
    for path in [] if options.render else sorted(EXPERIMENTS.glob("*.toml")):
        if path.stem not in (options.only or [path.stem]):
            continue
        run, bundle = options.work / "runs" / path.stem, options.work / "bundles" / path.stem
        if not (bundle / "manifest.json").exists():
            train(
                Experiment.read(path),
                options.data,
                run,
                None,
                f"python -m research.families --only {path.stem}",
                console,
            )
            export_run(run, options.work / "bundles", options.data, "1", console)
        found = read(options.json)
        manifest = Bundle.read(bundle).manifest
        if path.stem in found and found[path.stem].weights_hash == manifest.files[manifest.weights]:
            continue
        with Progress(console=console, transient=True) as progress:
            found[path.stem] = figures(bundle, options.data, options.positions, progress)
        families = {name: one.model_dump() for name, one in sorted(found.items())}
        write_json(
            options.json, {**provenance("research.families", "onnxruntime", "torch", bundles=()), "families": families}
        )
        console.print(f"{path.stem}: {found[path.stem]}")
    found = read(options.json)
    if not found:
        parser.error(f"{options.json} has no figures yet")
    plot(found, options.json.with_suffix(".png"))
    if options.json == FIGURES:
        if not PAGE.exists():
            PAGE.write_text(f"{NEW_PAGE}\n<!-- {TABLE} -->\n<!-- /{TABLE} -->\n", encoding="utf-8")
        put(PAGE, TABLE, table(found))
    console.print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
