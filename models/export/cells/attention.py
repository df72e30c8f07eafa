"""Causal attention over the last tokens as ONNX nodes."""

from __future__ import annotations

import math

from wane.models.architecture import Placed
from wane.models.export.cell_writer import FiniteWriter, Times
from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear
from wane.models.layer_registry import Attention

EMPTY = 1e9
"""The score of a token before the first one is reduced by this number."""


class AttentionWriter(FiniteWriter):
    """Queries, keys and values of all tokens are computed in one product. The graphs for whole sequences contain a loop
    over `_attend`, so their rounding is that of the `step` graph."""

    def __init__(self, graph: GraphWriter, placed: Placed) -> None:
        super().__init__(graph, placed)
        assert isinstance(placed.layer, Attention)
        self._layer = placed.layer

    def step(self, x: str, state: list[str]) -> tuple[str, list[str]]:
        graph, one = self._graph, self._graph.integers(1)
        query, *fresh = self._projected(x)
        seen = [
            graph.node("Concat", old, graph.node("Unsqueeze", new, one), axis=1)
            for old, new in zip(state, fresh, strict=False)
        ]
        filled = graph.node("Pad", state[2], graph.integers(0, 0, 0, 1), graph.number(1.0))
        end = graph.integers(self._layer.window)
        after = [graph.node("Slice", each, one, end, one) for each in (*seen, filled)]
        return self._attend(graph, query, [*seen, filled]), after

    def sequence(self, x: str, times: Times, state: list[str]) -> tuple[str, list[str]]:
        graph, layer = self._graph, self._layer
        query, *fresh = self._projected(x)
        ones = graph.node("Expand", graph.number(1.0), graph.node("Concat", times.rows, graph.integers(1), axis=0))
        state = [*state[:2], graph.node("Unsqueeze", state[2], graph.integers(2))]
        by_row, after = [], []
        for old, new, width in zip(state, [*fresh, ones], (layer.units, layer.units, 1), strict=True):
            seen = times.seen(old, new, width)
            after.append(times.kept(seen, layer.reach, width))
            shape = graph.node("Concat", graph.integers(-1), times.shape_of_batch, graph.integers(width), axis=0)
            by_row.append(graph.node("Transpose", graph.node("Reshape", seen, shape), perm=[1, 0, 2]))
        after[2] = graph.node("Squeeze", after[2], graph.integers(2))
        keys, values, filled = *by_row[:2], graph.node("Squeeze", by_row[2], graph.integers(2))
        shape = graph.node("Concat", graph.integers(-1), times.shape_of_batch, graph.integers(layer.units), axis=0)
        queries = graph.node("Reshape", query, shape)
        count = graph.node("Squeeze", graph.node("Shape", queries, start=0, end=1))
        positions = graph.node("Range", graph.integer(0), count, graph.integer(1))

        def attend(body: GraphWriter, _: list[str], slices: list[str]) -> list[str]:
            start = body.node("Unsqueeze", slices[1], graph.integers(0))
            end, axis = body.node("Add", start, graph.integers(layer.window)), graph.integers(1)
            parts = [body.node("Slice", each, start, end, axis) for each in (keys, values, filled)]
            return [self._attend(body, slices[0], parts)]

        (y,) = graph.scan(attend, [], [queries, positions])
        return graph.node("Reshape", y, graph.integers(-1, layer.units)), after

    def _projected(self, x: str) -> list[str]:
        """Returns queries, keys and values: (N, units) each."""
        graph, rows = self._graph, 3 * self._layer.units
        weight = graph.weight(f"{self.placed.cell}.weight", rows, self.placed.inputs)
        y = linear(graph, x, weight, graph.weight(f"{self.placed.cell}.bias", rows))
        return graph.nodes("Split", y, outputs=3, axis=1, num_outputs=3)

    def _attend(self, graph: GraphWriter, query: str, seen: list[str]) -> str:
        """Returns the output of one token, (B, units). query: (B, units). seen: the keys and the values of the tokens
        in the window, (B, window, units), oldest first, and 1 for a token that exists, else 0, (B, window)."""
        (keys, values, filled), outer, layer = seen, self._graph, self._layer
        width = layer.units // layer.heads
        query = graph.node("Reshape", query, outer.integers(0, layer.heads, 1, width))
        keys = graph.node("Reshape", keys, outer.integers(0, 0, layer.heads, width))
        values = graph.node("Reshape", values, outer.integers(0, 0, layer.heads, width))
        scores = graph.node("MatMul", query, graph.node("Transpose", keys, perm=[0, 2, 3, 1]))
        scores = graph.node("Mul", scores, outer.number(1 / math.sqrt(width)))
        scores = graph.node("Add", scores, self._positions())
        empty = graph.node("Mul", graph.node("Sub", filled, outer.number(1.0)), outer.number(EMPTY))
        scores = graph.node("Add", scores, graph.node("Unsqueeze", empty, outer.integers(1, 2)))
        shares = graph.node("Softmax", scores, axis=-1)
        y = graph.node("MatMul", shares, graph.node("Transpose", values, perm=[0, 2, 1, 3]))
        return graph.node("Reshape", y, outer.integers(0, layer.units))

    def _positions(self) -> str:
        """Returns the table of positions, oldest first: (heads, 1, window)."""
        graph, layer = self._graph, self._layer
        table = graph.weight(f"{self.placed.cell}.positions", layer.heads, 1, layer.window)
        return graph.node("Gather", table, graph.integers(*reversed(range(layer.window))), axis=2)


def build(graph: GraphWriter, placed: Placed) -> AttentionWriter:
    """Builds the writer of one layer's cell."""
    return AttentionWriter(graph, placed)
