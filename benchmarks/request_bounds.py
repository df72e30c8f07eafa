"""The bound of one request: what it costs beside the run, how tight it is, and how many answers it proves.

    python -m benchmarks.request_bounds cost [--repeat N]
    python -m benchmarks.request_bounds tightness BUNDLE TEXT [--windows N] [--positions N]

cost: the `window` graph with its radius and without, by turns, on one CPU thread, for two sizes of Gated networks with
random weights: three layers of 256, and one of 512 over two convolution blocks; and beside them what the oracle's own
bound costs in numpy, for one window.

tightness: at positions spread over a text, by k: the radius, the distance from the run over much more of the text that
was observed, and the share of positions whose top-1 is proved, by the radius alone and by direction.
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

from models.bundle_checks import read_manifest, read_vocabulary
from models.certificate.outward import Matrix
from models.certificate.request import RequestBound, WindowBound
from models.certificate.top1 import Top1
from models.export.roles import build_graph
from models.manifest import Architecture
from models.reference import Reference
from models.weights import Weights, decode_weights, encode_weights, head_weight, tensor_extents, weight_shapes

BATCHES = (1, 16)
LENGTHS = (16, 32, 64, 128, 256)
LONGER = 512
"""Tokens that the observed run reads before the window."""

SIZES: dict[str, dict[str, object]] = {
    "three layers of 256": {"layers": 3, "feed_forward": 192},
    "one layer of 512 over a front": {
        "layers": 1,
        "units": 512,
        "feed_forward": 192,
        "front": {"blocks": 2, "kernel_size": 4, "feed_forward": 192},
    },
}


def random_weights(architecture: Architecture) -> dict[str, NDArray[np.float32]]:
    """Gaussian, of the size that trained ones start from."""
    generator = np.random.default_rng(0)
    return {
        name: (generator.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in weight_shapes(architecture).items()
    }


def session(
    directory: Path, architecture: Architecture, weights: Weights, bounded: bool
) -> onnxruntime.InferenceSession:
    """The window graph, with or without its radius."""
    data = encode_weights(weights)
    (directory / "weights.safetensors").write_bytes(data)
    request = RequestBound(architecture, weights) if bounded else None
    path = directory / "window.onnx"
    path.write_bytes(build_graph("window", architecture, "weights.safetensors", tensor_extents(data), request))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def cost(repeat: int) -> None:
    """Prints the table of times."""
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


def tightness(bundle: Path, text: Path, windows: tuple[int, ...], positions: int) -> None:
    """Prints the table of radii."""
    manifest = read_manifest(bundle)
    architecture, weights = manifest.architecture, decode_weights((bundle / manifest.weights).read_bytes())
    stream = np.array(read_vocabulary(bundle, manifest).encode(text.read_text(encoding="utf-8")))
    ends = np.linspace(LONGER + max(windows), len(stream) - 1, positions).astype(np.int64)

    def tokens(length: int) -> NDArray[np.int64]:
        return stream[ends[:, None] + np.arange(1 - length, 1)]

    request, reference = RequestBound(architecture, weights), Reference(architecture, weights)
    prover, state = Top1(architecture, weights, request), reference.zero_state(positions)
    for column in tokens(LONGER + max(windows)).T:
        hidden, state = reference.advance(column, state)
    first = reference.logits(hidden).argmax(axis=1)
    table = Table(title=f"{manifest.name}: {positions} positions of {text.name}; median (largest)")
    for heading in ("k", "radius", "observed", "radius / observed", "same top-1", "proved by radius", "proved"):
        table.add_column(heading, justify="right")
    for length in windows:
        bound = request(tokens(length))
        observed = np.linalg.norm(bound.hidden - hidden, axis=1)
        assert (observed <= bound.radius).all(), "the bound is passed"
        proved = prover.proved(bound)
        same = reference.logits(bound.hidden).argmax(axis=1) == first
        assert same[proved].all(), "a proof is wrong"
        cells = [f"{np.median(values):.2g} ({values.max():.2g})" for values in (bound.radius, observed)]
        cells.append(f"{np.median(bound.radius / observed):.2g}")
        by_radius = proved_by_radius(bound, weights)
        table.add_row(str(length), *cells, *(f"{share.mean():.3f}" for share in (same, by_radius, proved)))
    Console(width=140).print(table)


def proved_by_radius(bound: WindowBound, weights: Weights) -> NDArray[np.bool_]:
    """The margin test with the radius alone."""
    rows: Matrix = head_weight(weights).astype(np.float64)
    logits = bound.hidden @ rows.T + weights["head.bias"].astype(np.float64)
    proved = np.zeros(len(logits), dtype=np.bool_)
    for index, (row, radius) in enumerate(zip(logits, bound.radius, strict=True)):
        first = int(row.argmax())
        lead = row[first] - row
        lead[first] = np.inf
        proved[index] = (lead > np.linalg.norm(rows - rows[first], axis=1) * radius).all()
    return proved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("cost")
    measured.add_argument("--repeat", type=int, default=200, help="runs of each graph at each size")
    told = commands.add_parser("tightness")
    told.add_argument("bundle", type=Path)
    told.add_argument("text", type=Path)
    told.add_argument("--windows", type=int, nargs="+", default=(16, 32, 48, 64, 96, 128, 256))
    told.add_argument("--positions", type=int, default=200)
    options = parser.parse_args()
    if options.command == "cost":
        cost(options.repeat)
    else:
        tightness(options.bundle, options.text, tuple(options.windows), options.positions)


if __name__ == "__main__":
    main()
