"""Leaky units as ONNX nodes."""

from __future__ import annotations

from wane.models.architecture import Placed
from wane.models.export.cells.gated import GatedWriter
from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear


class LeakyWriter(GatedWriter):
    """The gated cell with constant gates. They are repeated for every row."""

    def gates_of(self, x: str) -> tuple[str, str]:
        graph, units = self._graph, self.hidden
        weight = graph.weight(self._prefix + "weight", units, self.inputs)
        gate = graph.node("Sigmoid", self._block("bias", 0))
        if self.layer.cap != 1.0:
            gate = graph.node("Mul", gate, graph.number(self.layer.cap))
        candidate = linear(graph, x, weight, self._block("bias", 1))
        return graph.node("Expand", gate, graph.node("Shape", candidate)), self._candidate(candidate)


def build(graph: GraphWriter, placed: Placed) -> LeakyWriter:
    """Builds the writer of one layer's cell."""
    return LeakyWriter(graph, placed)
