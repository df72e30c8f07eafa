"""The causal convolution as ONNX nodes."""

from __future__ import annotations

from wane.models.architecture import Placed
from wane.models.export.cell_writer import FiniteWriter, Times
from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear
from wane.models.layer_registry import Convolution


class ConvolutionWriter(FiniteWriter):
    """`y_t = activation(sum_j K_j x_(t - j d) + b)`. A step and a sequence add the same terms in the same order. A
    front
    block is the exception: its step sums all terms in one node."""

    def __init__(self, graph: GraphWriter, placed: Placed) -> None:
        super().__init__(graph, placed)
        assert isinstance(placed.layer, Convolution)
        self._layer = placed.layer

    def step(self, x: str, state: list[str]) -> tuple[str, list[str]]:
        graph, layer = self._graph, self._layer
        fresh = graph.node("Unsqueeze", x, graph.integers(1))
        seen = graph.node("Concat", state[0], fresh, axis=1)
        if layer.block == "front":
            y = graph.node("ReduceSum", graph.node("Mul", seen, self._taps()), graph.integers(1), keepdims=0)
        else:
            taps = [graph.integer(tap * layer.dilation) for tap in range(layer.kernel_size)]
            y = self._summed([graph.node("Gather", seen, tap, axis=1) for tap in taps])
        after = graph.node("Slice", seen, graph.integers(1), graph.integers(layer.reach + 1), graph.integers(1))
        return self._activated(y), [after]

    def sequence(self, x: str, times: Times, state: list[str]) -> tuple[str, list[str]]:
        graph, layer, inputs = self._graph, self._layer, self.placed.inputs
        seen = times.seen(state[0], x, inputs)
        parts = []
        for tap in range(layer.kernel_size):
            start = graph.node("Mul", graph.integers(tap * layer.dilation), times.batch)
            parts.append(graph.node("Slice", seen, start, graph.node("Add", start, times.rows)))
        return self._activated(self._summed(parts)), [times.kept(seen, layer.reach, inputs)]

    def _summed(self, parts: list[str]) -> str:
        """Returns `sum_j K_j x_j + b`, (N, rows). parts: x_j, (N, I), oldest first."""
        graph, layer, taps = self._graph, self._layer, self._taps()
        bias = "" if layer.block == "front" else graph.weight(f"{self.placed.cell}.bias", layer.rows)
        y = bias if layer.channels == "full" else ""
        for tap, part in enumerate(parts):
            weight = graph.node("Gather", taps, graph.integer(tap))
            if layer.channels == "full":
                y = linear(graph, part, weight, y)
                continue
            if layer.rows != layer.units:
                part = graph.node("Concat", part, part, axis=1)
            part = graph.node("Mul", part, weight)
            y = graph.node("Add", y, part) if y else part
        return graph.node("Add", y, bias) if bias and layer.channels == "depthwise" else y

    def _activated(self, y: str) -> str:
        graph, layer = self._graph, self._layer
        if layer.activation in ("relu", "tanh"):
            return graph.node(layer.activation.capitalize(), y)
        if layer.activation == "none":
            return y
        value, gate = graph.nodes("Split", y, outputs=2, axis=1, num_outputs=2)
        value = graph.node("Tanh", value) if layer.activation == "wavenet" else value
        return graph.node("Mul", value, graph.node("Sigmoid", gate))

    def _taps(self) -> str:
        shape = self._layer.tensors(self.placed.inputs)["weight"]
        return self._graph.weight(f"{self.placed.cell}.weight", *shape)


def build(graph: GraphWriter, placed: Placed) -> ConvolutionWriter:
    """Builds the writer of one layer's cell."""
    return ConvolutionWriter(graph, placed)
