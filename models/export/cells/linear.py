"""The linear cell as ONNX nodes."""

from __future__ import annotations

from wane.models.architecture import Placed
from wane.models.export.cell_writer import CellWriter
from wane.models.export.graph import GraphWriter


class LinearWriter(CellWriter):
    """`h' = W h + U x + b`."""

    def step(self, graph: GraphWriter, state: list[str], driven: list[str]) -> list[str]:
        return [self._recalled(graph, state[0], driven[0])]


def build(graph: GraphWriter, placed: Placed) -> LinearWriter:
    """Builds the writer of one layer's cell."""
    return LinearWriter(graph, placed)
