"""Measures the CPU time that lookup tables save. A table has, for each token, the product of the token's embedding and
the first layer's input weights.

    python -m benchmarks.lookup [BUNDLE ...] [--rounds N] [--json FILE]

Without BUNDLE, the bundles are the model of `benchmarks/bench/lstm256.py` and the shipped lstm. Each bundle is compared
with a temporary export of the same weights without tables, whose first layer multiplies at each step. All times are CPU
times of one thread. Every round measures the bundle and the export one after the other. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
from rich.console import Console

from benchmarks.bench import lstm256
from benchmarks.precision import Subject, in_turns, table, twin
from benchmarks.summary import provenance, write_json
from wane.models.bundle import Bundle
from wane.models.export import network
from wane.models.parity import log_softmax
from wane.service.runners.onnx import OnnxRunner

SHIPPED = Path("models/bundles/lstm")
SAME = 1e-4  # largest accepted difference between log-probabilities with and without tables


def measure(path: Path, rounds: int) -> Subject:
    """Measures the CPU times of one bundle with and without tables. Exits if the log-probabilities with and without
    tables differ by more than SAME."""
    bundle = Bundle.read(path)
    with tempfile.TemporaryDirectory() as folder:
        with patch.object(network, "TABLE_ELEMENTS", 0):
            plain = twin(bundle, Path(folder), "float32")
        runners = {"looked up": OnnxRunner(bundle, "cpu", 1), "multiplied": OnnxRunner(plain, "cpu", 1)}
        tokens = np.arange(bundle.manifest.window)[None]
        feeds = {"tokens": tokens, "lengths": np.array([tokens.size])}
        said = [log_softmax(runner.run("window", feeds)["logits"]) for runner in runners.values()]
        apart = float(np.abs(said[0] - said[1]).max())
        if not apart <= SAME:
            raise SystemExit(
                f"{bundle.manifest.name}: log-probabilities with and without tables differ by {apart}, "
                f"but may differ by at most {SAME}"
            )
        runs = in_turns(bundle, runners, rounds, slower="multiplied", quicker="looked up")
    return {"model": bundle.manifest.name, "window": bundle.manifest.window, "apart": apart, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path, metavar="BUNDLE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="output file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = options.bundles
        if not paths:
            lstm256.export(Path(folder))
            paths = [Path(folder) / lstm256.NAME, SHIPPED]
        subjects = [measure(path, options.rounds) for path in paths]
    for subject in subjects:
        Console().print(table(subject, "multiplied / looked up"))
    if options.json is not None:
        origin = provenance("benchmarks.lookup", "onnxruntime", "numpy", bundles=["lstm"])
        write_json(options.json, {**origin, "rounds": options.rounds, "subjects": subjects})


if __name__ == "__main__":
    main()
