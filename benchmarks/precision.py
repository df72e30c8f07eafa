"""Compares a bundle with an int8 export of the same weights (its int8 twin): CPU time, and agreement of the
predictions.

    python -m benchmarks.precision [BUNDLE ...] [--rounds N] [--json FILE]

The temporary twin is exported from the bundle's weights and tokenizer. The float32 model generates texts token by token
at temperature 1. The float32 model and the int8 model read these texts, each with its own state. After each token, the
predictions of the two models are compared. The server's own functions do this comparison. Times are CPU times of one
thread. Every round measures the two models one after the other. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.summary import Spread, provenance, ratios, write_json
from wane.models.bundle import Bundle
from wane.models.export import export_bundle
from wane.models.manifest import Precision, Role
from wane.models.parity import log_softmax
from wane.service.engine.agreement import AgreementStatistics, compare
from wane.service.runners.onnx import OnnxRunner
from wane.service.runners.runner import NEXT, Array

SHIPPED = Path("models/bundles/gated-stable")
TEXTS, TOKENS = 32, 128
RUNS: tuple[tuple[Role, int, int], ...] = (
    ("step", 1, 200),
    ("step", 16, 50),
    ("step", 64, 20),
    ("window", 1, 10),
    ("window", 16, 2),
)
"""The measured runs: the graph's role, the batch size, and the number of runs per round."""

Runners = dict[str, OnnxRunner]
Subject = dict[str, Any]


def twin(bundle: Bundle, folder: Path, precision: Precision) -> Bundle:
    """Exports the bundle's weights as a new bundle whose graphs compute in `precision`."""
    manifest = bundle.manifest
    random = np.random.default_rng(0)
    export_bundle(
        folder / precision,
        architecture=manifest.architecture,
        weights=bundle.weights(),
        vocabulary_kind=manifest.vocabulary.kind,
        tokenizer_json=(bundle.path / manifest.tokenizer).read_text(encoding="utf-8"),
        name=manifest.name,
        version=manifest.version,
        description=manifest.description,
        window=manifest.window,
        max_window=manifest.max_window,
        quality=None,
        provenance=manifest.provenance,
        sample_tokens=random.integers(manifest.vocabulary.size, size=256).tolist(),
        precision=precision,
    )
    return Bundle.read(folder / precision)


def zeros(bundle: Bundle, batch: int) -> dict[str, Array]:
    """Returns the states of `batch` sessions before the first token."""
    return {tensor.name: np.zeros((batch, *tensor.shape), np.float32) for tensor in bundle.manifest.state}


def agreement(bundle: Bundle, runners: Runners) -> AgreementStatistics:
    """Compares the two models' predictions at every token of the generated texts. Returns statistics of their
    agreement."""
    random, found = np.random.default_rng(1), AgreementStatistics()
    states = {precision: zeros(bundle, TEXTS) for precision in runners}
    tokens: NDArray[np.int64] = np.full(TEXTS, bundle.manifest.vocabulary.eos_id)
    for _ in range(TOKENS):
        outputs = {}
        for precision, runner in runners.items():
            outputs[precision] = runner.run("step", {"tokens": tokens, **states[precision]})
            states[precision] = {name: outputs[precision][NEXT + name] for name in states[precision]}
        exact, rounded = outputs["float32"], outputs["int8"]
        for row in range(TEXTS):
            pair = [(of["logits"][row], of["hidden"][row]) for of in (exact, rounded)]
            (p, h), (q, g) = pair
            found.add(compare(p, q, h, g, None, False))
        cumulative = np.exp(log_softmax(exact["logits"])).cumsum(axis=1)
        drawn = (cumulative > random.random((TEXTS, 1)) * cumulative[:, -1:]).argmax(axis=1)
        tokens = drawn.astype(np.int64)
    return found


def times(
    bundle: Bundle, runners: Mapping[str, OnnxRunner], role: Role, batch: int, repeat: int, rounds: int
) -> dict[str, list[float]]:
    """Returns each runner's CPU time per row of the batch in every round, in microseconds. `repeat` is the number of
    runs per round."""
    tokens = np.random.default_rng(0).integers(bundle.manifest.vocabulary.size, size=(batch, bundle.manifest.window))
    feeds: dict[str, Array] = {"tokens": tokens, "lengths": np.full(batch, tokens.shape[1])}
    if role == "step":
        feeds = {"tokens": tokens[:, 0].copy(), **zeros(bundle, batch)}
    taken: dict[str, list[float]] = {precision: [] for precision in runners}
    for turn in range(rounds + 1):
        for precision, runner in runners.items():
            begun = time.thread_time()
            for _ in range(repeat):
                runner.run(role, feeds)
            if turn:  # the first round is a warm-up
                taken[precision].append(1e6 * (time.thread_time() - begun) / repeat / batch)
    return taken


def in_turns(
    bundle: Bundle, runners: Mapping[str, OnnxRunner], rounds: int, *, slower: str, quicker: str
) -> list[dict[str, Any]]:
    """Measures two runners alternately with each of RUNS. Returns the CPU time of each runner per item (a row of a
    batch), in microseconds. Also returns the time of the runner `slower` divided by that of the runner `quicker`, in
    each round.
    """
    found = []
    for role, batch, repeat in RUNS:
        taken = times(bundle, runners, role, batch, repeat, rounds)
        found.append(
            {
                "role": role,
                "batch": batch,
                "us_per_item": {name: Spread.of(values) for name, values in taken.items()},
                "ratio": ratios(taken[slower], taken[quicker]),
            }
        )
    return found


def measure(path: Path, rounds: int) -> Subject:
    """Measures one bundle and its int8 twin."""
    bundle = Bundle.read(path)
    with tempfile.TemporaryDirectory() as folder:
        rounded = twin(bundle, Path(folder), "int8")
        runners: Runners = {"float32": OnnxRunner(bundle, "cpu", 1), "int8": OnnxRunner(rounded, "cpu", 1)}
        runs = in_turns(bundle, runners, rounds, slower="float32", quicker="int8")
        found = agreement(bundle, runners)
    return {
        "model": bundle.manifest.name,
        "window": bundle.manifest.window,
        "runs": runs,
        "agreement": to_builtins(found.report()),
    }


def table(subject: Subject, ratio: str) -> Table:
    """Returns a table of medians with the smallest and the largest value of all rounds. `ratio` is the last column's
    name."""
    made = Table(title=f"{subject['model']}: CPU time per item, us (windows of {subject['window']})")
    for heading in ("", *subject["runs"][0]["us_per_item"], ratio):
        made.add_column(heading, justify="right")
    for run in subject["runs"]:
        spreads = (f"{spread:.1f}" for spread in run["us_per_item"].values())
        made.add_row(f"{run['role']}, batch {run['batch']}", *spreads, f"{run['ratio'].median:.2f}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path, default=[SHIPPED], metavar="BUNDLE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="output file for the figures")
    options = parser.parse_args()
    subjects = [measure(path, options.rounds) for path in options.bundles]
    console = Console(width=110)
    for subject in subjects:
        console.print(table(subject, "float32 / int8"))
        counted = subject["agreement"]
        console.print(
            f"{counted['compared']} answers: top-1 agreement {counted['top1_match_rate']:.4f}, total variation "
            f"{counted['total_variation']['mean']:.2g} on average and {counted['total_variation']['max']:.2g} at most"
        )
    if options.json:
        origin = provenance("benchmarks.precision", "onnxruntime", "numpy", bundles=["gated-stable"])
        write_json(options.json, {**origin, "rounds": options.rounds, "subjects": subjects})


if __name__ == "__main__":
    main()
