"""The linear recurrent unit as ONNX nodes."""

from __future__ import annotations

from wane.models.architecture import Placed
from wane.models.export.cell_writer import CellWriter
from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear


class LruWriter(CellWriter):
    """`s' = lambda s + U x + b` for complex s, whose real and imaginary parts are the two halves of the units."""

    def drive(self, x: str) -> list[str]:
        graph = self._graph
        weight = graph.weight(self._prefix + "weight", self.hidden, self.inputs)
        return [linear(graph, x, weight, graph.weight(self._prefix + "bias", self.hidden))]

    def step(self, graph: GraphWriter, state: list[str], driven: list[str]) -> list[str]:
        real, imaginary = self._decay()
        a, b = graph.nodes("Split", state[0], outputs=2, axis=1, num_outputs=2)
        kept = graph.node("Sub", graph.node("Mul", real, a), graph.node("Mul", imaginary, b))
        turned = graph.node("Add", graph.node("Mul", imaginary, a), graph.node("Mul", real, b))
        return [graph.node("Add", graph.node("Concat", kept, turned, axis=1), driven[0])]

    def _decay(self) -> tuple[str, str]:
        """Returns the real and the imaginary parts of lambda, (units / 2) each, in the outermost graph."""
        graph = self._graph
        nu, theta = (graph.weight(f"{self._prefix}{name}", self.hidden // 2) for name in ("nu", "theta"))
        size, angle = graph.node("Exp", graph.node("Neg", graph.node("Exp", nu))), graph.node("Exp", theta)
        return graph.node("Mul", size, graph.node("Cos", angle)), graph.node("Mul", size, graph.node("Sin", angle))


def build(graph: GraphWriter, placed: Placed) -> LruWriter:
    """Builds the writer of one layer's cell."""
    return LruWriter(graph, placed)
