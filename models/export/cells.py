"""The cells as ONNX nodes. The equations are those of `models/reference.py`.

A step is written in two halves: `drive` is what depends on the layer's input alone, for many rows at once, and `step`
is the rest, token by token. In the first layer `drive` is a function of the token and folds into a table, V rows that
are computed when the graph is loaded. Whole sequences loop over `step`, so that they round as streaming does. ONNX has
operators for LSTM, GRU and RNN; they multiply by the input's weights at every token. On one CPU core 64 windows of 64
tokens take 0.55 of the operator's time in the loop for an LSTM of 256, and 0.23 for an RNN of 384; a window alone takes
1.2 times as long for the LSTM, and 0.56 for the RNN. The gated loop costs a microsecond a token, less than solving
chunks by doubling (`benchmarks/recurrence.py`).
"""

from __future__ import annotations

from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear
from wane.models.manifest import Architecture, Cell
from wane.models.weights import GATES

STEP_ORDER: dict[Cell, tuple[int, ...]] = {
    "linear": (0,),
    "rnn_tanh": (0,),
    "rnn_relu": (0,),
    "lstm": (0, 1, 3, 2),  # i, f, o, g: the three sigmoids side by side
}
"""The order in which `drive` and `step` want the blocks of a weight's rows."""


class CellWriter:
    """One layer's cell in one graph. B: batch, T: time, N: any number of rows, I: inputs, H: hidden."""

    def __init__(self, graph: GraphWriter, architecture: Architecture, layer: int) -> None:
        self.cell = architecture.cell
        self.gates = GATES[architecture.cell]
        self.hidden = architecture.cell_units
        self.inputs = architecture.embedding if layer == 0 else architecture.hidden
        self._graph = graph
        self._prefix = f"layers.{layer}.cell."
        self._gate_cap = architecture.gate_cap(layer)

    def drive(self, x: str) -> list[str]:
        """What the input contributes. x: (N, I). Returns values of N rows, as `step` wants them."""
        graph = self._graph
        if self.cell == "gated":
            return self.enter(*self.gates_of(x))
        if self.cell == "gru":
            biases = [self._block("bias_ih_l0", slice(0, 2)), self._block("bias_hh_l0", slice(0, 2))]
            gates = self._block("weight_ih_l0", slice(0, 2), self.inputs)
            candidate = self._block("weight_ih_l0", 2, self.inputs)
            return [
                linear(graph, x, gates, graph.node("Add", *biases)),
                linear(graph, x, candidate, self._block("bias_ih_l0", 2)),
            ]
        order = STEP_ORDER[self.cell]
        bias = graph.node("Add", self._rows("bias_ih_l0", order), self._rows("bias_hh_l0", order))
        weight = self._rows("weight_ih_l0", order, self.inputs)
        return [linear(graph, x, weight, bias)]

    def gates_of(self, x: str) -> tuple[str, str]:
        """A gated cell's gate f and candidate z. x: (N, I)."""
        graph = self._graph
        gate, candidate = (
            linear(graph, x, self._block("weight", i, self.inputs), self._block("bias", i)) for i in range(2)
        )
        gate = graph.node("Sigmoid", gate)
        if self._gate_cap != 1.0:
            gate = graph.node("Mul", gate, graph.number(self._gate_cap))
        return gate, graph.node("Tanh", candidate)

    def enter(self, gate: str, candidate: str) -> list[str]:
        """What `step` wants of them: f and (1 - f) z."""
        graph = self._graph
        return [gate, graph.node("Sub", candidate, graph.node("Mul", gate, candidate))]

    def step(self, graph: GraphWriter, state: list[str], driven: list[str]) -> list[str]:
        """The state after one token. state: (B, H) each; driven: from `drive`, B rows."""
        if self.cell == "gated":
            return [graph.node("Add", graph.node("Mul", driven[0], state[0]), driven[1])]
        h = state[0]
        if self.cell == "gru":
            weight = self._block("weight_hh_l0", slice(0, 2), self.hidden)
            gates = graph.node("Sigmoid", linear(graph, h, weight, driven[0], self._graph))
            reset, update = graph.nodes("Split", gates, outputs=2, axis=1, num_outputs=2)
            weight = self._block("weight_hh_l0", 2, self.hidden)
            recalled = linear(graph, h, weight, self._block("bias_hh_l0", 2), self._graph)
            recalled = graph.node("Mul", reset, recalled)
            candidate = graph.node("Tanh", graph.node("Add", driven[1], recalled))
            return [graph.node("Add", candidate, graph.node("Mul", update, graph.node("Sub", h, candidate)))]
        weight = self._rows("weight_hh_l0", STEP_ORDER[self.cell], self.hidden)
        pre = linear(graph, h, weight, driven[0], self._graph)
        if self.cell == "lstm":
            sizes = self._graph.integers(3 * self.hidden, self.hidden)
            gates, candidate = graph.nodes("Split", pre, sizes, outputs=2, axis=1)
            enter, keep, show = graph.nodes("Split", graph.node("Sigmoid", gates), outputs=3, axis=1, num_outputs=3)
            entering = graph.node("Mul", enter, graph.node("Tanh", candidate))
            c = graph.node("Add", graph.node("Mul", keep, state[1]), entering)
            return [graph.node("Mul", show, graph.node("Tanh", c)), c]
        match self.cell:
            case "linear":
                return [pre]
            case "rnn_tanh":
                return [graph.node("Tanh", pre)]
            case _:
                return [graph.node("Relu", pre)]

    def _block(self, name: str, index: int | slice, *columns: int) -> str:
        """Blocks of H rows of a weight, by position: (rows, *columns)."""
        graph = self._graph
        first, last = (index, index + 1) if isinstance(index, int) else (index.start, index.stop)
        weight = graph.weight(self._prefix + name, self.gates * self.hidden, *columns)
        extent = graph.integers(first * self.hidden), graph.integers(last * self.hidden)
        return graph.node("Slice", weight, *extent, graph.integers(0))

    def _rows(self, name: str, order: tuple[int, ...], *columns: int) -> str:
        """A weight with its blocks of H rows in another order: (gates * H, *columns)."""
        graph = self._graph
        if order == tuple(range(self.gates)):
            return graph.weight(self._prefix + name, self.gates * self.hidden, *columns)
        weight = graph.weight(self._prefix + name, self.gates, self.hidden, *columns)
        weight = graph.node("Gather", weight, graph.integers(*order), axis=0)
        return graph.node("Reshape", weight, graph.integers(self.gates * self.hidden, *columns))
