"""The RNN with tanh or relu as ONNX nodes."""

from __future__ import annotations

from wane.models.architecture import Placed
from wane.models.export.cell_writer import CellWriter
from wane.models.export.graph import GraphWriter


class RnnWriter(CellWriter):
    """`h' = rho(W h + U x + b)`, rho = tanh or relu."""

    def step(self, graph: GraphWriter, state: list[str], driven: list[str]) -> list[str]:
        function = "Tanh" if self.layer.kind == "rnn_tanh" else "Relu"
        return [graph.node(function, self._recalled(graph, state[0], driven[0]))]


def build(graph: GraphWriter, placed: Placed) -> RnnWriter:
    """Builds the writer of one layer's cell."""
    return RnnWriter(graph, placed)
