"""The network as ONNX nodes: embedding, layers and output layer, for one step and for whole sequences."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from models.export.cells import CellWriter
from models.export.front import FrontWriter, feed_forward, layer_norm
from models.export.graph import GraphWriter
from models.manifest import STATE_NAMES, Architecture

TABLE_ELEMENTS = 1 << 22
"""The largest per-token table folded at load, in floats (16 MiB): beyond it the projection is computed per request."""


@dataclass(frozen=True, slots=True)
class SequenceRun:
    """What is left of a run over sequences: hidden after every token (T * B, H), after the last (B, H), the state."""

    every: str
    last: str
    state: list[str]


class NetworkWriter:
    """The network in one graph. Rows are flat, (N, H): N = B for a step, N = T * B, time-major, for sequences."""

    def __init__(self, graph: GraphWriter, architecture: Architecture) -> None:
        self._graph = graph
        self._architecture = architecture
        self._residual = architecture.block == "residual"
        self._states = len(STATE_NAMES[architecture.cell])
        self._front = FrontWriter(graph, architecture)
        self._cells = [CellWriter(graph, architecture, layer) for layer in range(architecture.layers)]

    def step(self, tokens: str, state: list[str]) -> tuple[str, list[str]]:
        """tokens: (B). Returns hidden (B, H) and the state after."""
        x = self._graph.node("Gather", self._embedding(), tokens)
        x, after = self._front.step(x, state)
        for layer, cell in enumerate(self._cells):
            driven = self._drive(layer, tokens, x)
            after += cell.step(self._graph, self._state_of(layer, state), driven)
            x = self._above_cell(layer, x, after[-self._states])
        return self._normalise("norm", x) if self._residual else x, after

    def sequence(self, tokens: str, lengths: str, state: list[str] | None, every: bool) -> SequenceRun:
        """tokens: (B, T); lengths: (B); state: None for zeros.

        Unless `every`, only the rows that the last hidden needs go through what stands above the last cell, and
        the result's `every` is "".
        """
        graph = self._graph
        by_time = graph.node("Transpose", tokens, perm=[1, 0])
        shape = graph.node("Shape", by_time)
        flat = graph.node("Reshape", by_time, graph.integers(-1))
        last = self._last_rows(lengths, graph.node("Shape", by_time, start=1))
        short_lengths = graph.node("Cast", lengths, to=TensorProto.INT32)
        if state is None:
            state = self._zeros(shape)
        x = graph.node("Gather", self._embedding(), flat)
        x, after = self._front.sequence(x, by_time, lengths, state)
        for layer, cell in enumerate(self._cells):
            top = layer == len(self._cells) - 1
            before = self._state_of(layer, state)
            if cell.has_operator:
                fed = self._reshape(self._input(layer, x), shape, cell.inputs)
                y, ends = cell.operator(fed, short_lengths, before, every=every or not top)
                y = graph.node("Reshape", y, graph.integers(-1, cell.hidden)) if y else ends[0]
            else:
                driven = [self._reshape(value, shape, cell.hidden) for value in self._drive(layer, flat, x)]
                stacked = graph.scan(cell.step, before, driven)
                rows = [graph.node("Reshape", value, graph.integers(-1, cell.hidden)) for value in stacked]
                ends = [graph.node("Gather", value, last) for value in rows]
                y = ends[0] if top and not every else rows[0]
            if top and not every and self._residual:
                x = graph.node("Gather", x, last)
            x = self._above_cell(layer, x, y)
            after += ends
        x = self._normalise("norm", x) if self._residual else x
        if every:
            return SequenceRun(x, graph.node("Gather", x, last), after)
        return SequenceRun("", x, after)

    def head(self, graph: GraphWriter, hidden: str) -> str:
        """hidden: (N, H). Returns logits (N, V), in this network's graph or the body of a loop in it."""
        architecture = self._architecture
        name = "embedding.weight" if architecture.tied else "head.weight"
        weight = self._graph.weight(name, architecture.vocabulary_size, architecture.hidden)
        bias = self._graph.weight("head.bias", architecture.vocabulary_size)
        return graph.node("Gemm", hidden, weight, bias, transB=1)

    def _embedding(self) -> str:
        architecture = self._architecture
        return self._graph.weight("embedding.weight", architecture.vocabulary_size, architecture.embedding)

    def _input(self, layer: int, x: str) -> str:
        """What the cell reads: x, or its LayerNorm."""
        return self._normalise(f"layers.{layer}.norm", x) if self._residual else x

    def _drive(self, layer: int, tokens: str, x: str) -> list[str]:
        """The cell's drive, row by row. In the first layer it depends on the token alone: a table of V rows."""
        cell = self._cells[layer]
        if (
            layer == 0
            and self._architecture.front is None
            and self._architecture.vocabulary_size * cell.gates * cell.hidden <= TABLE_ELEMENTS
        ):
            tables = cell.drive(self._input(layer, self._embedding()))
            return [self._graph.node("Gather", table, tokens) for table in tables]
        return cell.drive(self._input(layer, x))

    def _above_cell(self, layer: int, x: str, y: str) -> str:
        """The rest of a block. x: its input, y: its cell's output, both (N, H)."""
        if not self._residual:
            return y
        graph, hidden, width = self._graph, self._architecture.hidden, self._architecture.feed_forward
        units = self._architecture.cell_units
        prefix = f"layers.{layer}."
        x = graph.node("Gemm", y, graph.weight(prefix + "mix.weight", hidden, units), x, transB=1)
        if width == 0:
            return x
        y = self._normalise(prefix + "feed_forward_norm", x)
        return graph.node("Add", x, feed_forward(graph, prefix, y, hidden, width))

    def _normalise(self, name: str, x: str) -> str:
        return layer_norm(self._graph, name, x, self._architecture)

    def _state_of(self, layer: int, state: list[str]) -> list[str]:
        first = len(self._architecture.front_tensors()) + layer * self._states
        return state[first : first + self._states]

    def _reshape(self, rows: str, shape: str, width: int) -> str:
        """(T * B, width) -> (T, B, width)."""
        graph = self._graph
        return graph.node("Reshape", rows, graph.node("Concat", shape, graph.integers(width), axis=0))

    def _last_rows(self, lengths: str, batch: str) -> str:
        """The flat row of each sequence's last token: (length - 1) * B + b."""
        graph = self._graph
        size = graph.node("Squeeze", batch)
        columns = graph.node("Range", graph.integer(0), size, graph.integer(1))
        before = graph.node("Mul", graph.node("Sub", lengths, graph.integer(1)), size)
        return graph.node("Add", before, columns)

    def _zeros(self, shape: str) -> list[str]:
        graph = self._graph
        batch = graph.node("Gather", shape, graph.integers(1))
        shapes = [tensor.shape for tensor in self._architecture.state_tensors()]
        zeros = {
            each: graph.node("ConstantOfShape", graph.node("Concat", batch, graph.integers(*each), axis=0))
            for each in dict.fromkeys(shapes)
        }
        return [zeros[each] for each in shapes]
