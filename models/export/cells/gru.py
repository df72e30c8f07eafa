"""The GRU as ONNX nodes."""

from __future__ import annotations

from wane.models.architecture import Placed
from wane.models.export.cell_writer import CellWriter
from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear


class GruWriter(CellWriter):
    """`h' = n + z (h - n)`. `drive` returns two values: the input's terms of the gates r and z, and the input's terms
    of the candidate n."""

    def drive(self, x: str) -> list[str]:
        graph = self._graph
        biases = [self._block("bias_ih_l0", slice(0, 2)), self._block("bias_hh_l0", slice(0, 2))]
        gates = self._block("weight_ih_l0", slice(0, 2), self.inputs)
        candidate = self._block("weight_ih_l0", 2, self.inputs)
        return [
            linear(graph, x, gates, graph.node("Add", *biases)),
            linear(graph, x, candidate, self._block("bias_ih_l0", 2)),
        ]

    def step(self, graph: GraphWriter, state: list[str], driven: list[str]) -> list[str]:
        h = state[0]
        weight = self._block("weight_hh_l0", slice(0, 2), self.hidden)
        gates = graph.node("Sigmoid", linear(graph, h, weight, driven[0], self._graph))
        reset, update = graph.nodes("Split", gates, outputs=2, axis=1, num_outputs=2)
        weight = self._block("weight_hh_l0", 2, self.hidden)
        recalled = linear(graph, h, weight, self._block("bias_hh_l0", 2), self._graph)
        recalled = graph.node("Mul", reset, recalled)
        candidate = graph.node("Tanh", graph.node("Add", driven[1], recalled))
        return [graph.node("Add", candidate, graph.node("Mul", update, graph.node("Sub", h, candidate)))]


def build(graph: GraphWriter, placed: Placed) -> GruWriter:
    """Builds the writer of one layer's cell."""
    return GruWriter(graph, placed)
