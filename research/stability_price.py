"""The price of stability: perplexity as a function of lambda (the contraction factor), and the effect of truncated
training on the weights.

    python -m research.stability_price --data DIR --runs DIR [--tokenizer FILE] [--json FILE] [--figures DIR]

Trains several runs one after another, each in its own folder. All runs have the same data, batches and number of steps.
They have two purposes:

- price: a Gated network and a tanh-RNN for every lambda from 0.7 to none (unconstrained). The smallest lambda and
  the unconstrained networks have three seeds. Every other lambda has one seed.
- distance: two tanh-RNNs, one with lambda 0.9 and one unconstrained. With each optimiser, each network is trained twice
  from the same initial weights: recurrent, and truncated (every chunk starts from the zero state). The two optimisers
  are AdamW, and projected gradient descent with the learning rate alpha / t in step t. For projected gradient descent,
  Miller and Hardt ("Stable recurrent models", 2019, proposition 2) prove that the weights of both trainings stay close
  if the model is stable. In this experiment, truncated training predicts each position from the chunk's tokens up to
  this position only.

A finished run is not trained again, and an interrupted run resumes. `--report` trains nothing. Perplexities are
measured on the validation split, in recurrent mode, with the run's best weights. For windows of k(1e-3) tokens, and of
all larger tested lengths, the certificate proves that the total variation error of every answer is at most 1e-3, in
exact arithmetic. k(1e-3) is the smallest length with this property, or none if no tested length has it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.summary import command, write_json
from research.stability_price_plots import plot_distances, plot_prices
from wane.models.certificate import certify
from wane.training.config import Experiment
from wane.training.errors import TrainingError
from wane.training.run import train
from wane.training.run_folder import RunFolder, kept_name

EXPERIMENTS = Path("training/experiments")
CAPS: tuple[float | None, ...] = (0.7, 0.8, 0.9, 0.95, 0.98, None)
EXTREMES = (0.7, None)
SEEDS = (1, 2, 3)
DISTANCE_CAPS = (0.9, None)
KEPT = 20
"""The number of evenly spaced training steps at which the weights of two runs are compared."""

EPSILON = 1e-3
THEORY = {
    "optimizer": "sgd",
    "schedule": "inverse_time",
    "learning_rate": 3.0,
    "warmup": 0,
    "weight_decay": 0.0,
    "clip_norm": 1e6,
}
"""The training options of projected gradient descent as in Miller and Hardt. The learning rate in step t is alpha / t,
where alpha is `learning_rate`. A clip norm of 1e6 never clips the gradient."""


def variant(base: Experiment, name: str, cap: float | None, seed: int, **training: object) -> Experiment:
    """Returns the base experiment with another name, contraction factor (`cap`), seed and training options."""
    return Experiment.model_validate(
        base.model_dump()
        | {"name": f"{name}-{cap or 'none'}-seed{seed}"}
        | {"model": base.model.model_dump() | {"contraction": cap}}
        | {"training": base.training.model_dump() | training | {"seed": seed}}
    )


def price_run(bases: dict[str, Experiment], family: str, cap: float | None, seed: int) -> Experiment:
    """Returns the run for one point of the price curve. The run saves the weights at intermediate steps if the
    comparison of weights needs them."""
    kept = keep_every(bases) if (family, seed) == ("rnn", SEEDS[0]) and cap in DISTANCE_CAPS else 0
    return variant(bases[family], family, cap, seed, keep_every=kept)


def keep_every(bases: dict[str, Experiment]) -> int:
    """Returns the number of training steps between two comparisons of weights."""
    return max(1, bases["rnn"].training.steps // KEPT)


def distance_runs(bases: dict[str, Experiment], cap: float | None) -> dict[str, tuple[Experiment, Experiment]]:
    """Returns two runs for each optimiser: one with recurrent training, and its truncated twin, the same run with
    truncated training."""
    base, seed = bases["rnn"], SEEDS[0]
    keys = {"keep_every": keep_every(bases)}
    cut = keys | {"regime": "truncated"}
    return {
        "adamw": (price_run(bases, "rnn", cap, seed), variant(base, "rnn-truncated", cap, seed, **cut)),
        "sgd": (
            variant(base, "rnn-sgd", cap, seed, **keys, **THEORY),
            variant(base, "rnn-sgd-truncated", cap, seed, **cut, **THEORY),
        ),
    }


def plan(bases: dict[str, Experiment]) -> list[Experiment]:
    """Returns all runs in the order of training: the price curve with one seed, then the runs for the distances, then
    the price curve's other seeds."""
    runs = [price_run(bases, family, cap, SEEDS[0]) for cap in CAPS for family in bases]
    runs += [run for cap in DISTANCE_CAPS for pair in distance_runs(bases, cap).values() for run in pair]
    runs += [price_run(bases, family, cap, seed) for seed in SEEDS[1:] for cap in EXTREMES for family in bases]
    return list({run.name: run for run in runs}.values())


