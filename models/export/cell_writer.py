"""The common base class of the cells as ONNX nodes. A step has two parts.

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

from wane.models.cell_registry import CELLS, load
from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear
from wane.models.manifest import Architecture


class CellWriter(ABC):
    """One layer's cell in one graph. B: batch, T: time, N: any number of rows, I: inputs, H: hidden."""

    order: ClassVar[tuple[int, ...]] = (0,)
    """The order of the blocks of a weight's rows in `drive` and `step`."""

    def __init__(self, graph: GraphWriter, architecture: Architecture, layer: int) -> None:
        self.cell = architecture.cell
        self.gates = CELLS[architecture.cell].gates
        self.hidden = architecture.cell_units
        self.inputs = architecture.cell_inputs(layer)
        self.gate_cap = architecture.gate_cap(layer)
        self._graph = graph
        self._prefix = f"layers.{layer}.cell."

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


def build_cell(graph: GraphWriter, architecture: Architecture, layer: int) -> CellWriter:
    """Builds the writer of one layer's cell."""
    writer: CellWriter = load("export", architecture.cell).build(graph, architecture, layer)
    return writer
