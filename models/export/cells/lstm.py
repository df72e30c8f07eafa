"""The LSTM as ONNX nodes."""

from __future__ import annotations

from wane.models.architecture import Placed
from wane.models.export.cell_writer import CellWriter
from wane.models.export.graph import GraphWriter


class LstmWriter(CellWriter):
    """`c' = f c + i g`, `h' = o tanh(c')`."""

    order = (0, 1, 3, 2)
    """The order i, f, o, g, in which the three blocks with a sigmoid are adjacent."""

    def step(self, graph: GraphWriter, state: list[str], driven: list[str]) -> list[str]:
        pre = self._recalled(graph, state[0], driven[0])
        sizes = self._graph.integers(3 * self.hidden, self.hidden)
        gates, candidate = graph.nodes("Split", pre, sizes, outputs=2, axis=1)
        enter, keep, show = graph.nodes("Split", graph.node("Sigmoid", gates), outputs=3, axis=1, num_outputs=3)
        entering = graph.node("Mul", enter, graph.node("Tanh", candidate))
        c = graph.node("Add", graph.node("Mul", keep, state[1]), entering)
        return [graph.node("Mul", show, graph.node("Tanh", c)), c]


def build(graph: GraphWriter, placed: Placed) -> LstmWriter:
    """Builds the writer of one layer's cell."""
    return LstmWriter(graph, placed)