def is_done(folder: RunFolder, experiment: Experiment) -> bool:
    """Whether the folder contains this experiment, trained to its last step. Returns False for a folder with another
    experiment. The trainer refuses to train in such a folder."""
    if not folder.begun:
        return False
    found = folder.experiment()
    same_but_for_the_path = found.model_copy(update={"data": experiment.data}) == experiment
    return same_but_for_the_path and folder.load("checkpoint.pt")["step"] == experiment.training.steps


def measure_price(family: str, cap: float | None, run: Experiment, folder: RunFolder, longest: int) -> dict[str, Any]:
    """Measures one point of the price curve: the perplexity and the certificate of the run's best weights."""
    best, checkpoint = folder.load("best.pt"), folder.load("checkpoint.pt")
    weights = {name: tensor.numpy() for name, tensor in best["weights"].items()}
    architecture = run.model.architecture(len(weights["embedding.weight"]))
    certificate = certify(architecture, weights, longest, None)
    origins = folder.origins()
    return {
        "run": run.name,
        "family": family,
        "lambda": cap,
        "seed": run.training.seed,
        "perplexity": math.exp(best["valid_loss"]),
        "best_step": best["step"],
        "weights": sum(tensor.size for tensor in weights.values()),
        "factors": [layer.factor for layer in certificate.layers],
        "k": certificate.smallest_window(EPSILON),
        "reason": certificate.reason,
        "train_wall_s": round(checkpoint["wall_s"], 1),
        "origin": {
            "data": dict(checkpoint["data"]),
            "git_commit": origins[0].git_commit,
            "versions": origins[0].versions,
            "hardware": origins[0].hardware,
        },
    }


