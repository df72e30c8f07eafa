"""Compares Wane's ONNX graphs with torch's export of the same network: size, number of nodes, and latency on one CPU
thread.

    python -m benchmarks.export [--repeat N]

Both exports contain the graphs `step` and `window` with the same random weights. First, the outputs of the two exports
are compared. Then timed runs alternate between the two exports. torch's window graph returns the state after the last
position, also for rows with fewer tokens. Wane's window graph returns, for each row, the state after the row's last
token. Needs the extras `train` and `bench`.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from wane.models.architecture import Architecture
from wane.models.export.roles import build_graph
from wane.models.layer_registry import Gated, Lstm
from wane.models.manifest import Role
from wane.models.networks import Network
from wane.models.weights import encode_weights, tensor_extents

VOCABULARY = 2048
ARCHITECTURES = {
    "gated": Architecture(
        vocabulary_size=VOCABULARY,
        embedding=256,
        layers=(Gated(units=256, block="residual", feed_forward=512, gate_cap=0.9),) * 3,
    ),
    "lstm": Architecture(vocabulary_size=VOCABULARY, embedding=256, layers=(Lstm(units=256),) * 2),
}
WINDOW = 64
BATCHES = (1, 16)

Feeds = dict[str, np.ndarray]


class TorchStep(nn.Module):
    """The network as a `step` graph."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        hidden, after = self.network(tokens[None], list(state))
        return self.network.logits(hidden[0]), hidden[0], *after


class TorchWindow(nn.Module):
    """The network as a `window` graph."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        every, after = self.network(tokens.T)
        hidden = every[lengths - 1, torch.arange(tokens.shape[0])]
        return self.network.logits(hidden), hidden, *after


@dataclass(frozen=True)
class Exported:
    """An exported graph. Its folder contains no other graph."""

    path: Path
    dynamic_time: bool

    def graph_bytes(self) -> int:
        return self.path.stat().st_size

    def weight_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.parent.iterdir() if file.suffix != ".onnx")

    def nodes(self) -> int:
        graph = onnx.load(str(self.path), load_external_data=False)
        return _count(graph.graph) + sum(len(function.node) for function in graph.functions)

    def session(self) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        return onnxruntime.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])


def _count(graph: onnx.GraphProto) -> int:
    """Counts a graph's nodes, including those in loop bodies."""
    bodies = (attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g"))
    return len(graph.node) + sum(_count(body) for body in bodies)


def export_ours(folder: Path, architecture: Architecture, network: Network, role: Role) -> Exported:
    """Writes Wane's graph for `role` and its weights into `folder`."""
    folder.mkdir()
    data = encode_weights({name: tensor.numpy() for name, tensor in network.weights().items()})
    (folder / "weights.safetensors").write_bytes(data)
    path = folder / f"{role}.onnx"
    path.write_bytes(build_graph(role, architecture, "weights.safetensors", tensor_extents(data)))
    return Exported(path, dynamic_time=True)


def export_torch(folder: Path, architecture: Architecture, network: Network, role: Role) -> Exported:
    """Exports with torch.onnx.export. If torch cannot keep the time axis dynamic, exports the graph for windows of one
    fixed length."""
    folder.mkdir()
    path = folder / f"{role}.onnx"
    batch = torch.export.Dim("B", min=1, max=4096)
    if role == "step":
        module: nn.Module = TorchStep(network)
        state = [torch.zeros(2, architecture.hidden) for _ in architecture.state_tensors()]
        arguments: tuple[Tensor, ...] = (torch.zeros(2, dtype=torch.int64), *state)
        attempts: list[tuple[object, ...]] = [({0: batch}, tuple({0: batch} for _ in state))]
    else:
        module = TorchWindow(network)
        arguments = (torch.zeros(2, WINDOW, dtype=torch.int64), torch.full((2,), WINDOW))
        span = torch.export.Dim("T", min=2, max=4096)
        attempts = [({0: batch, 1: span}, {0: batch}), ({0: batch}, {0: batch})]
    failure: Exception | None = None
    for index, shapes in enumerate(attempts):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.onnx.export(
                    module,
                    arguments,
                    str(path),
                    dynamo=True,
                    dynamic_shapes=shapes,
                    external_data=True,
                    verbose=False,
                )
            return Exported(path, dynamic_time=role == "step" or index == 0)
        except Exception as error:
            # torch raises many types of exceptions. If all attempts fail, the last exception is reported.
            failure = error
    raise SystemExit(f"torch cannot export the graph {role}: {failure}")


def feeds(architecture: Architecture, role: Role, batch: int) -> list[np.ndarray]:
    """Returns random inputs of the graph `role`, in the order of the graph's inputs."""
    generator = np.random.default_rng(batch)
    if role == "step":
        state = [generator.uniform(-1, 1, (batch, architecture.hidden)) for _ in architecture.state_tensors()]
        return [generator.integers(VOCABULARY, size=batch), *(value.astype(np.float32) for value in state)]
    return [generator.integers(VOCABULARY, size=(batch, WINDOW)), np.full(batch, WINDOW)]


def alternate(sessions: list[onnxruntime.InferenceSession], values: list[np.ndarray], repeat: int) -> list[np.ndarray]:
    """Asserts that the two ONNX Runtime sessions have equal outputs, and runs them alternately. Returns the durations
    of each session's runs, in seconds."""
    named = [dict(zip((i.name for i in session.get_inputs()), values, strict=True)) for session in sessions]
    answers = [session.run(None, inputs)[0] for session, inputs in zip(sessions, named, strict=True)]
    np.testing.assert_allclose(answers[0], answers[1], atol=1e-4)
    taken = np.zeros((len(sessions), repeat))
    for run in range(repeat):
        for index, (session, inputs) in enumerate(zip(sessions, named, strict=True)):
            begun = time.perf_counter()
            session.run(None, inputs)
            taken[index, run] = time.perf_counter() - begun
    return list(taken)


def main() -> None:
    """Measures both exports of each network, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=100, help="number of runs of each graph at each batch size")
    repeat = parser.parse_args().repeat
    logging.disable(logging.WARNING)
    table = Table(title=f"Wane's graphs and torch's, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}")
    for heading in ("network", "graph", "made by", "time axis"):
        table.add_column(heading)
    for heading in ("graph, bytes", "weights, bytes", "nodes"):
        table.add_column(heading, justify="right")
    for batch in BATCHES:
        table.add_column(f"batch {batch}: median (p10 to p90), ms", justify="right")
    with tempfile.TemporaryDirectory() as temporary:
        for name, architecture in ARCHITECTURES.items():
            torch.manual_seed(0)
            network = Network(architecture).eval().requires_grad_(False)
            for role in ("step", "window"):
                folder = Path(temporary) / f"{name}-{role}"
                folder.mkdir()
                made = {
                    "ours": export_ours(folder / "ours", architecture, network, role),
                    "torch": export_torch(folder / "torch", architecture, network, role),
                }
                sessions = [exported.session() for exported in made.values()]
                taken = [alternate(sessions, feeds(architecture, role, batch), repeat) for batch in BATCHES]
                for index, (maker, exported) in enumerate(made.items()):
                    figures = [np.percentile(runs[index] * 1e3, (50, 10, 90)) for runs in taken]
                    table.add_row(
                        *(name, role, maker, "dynamic" if exported.dynamic_time else f"fixed {WINDOW}"),
                        *(f"{exported.graph_bytes():,}", f"{exported.weight_bytes():,}", str(exported.nodes())),
                        *(f"{median:.3f} ({low:.3f} to {high:.3f})" for median, low, high in figures),
                    )
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
