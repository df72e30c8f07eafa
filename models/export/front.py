"""The convolution blocks below the first layer as ONNX nodes, and their parts: LayerNorm and feed-forward."""

from __future__ import annotations

from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear
from wane.models.manifest import Architecture


def layer_norm(graph: GraphWriter, name: str, x: str, architecture: Architecture) -> str:
    """Adds a LayerNorm. x: (N, H) -> (N, H)."""
    return layer_norm_by(graph, name, x, architecture)[0]


def layer_norm_by(graph: GraphWriter, name: str, x: str, architecture: Architecture, outputs: int = 1) -> list[str]:
    """Adds a LayerNorm. x: (N, H) -> (N, H). With `outputs=3`, also returns the mean and 1 / sqrt(variance + epsilon),
    (N, 1) each."""
    scale, shift = (graph.weight(f"{name}.{part}", architecture.hidden) for part in ("weight", "bias"))
    operator, epsilon = "LayerNormalization", architecture.norm_epsilon
    return graph.nodes(operator, x, scale, shift, outputs=outputs, axis=-1, epsilon=epsilon)


def feed_forward(graph: GraphWriter, prefix: str, x: str, hidden: int, width: int) -> str:
    """Adds `W_2 relu(W_1 x + b_1) + b_2` with `width` inner units. x: (N, H) -> (N, H)."""
    for name, rows, columns in (("feed_forward_in", width, hidden), ("feed_forward_out", hidden, width)):
        weight, bias = graph.weight(f"{prefix}{name}.weight", rows, columns), graph.weight(f"{prefix}{name}.bias", rows)
        x = linear(graph, x, weight, bias)
        if name == "feed_forward_in":
            x = graph.node("Relu", x)
    return x


class FrontWriter:
    """Writes the causal-convolution blocks of an architecture, if it has any, into one graph. K: kernel size, B: batch,
    T: time."""

    def __init__(self, graph: GraphWriter, architecture: Architecture) -> None:
        self._graph = graph
        self._architecture = architecture
        self._hidden = architecture.hidden
        self._blocks = 0 if architecture.front is None else architecture.front.blocks
        self._kernel = 1 if architecture.front is None else architecture.front.kernel_size

    def step(self, x: str, state: list[str]) -> tuple[str, list[str]]:
        """Adds one step of the blocks. x: (B, H). state: all state tensors of the network. Returns the last block's
        output (B, H) and the blocks' next state."""
        graph, after = self._graph, []
        for block, before in zip(range(self._blocks), state, strict=False):
            fresh = graph.node("Unsqueeze", self._normalise(block, x), graph.integers(1))
            seen = graph.node("Concat", before, fresh, axis=1)
            y = graph.node("ReduceSum", graph.node("Mul", seen, self._taps(block)), graph.integers(1), keepdims=0)
            after.append(graph.node("Slice", seen, graph.integers(1), graph.integers(self._kernel), graph.integers(1)))
            x = self._feed_forward(block, x, y)
        return x, after

    def sequence(self, x: str, by_time: str, lengths: str, state: list[str]) -> tuple[str, list[str]]:
        """Adds the blocks over whole sequences. x: (T * B, H), time-major. by_time: the tokens, (T, B). lengths: (B).
        state: all state tensors of the network.

        Returns the last block's outputs (T * B, H), and the blocks' state after the last token of each sequence.
        """
        if self._blocks == 0:
            return x, []
        graph, earlier = self._graph, self._kernel - 1
        batch = graph.node("Squeeze", graph.node("Shape", by_time, start=1))
        rows = graph.node("Shape", x, start=0, end=1)
        kept = self._kept_rows(lengths, batch)
        after = []
        for block, before in zip(range(self._blocks), state, strict=False):
            oldest_first = graph.node("Transpose", before, perm=[1, 0, 2])
            before = graph.node("Reshape", oldest_first, graph.integers(-1, self._hidden))
            seen = graph.node("Concat", before, self._normalise(block, x), axis=0)
            y = ""
            for tap in range(self._kernel):
                start = graph.node("Mul", graph.integers(tap), batch)
                part = graph.node("Slice", seen, start, graph.node("Add", start, rows))
                weight = graph.node("Gather", self._taps(block), graph.integer(tap))
                part = graph.node("Mul", part, weight)
                y = graph.node("Add", y, part) if y else part
            flat = graph.node("Gather", seen, kept)
            shape = graph.integers(-1, earlier, self._hidden)
            after.append(graph.node("Reshape", flat, shape))
            x = self._feed_forward(block, x, y)
        return x, after

    def _kept_rows(self, lengths: str, batch: str) -> str:
        """Returns the rows of `seen` that form the next state: (length + i) * B + b for i < K - 1, ordered by b and
        then by i."""
        graph = self._graph
        columns = graph.node("Range", graph.integer(0), batch, graph.integer(1))
        offsets = graph.integers(*range(self._kernel - 1))
        times = graph.node("Add", graph.node("Unsqueeze", lengths, graph.integers(1)), offsets)
        rows = graph.node("Add", graph.node("Mul", times, batch), graph.node("Unsqueeze", columns, graph.integers(1)))
        return graph.node("Reshape", rows, graph.integers(-1))

    def _taps(self, block: int) -> str:
        return self._graph.weight(f"front.{block}.convolution.weight", self._kernel, self._hidden)

    def _normalise(self, block: int, x: str) -> str:
        return layer_norm(self._graph, f"front.{block}.norm", x, self._architecture)

    def _feed_forward(self, block: int, x: str, y: str) -> str:
        front = self._architecture.front
        assert front is not None, "the architecture has no convolution blocks: this is a bug"
        width = front.feed_forward
        return self._graph.node("Add", x, feed_forward(self._graph, f"front.{block}.", y, self._hidden, width))