def measure_distance(recurrent: RunFolder, truncated: RunFolder, steps: range) -> dict[str, list[float]]:
    """Returns, at each of `steps`, the Euclidean distance between the two runs' weights, and the distance of each run's
    weights from the initial weights. Both runs started from the same initial weights."""
    start = recurrent.load(kept_name(0))["weights"]
    found: dict[str, list[float]] = {"steps": list(steps), "between": [], "recurrent_moved": [], "truncated_moved": []}
    for step in steps:
        one, other = (folder.load(kept_name(step))["weights"] for folder in (recurrent, truncated))
        found["between"].append(distance(one, other))
        found["recurrent_moved"].append(distance(one, start))
        found["truncated_moved"].append(distance(other, start))
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Returns the Euclidean distance between two sets of weights, over all tensors."""
    return math.sqrt(sum(float(((one[name].double() - other[name].double()) ** 2).sum()) for name in one))


def measure(bases: dict[str, Experiment], runs: Path, longest: int, console: Console) -> dict[str, Any]:
    """Measures the finished runs, whose folders are in `runs`."""

    def folder(run: Experiment) -> RunFolder:
        return RunFolder(runs / run.name)

    points = [
        (family, cap, price_run(bases, family, cap, seed))
        for family in bases
        for cap in CAPS
        for seed in (SEEDS if cap in EXTREMES else SEEDS[:1])
    ]
    done = [(family, cap, run) for family, cap, run in points if is_done(folder(run), run)]
    prices = [
        measure_price(family, cap, run, folder(run), longest)
        for family, cap, run in track(done, "certifying", console=console, transient=True)
    ]
    distances = [
        {"lambda": cap, "optimizer": optimizer, "alpha": THEORY["learning_rate"] if optimizer == "sgd" else None}
        | measure_distance(folder(one), folder(two), range(0, one.training.steps + 1, one.training.keep_every))
        for cap in DISTANCE_CAPS
        for optimizer, (one, two) in distance_runs(bases, cap).items()
        if is_done(folder(one), one) and is_done(folder(two), two)
    ]
    # Most runs have equal origins (data, commit, versions and hardware). Each different origin is listed once.
    origins = list({json.dumps(price.pop("origin")): None for price in prices})
    return {
        "epsilon": EPSILON,
        "longest_window": longest,
        "origins": [json.loads(origin) for origin in origins],
        "prices": prices,
        "distances": distances,
    }


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yields the tables of the results."""
    table = Table(title="The price of stability (validation split, recurrent mode)")
    for heading in ("model", "lambda", "seed", "perplexity per token", f"k({EPSILON:g})"):
        table.add_column(heading, justify="right")
    for point in results["prices"]:
        k = f"none up to {results['longest_window']}" if point["k"] is None else str(point["k"])
        row = (point["family"], str(point["lambda"] or "none"), str(point["seed"]), f"{point['perplexity']:.2f}", k)
        table.add_row(*row)
    yield table
    table = Table(title="Distances between the weights of recurrent training, of truncated training, and at the start")
    for heading in (
        "optimiser",
        "lambda",
        "step",
        "recurrent to truncated",
        "recurrent to start",
        "truncated to start",
    ):
        table.add_column(heading, justify="right")
    for found in results["distances"]:
        for index in sorted({1, len(found["steps"]) // 2, len(found["steps"]) - 1}):
            moved = (f"{found[key][index]:.3f}" for key in ("between", "recurrent_moved", "truncated_moved"))
            table.add_row(found["optimizer"], str(found["lambda"] or "none"), str(found["steps"][index]), *moved)
    yield table


def main(arguments: list[str] | None = None) -> int:
    """Trains the missing runs, then measures and plots all runs. Returns the exit status: 0, or 2 for invalid input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="file or folder of the training data")
    parser.add_argument("--runs", type=Path, required=True, help="parent folder of the run folders")
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json for every run")
    parser.add_argument("--gated", type=Path, default=EXPERIMENTS / "price-gated.toml", help="the Gated experiment")
    parser.add_argument("--rnn", type=Path, default=EXPERIMENTS / "price-rnn.toml", help="the RNN experiment")
    parser.add_argument(
        "--longest-window", type=int, default=1024, help="largest tested window, in tokens (default: %(default)s)"
    )
    parser.add_argument("--report", action="store_true", help="report the finished runs, without training")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figures", type=Path, help="output folder for stability_price.png and weight_distance.png")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        bases = {"gated": Experiment.read(options.gated), "rnn": Experiment.read(options.rnn)}
        runs = [] if options.report else plan(bases)
        for number, run in enumerate(runs, start=1):
            folder = RunFolder(options.runs / run.name)
            console.rule(f"{number} of {len(runs)}: {run.name}")
            if not is_done(folder, run):
                train(run, options.data, folder.path, options.tokenizer, "research.stability_price", console)
        told = {"command": command("research.stability_price", arguments or sys.argv[1:])}
        results = told | measure(bases, options.runs, options.longest_window, console)
    except (TrainingError, FloatingPointError) as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 2
    for table in tables(results):
        console.print(table)
    if options.json is not None:
        write_json(options.json, results)
    if options.figures is not None:
        options.figures.mkdir(parents=True, exist_ok=True)
        plot_prices(results, options.figures / "stability_price.png")
        plot_distances(results, options.figures / "weight_distance.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
