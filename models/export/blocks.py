"""The parts of a block around its cell as ONNX nodes: LayerNorm and feed-forward."""

from __future__ import annotations

from wane.models.architecture import Architecture
from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear


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
