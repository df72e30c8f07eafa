"""Measures the time that the error bound of a window's answer adds to the window's run. (`research/proofs.py` measures
the bound's tightness.)

    python -m benchmarks.request_bounds [--repeat N]

Runs the `window` graph with and without the output `radius`, from which the bound is computed, alternately on one CPU
thread. Two Gated networks with random weights are measured: three layers of 256 units, and one layer of 512 units over
two convolution blocks. Also measures the numpy reference implementation of the bound for one window.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from wane.models.architecture import Architecture
from wane.models.certificate.request import RequestBound
from wane.models.export.roles import build_graph
from wane.models.weights import Weights, encode_weights, tensor_extents, weight_shapes

BATCHES = (1, 16)
LENGTHS = (16, 32, 64, 128, 256)
SIZES: dict[str, dict[str, object]] = {
    "three layers of 256 units": {"layers": 3, "feed_forward": 192},
    "one layer of 512 units over two convolution blocks": {
        "layers": 1,
        "units": 512,
        "feed_forward": 192,
        "front": {"blocks": 2, "kernel_size": 4, "feed_forward": 192},
    },
}


def random_weights(architecture: Architecture) -> dict[str, NDArray[np.float32]]:
    """Returns Gaussian weights whose scale is that of the initial weights in training."""
    generator = np.random.default_rng(0)
    return {
        name: (generator.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in weight_shapes(architecture).items()
    }


def session(
    directory: Path, architecture: Architecture, weights: Weights, bounded: bool
) -> onnxruntime.InferenceSession:
    """Opens the window graph. It has the output `radius` if `bounded` is true."""
    data = encode_weights(weights)
    (directory / "weights.safetensors").write_bytes(data)
    request = RequestBound(architecture, weights) if bounded else None
    path = directory / "window.onnx"
    path.write_bytes(build_graph("window", architecture, "weights.safetensors", tensor_extents(data), request))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def cost(repeat: int) -> None:
    """Measures the times, and prints them as a table."""
    table = Table(title=f"milliseconds, median (p10 to p90); onnxruntime {onnxruntime.__version__}")
    for heading in ("network", "batch", "k", "run", "run with radius", "ratio of medians", "ratio of minima", "numpy"):
        table.add_column(heading, justify="left" if heading == "network" else "right")
    generator = np.random.default_rng(0)
    for name, size in SIZES.items():
        shared = {"cell": "gated", "block": "residual", "vocabulary_size": 2048, "embedding": 256, "hidden": 256}
        architecture = Architecture.model_validate(shared | size)
        weights = random_weights(architecture)
        bound = RequestBound(architecture, weights)
        with tempfile.TemporaryDirectory() as directory:
            graphs = [session(Path(directory), architecture, weights, bounded) for bounded in (False, True)]
        for batch in BATCHES:
            for length in LENGTHS:
                tokens = generator.integers(architecture.vocabulary_size, size=(batch, length))
                feeds = {"tokens": tokens, "lengths": np.full(batch, length)}
                taken = np.zeros((2, repeat))
                for index in range(repeat):
                    for which, graph in enumerate(graphs):
                        begun = time.perf_counter()
                        graph.run(None, feeds)
                        taken[which, index] = 1000 * (time.perf_counter() - begun)
                begun = time.perf_counter()
                bound(tokens[:1])
                oracle = 1000 * (time.perf_counter() - begun)
                figures = np.percentile(taken, (50, 10, 90), axis=1).T
                cells = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in figures]
                ratios = figures[1, 0] / figures[0, 0], taken[1].min() / taken[0].min()
                table.add_row(
                    name, str(batch), str(length), *cells, *(f"{ratio:.2f}" for ratio in ratios), f"{oracle:.0f}"
                )
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=200, help="number of runs of each graph at each size")
    cost(parser.parse_args().repeat)


if __name__ == "__main__":
    main()
