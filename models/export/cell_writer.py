"""The common base classes of the cells as ONNX nodes. A step of a cell with fading memory has two parts.

`drive` computes the part that depends on the layer's input alone, for many rows in one product. `step` computes the
rest, token by token. In a first layer without convolution blocks below it, `drive` is a function of the token.
onnxruntime computes it for all V tokens when it loads the graph, and keeps a table of V rows, unless the table would be
too large (`network.py`). The graphs for whole sequences contain a loop over `step`, so their rounding is exactly that
of the `step` graph.

ONNX has operators for LSTM, GRU and RNN, but they multiply by the input's weights at every token. For 64 windows of 64
tokens on one CPU core, the loop takes 0.55 times the operator's time for an LSTM with 256 units, and 0.23 times for an
RNN with 384 units. For a single window, the factors are 1.2 (LSTM) and 0.56 (RNN). The gated cell's loop takes a
microsecond per token, which is less than a parallel scan takes (`benchmarks/recurrence.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from wane.models.architecture import Placed
from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear
from wane.models.layer_parts import load


class CellWriter(ABC):
    """One layer's cell in one graph. B: batch, T: time, N: any number of rows, I: inputs, H: hidden."""

    order: ClassVar[tuple[int, ...]] = (0,)
    """The order of the blocks of a weight's rows in `drive` and `step`."""

    def __init__(self, graph: GraphWriter, placed: Placed) -> None:
        self.placed = placed
        self.layer = placed.layer
        self.gates = placed.layer.gates
        self.hidden = placed.layer.units
        self.inputs = placed.inputs
        self._graph = graph
        self._prefix = f"{placed.cell}."

    def drive(self, x: str) -> list[str]:
        """Adds the part of N steps that depends on the input alone. x: (N, I). Returns the values that `step` needs, N
        rows each."""
        graph = self._graph
        bias = graph.node("Add", self._rows("bias_ih_l0"), self._rows("bias_hh_l0"))
        return [linear(graph, x, self._rows("weight_ih_l0", self.inputs), bias)]

    @abstractmethod
    def step(self, graph: GraphWriter, state: list[str], driven: list[str]) -> list[str]:
        """Adds the rest of one step. state: (B, H) each. driven: the results of `drive`, B rows each. Returns the next
        state."""

    def _recalled(self, graph: GraphWriter, h: str, driven: str) -> str:
        """Returns the pre-activations `W h + driven`. h: (B, H), driven: (B, gates * H)."""
        return linear(graph, h, self._rows("weight_hh_l0", self.hidden), driven, self._graph)

    def _block(self, name: str, index: int | slice, *columns: int) -> str:
        """Returns one or more consecutive blocks of H rows of a weight: (rows, *columns)."""
        graph = self._graph
        first, last = (index, index + 1) if isinstance(index, int) else (index.start, index.stop)
        weight = graph.weight(self._prefix + name, self.gates * self.hidden, *columns)
        extent = graph.integers(first * self.hidden), graph.integers(last * self.hidden)
        return graph.node("Slice", weight, *extent, graph.integers(0))

    def _rows(self, name: str, *columns: int) -> str:
        """Returns a weight with its blocks of H rows in `order`: (gates * H, *columns)."""
        graph = self._graph
        if self.order == tuple(range(self.gates)):
            return graph.weight(self._prefix + name, self.gates * self.hidden, *columns)
        weight = graph.weight(self._prefix + name, self.gates, self.hidden, *columns)
        weight = graph.node("Gather", weight, graph.integers(*self.order), axis=0)
        return graph.node("Reshape", weight, graph.integers(self.gates * self.hidden, *columns))


class InputGatedWriter(CellWriter):
    """Writes a cell `s' = f(x) s + (1 - f(x)) z(x)`. `models/export/radius.py` can bound the error of a window of such
    cells."""

    @abstractmethod
    def gates_of(self, x: str) -> tuple[str, str]:
        """Returns the gate f and the candidate z. x: (N, I)."""

    @abstractmethod
    def enter(self, gate: str, candidate: str) -> list[str]:
        """Returns the argument `driven` of `step` for a gate and a candidate."""


