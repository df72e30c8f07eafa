"""Compares two ways to compute the gated recurrence `s_t = f_t * s_(t-1) + u_t` in ONNX Runtime, on one CPU thread.

    python -m benchmarks.recurrence [--repeat N]

- loop: a Scan over time with a multiplication and an addition in its body. The bundles' graphs use this method.
- doubling in chunks of 16, 32 or 64: the positions of a chunk are computed in parallel, in log2(chunk) rounds. In round
  r = 0, 1, 2, ..., each position is combined with the position 2^r before it. A Scan over the chunks then carries the
  state from each chunk to the next.

Neither method computes exp(cumsum(log f)), which underflows.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import onnxruntime
from onnx import TensorProto
from rich.console import Console
from rich.table import Table

from wane.models.export.graph import GraphWriter

HIDDEN = 256
CHUNKS = (16, 32, 64)
SIZES = ((1, 16), (1, 64), (1, 128), (1, 512), (16, 16), (16, 64), (16, 128), (64, 64))
END = 2**62


def loop(graph: GraphWriter, f: str, u: str, initial: str) -> str:
    """Adds nodes that compute the states (T, B, H), one position after another."""

    def step(body: GraphWriter, state: list[str], slices: list[str]) -> list[str]:
        return [body.node("Add", body.node("Mul", slices[0], state[0]), slices[1])]

    return graph.scan(step, [initial], [f, u])[0]


def doubling(graph: GraphWriter, f: str, u: str, initial: str, chunk: int) -> str:
    """Adds nodes that compute the states (T, B, H). The states of all positions of a chunk are computed in parallel."""
    time_axis = graph.node("Shape", f, start=0, end=1)
    row = graph.node("Shape", f, start=1)
    missing = graph.node("Mod", graph.node("Neg", time_axis), graph.integers(chunk))
    pads = graph.node("Concat", graph.integers(0, 0, 0), missing, graph.integers(0, 0), axis=0)
    shape = graph.node("Concat", graph.integers(-1, chunk), row, axis=0)
    f, u = (graph.node("Reshape", graph.node("Pad", value, pads), shape) for value in (f, u))

    def part(value: str, start: int, end: int) -> str:
        extent = (graph.integers(start), graph.integers(end), graph.integers(1))
        return graph.node("Slice", value, *extent)

    reach = 1
    while reach < chunk:
        later = part(f, reach, END)
        inflow = graph.node("Add", part(u, reach, END), graph.node("Mul", later, part(u, 0, -reach)))
        u = graph.node("Concat", part(u, 0, reach), inflow, axis=1)
        f = graph.node("Concat", part(f, 0, reach), graph.node("Mul", later, part(f, 0, -reach)), axis=1)
        reach *= 2

    def join(body: GraphWriter, state: list[str], slices: list[str]) -> list[str]:
        states = body.node("Add", body.node("Mul", slices[0], state[0]), slices[1])
        return [body.node("Gather", states, body.integer(chunk - 1), axis=0), states]

    joined = graph.scan(join, [initial], [f, u])[1]
    flat = graph.node("Reshape", joined, graph.node("Concat", graph.integers(-1), row, axis=0))
    return graph.node("Slice", flat, graph.integers(0), time_axis)


def session(chunk: int | None) -> onnxruntime.InferenceSession:
    """Opens a graph that contains only the recurrence. If `chunk` is None, the graph uses the method `loop`. Otherwise
    it uses `doubling` in chunks of `chunk` positions."""
    graph = GraphWriter("recurrence", "", {})
    f, u = (graph.input(name, TensorProto.FLOAT, ["T", "B", HIDDEN]) for name in "fu")
    initial = graph.input("initial", TensorProto.FLOAT, ["B", HIDDEN])
    states = loop(graph, f, u, initial) if chunk is None else doubling(graph, f, u, initial, chunk)
    graph.output("states", states, ["T", "B", HIDDEN])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(graph.model(), options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Measures both methods, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=100, help="number of runs of each graph at each size")
    repeat = parser.parse_args().repeat
    sessions = {"loop": session(None)} | {f"chunks of {chunk}": session(chunk) for chunk in CHUNKS}
    table = Table(title=f"microseconds, median (p10 to p90); H = {HIDDEN}, onnxruntime {onnxruntime.__version__}")
    for heading in ("batch", "time", *sessions):
        table.add_column(heading, justify="right")
    generator = np.random.default_rng(0)
    for batch, length in SIZES:
        feeds = {
            "f": generator.uniform(0, 0.98, (length, batch, HIDDEN)).astype(np.float32),
            "u": generator.normal(size=(length, batch, HIDDEN)).astype(np.float32),
            "initial": generator.normal(size=(batch, HIDDEN)).astype(np.float32),
        }
        answers = [graph.run(None, feeds)[0] for graph in sessions.values()]
        for answer in answers[1:]:
            np.testing.assert_allclose(answer, answers[0], atol=1e-5)
        taken = np.zeros((len(sessions), repeat))
        for run in range(repeat):
            for index, graph in enumerate(sessions.values()):
                begun = time.perf_counter()
                graph.run(None, feeds)
                taken[index, run] = time.perf_counter() - begun
        figures = np.percentile(taken * 1e6, (50, 10, 90), axis=1).T
        table.add_row(str(batch), str(length), *(f"{m:.0f} ({low:.0f} to {high:.0f})" for m, low, high in figures))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
