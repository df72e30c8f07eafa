"""Products of rows and a weight matrix as ONNX nodes, in float32 or in int8.

In int8, the weights of each output unit have a common scale, and each row of the input has its own scale, which is
computed at run time. A row's result therefore does not depend on the other rows of the batch. Sums of integers are
exact. The input is uint8 centred at 128, which processors can multiply by int8. The weights are scaled and rounded by
nodes that onnxruntime computes once, when it loads the graph. The weights file therefore contains only the float32
weights.
"""

from __future__ import annotations

from onnx import TensorProto

from wane.models.export.graph import GraphWriter

LEVELS = 127.0
MIDDLE = 128
SMALLEST = 2.0**-100
"""The lower limit of a row's largest absolute value. It prevents a division by 0 for rows of zeros."""


def linear(graph: GraphWriter, x: str, weight: str, bias: str, weights: GraphWriter | None = None) -> str:
    """Adds `x weight^T + bias`. x: (N, I). weight: (O, I). bias: (O) or (N, O). Returns (N, O).

    If `graph` is the body of a loop, `weights` is the graph that contains the loop and the weight.
    """
    if graph.precision == "float32":
        return graph.node("Gemm", x, weight, bias, transB=1)
    weights = weights or graph
    of_outputs = _scale(weights, weight)
    rounded = weights.node("Round", weights.node("Div", weight, of_outputs))
    rounded = weights.node("Cast", weights.node("Transpose", rounded, perm=[1, 0]), to=TensorProto.INT8)
    of_rows = _scale(graph, x)
    x = graph.node("Add", graph.node("Round", graph.node("Div", x, of_rows)), graph.number(MIDDLE))
    x = graph.node("Cast", x, to=TensorProto.UINT8)
    y = graph.node("MatMulInteger", x, rounded, graph.byte(MIDDLE))
    y = graph.node("Mul", graph.node("Cast", y, to=TensorProto.FLOAT), of_rows)
    y = graph.node("Mul", y, weights.node("Transpose", of_outputs, perm=[1, 0]))
    return graph.node("Add", y, bias)


def _scale(graph: GraphWriter, values: str) -> str:
    """Returns each row's scale, which is the difference between the values that two adjacent integers represent: (N, I)
    -> (N, 1)."""
    largest = graph.node("ReduceMax", graph.node("Abs", values), graph.integers(1), keepdims=1)
    return graph.node("Div", graph.node("Max", largest, graph.number(SMALLEST)), graph.number(LEVELS))