class FiniteWriter(ABC):
    """Writes the cell of one layer with finite memory into one graph. B: batch, T: time, N: T * B."""

    def __init__(self, graph: GraphWriter, placed: Placed) -> None:
        self.placed = placed
        self._graph = graph

    @abstractmethod
    def step(self, x: str, state: list[str]) -> tuple[str, list[str]]:
        """Adds one step. x: (B, I). state: the state tensors. Returns the output (B, units) and the next state."""

    @abstractmethod
    def sequence(self, x: str, times: Times, state: list[str]) -> tuple[str, list[str]]:
        """Adds a run over whole sequences. x: (N, I), time-major. state: the state before the first token. Returns the
        outputs (N, units), and the state after the last token of each sequence."""


class Times:
    """The shape of the batch of sequences in a graph. by_time: the tokens, (T, B). lengths: (B)."""

    def __init__(self, graph: GraphWriter, by_time: str, lengths: str) -> None:
        self._graph, self._by_time, self._lengths = graph, by_time, lengths
        self._batch = self._rows = ""
        self._kept: dict[int, str] = {}

    @property
    def batch(self) -> str:
        """The value B of the graph."""
        if not self._batch:
            graph = self._graph
            self._batch = graph.node("Squeeze", graph.node("Shape", self._by_time, start=1))
        return self._batch

    @property
    def shape_of_batch(self) -> str:
        """The value B of the graph, as a shape."""
        return self._graph.node("Unsqueeze", self.batch, self._graph.integers(0))

    @property
    def rows(self) -> str:
        """The number of rows, T * B."""
        if not self._rows:
            self._rows = self._graph.node("Size", self._by_time)
            self._rows = self._graph.node("Unsqueeze", self._rows, self._graph.integers(0))
        return self._rows

    def seen(self, before: str, rows: str, width: int) -> str:
        """Returns the rows of the tokens before the sequences, followed by `rows` (N, width), time-major. before: (B,
        earlier, width), oldest first."""
        graph = self._graph
        oldest_first = graph.node("Transpose", before, perm=[1, 0, 2])
        return graph.node("Concat", graph.node("Reshape", oldest_first, graph.integers(-1, width)), rows, axis=0)

    def kept(self, seen: str, earlier: int, width: int) -> str:
        """Returns the state after the last token of each sequence, (B, earlier, width). seen: see `seen`."""
        flat = self._graph.node("Gather", seen, self._kept_rows(earlier))
        return self._graph.node("Reshape", flat, self._graph.integers(-1, earlier, width))

    def _kept_rows(self, earlier: int) -> str:
        """Returns the rows that form the next state, if the rows of `earlier` tokens stand before the N rows of the
        sequences: (length + i) * B + b for i < earlier, ordered by b and then by i."""
        if earlier not in self._kept:
            graph = self._graph
            columns = graph.node("Range", graph.integer(0), self.batch, graph.integer(1))
            offsets = graph.integers(*range(earlier))
            times = graph.node("Add", graph.node("Unsqueeze", self._lengths, graph.integers(1)), offsets)
            rows = graph.node("Mul", times, self.batch)
            rows = graph.node("Add", rows, graph.node("Unsqueeze", columns, graph.integers(1)))
            self._kept[earlier] = graph.node("Reshape", rows, graph.integers(-1))
        return self._kept[earlier]


def build_cell(graph: GraphWriter, placed: Placed) -> CellWriter:
    """Builds the writer of the cell of one layer with fading memory."""
    writer: CellWriter = load("export", placed.layer.module).build(graph, placed)
    return writer


def build_finite_cell(graph: GraphWriter, placed: Placed) -> FiniteWriter:
    """Builds the writer of the cell of one layer with finite memory."""
    writer: FiniteWriter = load("export", placed.layer.module).build(graph, placed)
    return writer
