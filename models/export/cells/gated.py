"""The gated cell as ONNX nodes."""

from __future__ import annotations

from wane.models.architecture import Placed
from wane.models.export.cell_writer import InputGatedWriter
from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear
from wane.models.layer_registry import InputGated


class GatedWriter(InputGatedWriter):
    """`s' = f s + (1 - f) z`. `drive` returns f and (1 - f) z."""

    def drive(self, x: str) -> list[str]:
        return self.enter(*self.gates_of(x))

    def gates_of(self, x: str) -> tuple[str, str]:
        graph = self._graph
        gate, candidate = (
            linear(graph, x, self._block("weight", i, self.inputs), self._block("bias", i)) for i in range(2)
        )
        gate = graph.node("Sigmoid", gate)
        if self.layer.cap != 1.0:
            gate = graph.node("Mul", gate, graph.number(self.layer.cap))
        return gate, self._candidate(candidate)

    def _candidate(self, value: str) -> str:
        assert isinstance(self.layer, InputGated)
        graph = self._graph
        if self.layer.candidate == "positive":
            above = graph.node("Add", value, graph.number(0.5))
            return graph.node(
                "Where", graph.node("Less", value, graph.number(0.0)), graph.node("Sigmoid", value), above
            )
        return graph.node("Tanh", value) if self.layer.candidate == "tanh" else value

    def enter(self, gate: str, candidate: str) -> list[str]:
        graph = self._graph
        return [gate, graph.node("Sub", candidate, graph.node("Mul", gate, candidate))]

    def step(self, graph: GraphWriter, state: list[str], driven: list[str]) -> list[str]:
        return [graph.node("Add", graph.node("Mul", driven[0], state[0]), driven[1])]


def build(graph: GraphWriter, placed: Placed) -> GatedWriter:
    """Builds the writer of one layer's cell."""
    return GatedWriter(graph, placed)
