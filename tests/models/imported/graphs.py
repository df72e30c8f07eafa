"""Small ONNX graphs for the tests, built without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
value = helper.make_tensor_value_info
node = helper.make_node

VOCABULARY, UNITS = 11, 6
"""The size of `WORDS` of tests/models/bundles.py, and the number of units of a cell."""


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Mapping[str, Any] | None = None,
    opset: int = 20,
) -> Path:
    """Writes a model and returns its path. `weights`: arrays, which become initialisers."""
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


class Weights(dict[str, NDArray[Any]]):
    """Random weights by name, drawn in the order of their first use."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = np.random.default_rng(7)

    def draw(self, name: str, *shape: int, scale: float = 0.6) -> str:
        self[name] = (self._generator.standard_normal(shape) * scale).astype(np.float32)
        return name

    def ints(self, name: str, *values: int) -> str:
        self[name] = np.array(values, np.int64)
        return name

    def embedded(self, width: int = UNITS) -> list[onnx.NodeProto]:
        return [node("Gather", [self.draw("embedding", VOCABULARY, width), "tokens"], ["x"])]

    def head(self, hidden: str, width: int = UNITS, out: str = "logits") -> list[onnx.NodeProto]:
        matrix, bias = self.draw("head", VOCABULARY, width), self.draw("bias", VOCABULARY)
        return [node("Gemm", [hidden, matrix, bias], [out], transB=1)]


def gru(path: Path, batch: str | int = "B", opset: int = 20) -> Path:
    """A GRU cell: h [B, 6]."""
    w = Weights()
    nodes = w.embedded()
    nodes += [
        node("Unsqueeze", ["x", w.ints("zero", 0)], ["x.t"]),
        node("Unsqueeze", ["h", "zero"], ["h.t"]),
        node(
            "GRU",
            ["x.t", w.draw("W", 1, 18, 6), w.draw("R", 1, 18, 6), w.draw("b", 1, 36), "", "h.t"],
            ["", "h.last"],
            hidden_size=6,
            linear_before_reset=1,
        ),
        node("Squeeze", ["h.last", "zero"], ["h.next"]),
        *w.head("h.next"),
    ]
    inputs = [value("tokens", INT64, [batch]), value("h", FLOAT, [batch, UNITS])]
    outputs = [value("logits", FLOAT, [batch, VOCABULARY]), value("h.next", FLOAT, [batch, UNITS])]
    return save(path, nodes, inputs, outputs, w, opset)


def lstm(path: Path, batch: str | int = "B") -> Path:
    """An LSTM of two layers with the states of torch: h and c [2, B, 6]. The tokens are [B, 1]."""
    w = Weights()
    nodes = [
        node("Squeeze", ["tokens", w.ints("one", 1)], ["tokens.flat"]),
        node("Gather", [w.draw("embedding", VOCABULARY, 6), "tokens.flat"], ["x"]),
        node("Unsqueeze", ["x", w.ints("zero", 0)], ["x.0"]),
        node("Split", ["h", w.ints("halves", 1, 1)], ["h.0", "h.1"], axis=0),
        node("Split", ["c", "halves"], ["c.0", "c.1"], axis=0),
    ]
    for layer in (0, 1):
        weights = [w.draw(f"W{layer}", 1, 24, 6), w.draw(f"R{layer}", 1, 24, 6), w.draw(f"b{layer}", 1, 48)]
        nodes += [
            node(
                "LSTM",
                [f"x.{layer}", *weights, "", f"h.{layer}", f"c.{layer}"],
                [f"y.{layer}", f"h.{layer}.next", f"c.{layer}.next"],
                hidden_size=6,
            ),
            node("Squeeze", [f"y.{layer}", "one"], [f"x.{layer + 1}"]),
        ]
    nodes += [
        node("Concat", ["h.0.next", "h.1.next"], ["hn"], axis=0),
        node("Concat", ["c.0.next", "c.1.next"], ["cn"], axis=0),
        node("Squeeze", ["x.2", "zero"], ["top"]),
        *w.head("top"),
    ]
    inputs = [value("tokens", INT64, [batch, 1])]
    inputs += [value(name, FLOAT, [2, batch, 6]) for name in ("h", "c")]
    outputs = [value("logits", FLOAT, [batch, VOCABULARY])]
    outputs += [value(name, FLOAT, [2, batch, 6]) for name in ("hn", "cn")]
    return save(path, nodes, inputs, outputs, w)


def matrix_memory(path: Path, batch: str | int = "B") -> Path:
    """A cell that Wane does not have, a matrix memory with a normaliser (linear attention): C [B, 6, 6] and n [B, 6].
    C' = f C + v k^T, n' = f n + k, h = C' q / max(|n' q|, 1), with a gate f of the token. Its states have two ranks."""
    w = Weights()
    nodes = w.embedded()
    for name in "qkv":
        nodes.append(node("MatMul", ["x", w.draw(f"W{name}", 6, 6)], [name]))
    w["floor"] = np.array(1, np.float32)
    nodes += [
        node("MatMul", ["x", w.draw("Wf", 6, 1)], ["f.in"]),
        node("Sigmoid", ["f.in"], ["f"]),
        node("Unsqueeze", ["f", w.ints("two", 2)], ["f.3"]),
        node("Unsqueeze", ["v", "two"], ["v.column"]),
        node("Unsqueeze", ["k", w.ints("one", 1)], ["k.row"]),
        node("Unsqueeze", ["q", "two"], ["q.column"]),
        node("MatMul", ["v.column", "k.row"], ["outer"]),
        node("Mul", ["C", "f.3"], ["C.kept"]),
        node("Add", ["C.kept", "outer"], ["C.next"]),
        node("Mul", ["n", "f"], ["n.kept"]),
        node("Add", ["n.kept", "k"], ["n.next"]),
        node("MatMul", ["C.next", "q.column"], ["read.column"]),
        node("Squeeze", ["read.column", "two"], ["read"]),
        node("Mul", ["n.next", "q"], ["n.q"]),
        node("ReduceSum", ["n.q", "one"], ["n.sum"], keepdims=1),
        node("Abs", ["n.sum"], ["n.abs"]),
        node("Max", ["n.abs", "floor"], ["below"]),
        node("Div", ["read", "below"], ["y"]),
        node("MatMul", ["y", w.draw("out", 6, VOCABULARY)], ["raw"]),
        node("Add", ["raw", w.draw("bias", VOCABULARY)], ["logits"]),
    ]
    inputs = [value("tokens", INT64, [batch]), value("C", FLOAT, [batch, 6, 6]), value("n", FLOAT, [batch, 6])]
    outputs = [value("logits", FLOAT, [batch, VOCABULARY])]
    outputs += [value("C.next", FLOAT, [batch, 6, 6]), value("n.next", FLOAT, [batch, 6])]
    return save(path, nodes, inputs, outputs, w)


def lonely(path: Path) -> Path:
    """An RNN cell for a batch of 1 that cannot be lifted: it reshapes its state to a vector, [6]."""
    w = Weights()
    nodes = [
        *w.embedded(),
        node("Reshape", ["x", w.ints("vector", 6)], ["x.1"]),
        node("Reshape", ["h", "vector"], ["h.1"]),
        node("MatMul", ["h.1", w.draw("R", 6, 6)], ["h.in"]),
        node("Add", ["x.1", "h.in"], ["sum"]),
        node("Tanh", ["sum"], ["h.tanh"]),
        node("Reshape", ["h.tanh", w.ints("row", 1, 6)], ["h.next"]),
        *w.head("h.next"),
    ]
    inputs = [value("tokens", INT64, [1]), value("h", FLOAT, [1, 6])]
    outputs = [value("logits", FLOAT, [1, VOCABULARY]), value("h.next", FLOAT, [1, 6])]
    return save(path, nodes, inputs, outputs, w)


def scalar(path: Path) -> Path:
    """An RNN cell of one row without any batch: tokens [], h [6] and logits [V]."""
    w = Weights()
    nodes = [
        *w.embedded(),
        node("MatMul", ["h", w.draw("R", 6, 6)], ["h.in"]),
        node("Add", ["x", "h.in"], ["sum"]),
        node("Tanh", ["sum"], ["h.next"]),
        node("MatMul", ["h.next", w.draw("out", 6, VOCABULARY)], ["logits"]),
    ]
    outputs = [value("logits", FLOAT, [VOCABULARY]), value("h.next", FLOAT, [6])]
    return save(path, nodes, [value("tokens", INT64, []), value("h", FLOAT, [6])], outputs, w)


def odd(path: Path) -> Path:
    """An RNN cell with int32 tokens, a float16, a float64, an int64 and a bool state, and logits [B, 1, V] that no last
    matrix gives: the counter and the flag change them."""
    w = Weights()
    w["one.int"], w["ten"] = np.array(1, np.int64), np.array(0.1, np.float32)
    nodes = [
        *w.embedded(),
        node("Cast", ["half"], ["half.32"], to=FLOAT),
        node("Cast", ["double"], ["double.32"], to=FLOAT),
        node("Cast", ["count"], ["count.32"], to=FLOAT),
        node("Cast", ["flag"], ["flag.32"], to=FLOAT),
        node("MatMul", ["half.32", w.draw("R", 6, 6)], ["half.in"]),
        node("Add", ["x", "half.in"], ["sum"]),
        node("Add", ["sum", "double.32"], ["sum.2"]),
        node("Tanh", ["sum.2"], ["h"]),
        node("Cast", ["h"], ["half.next"], to=TensorProto.FLOAT16),
        node("Cast", ["h"], ["double.h"], to=TensorProto.DOUBLE),
        node("Identity", ["double.h"], ["double.next"]),
        node("Add", ["count", "one.int"], ["count.next"]),
        node("Not", ["flag"], ["flag.next"]),
        *w.head("h", out="plain"),
        node("Mul", ["count.32", "ten"], ["count.part"]),
        node("Add", ["count.part", "flag.32"], ["part"]),
        node("Unsqueeze", ["part", w.ints("axis.1", 1)], ["part.2"]),
        node("Tanh", ["part.2"], ["part.3"]),
        node("Mul", ["plain", "part.3"], ["scaled"]),
        node("Unsqueeze", ["scaled", "axis.1"], ["logits"]),
    ]
    kinds = {"half": TensorProto.FLOAT16, "double": TensorProto.DOUBLE, "count": INT64, "flag": TensorProto.BOOL}
    shapes: dict[str, list[str | int]] = {"half": ["B", 6], "double": ["B", 6], "count": ["B"], "flag": ["B"]}
    inputs = [value("tokens", INT32, ["B"]), *(value(name, kind, shapes[name]) for name, kind in kinds.items())]
    outputs = [value("logits", FLOAT, ["B", 1, VOCABULARY])]
    outputs += [value(f"{name}.next", kind, shapes[name]) for name, kind in kinds.items()]
    return save(path, nodes, inputs, outputs, w)


CELLS: dict[str, tuple[Callable[[Path], Path], dict[str, str]]] = {
    "gru": (gru, {}),
    "gru-of-one": (lambda path: gru(path, 1), {}),
    "lstm": (lstm, {"h": "hn", "c": "cn"}),
    "lstm-of-one": (lambda path: lstm(path, 1), {"h": "hn", "c": "cn"}),
    "matrix-memory": (matrix_memory, {}),
    "lonely": (lonely, {}),
    "scalar": (scalar, {}),
    "odd": (odd, {}),
}
"""The graphs by name, each with the pairs of its states."""


class Oracle:
    """onnxruntime on a user's own file, one row at a time from the zero state."""

    def __init__(self, path: Path, pairs: Mapping[str, str]) -> None:
        self._session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self._pairs = pairs or {each.name: f"{each.name}.next" for each in self._session.get_inputs()[1:]}
        self._types: dict[str, Any] = {
            "tensor(float)": np.float32,
            "tensor(float16)": np.float16,
            "tensor(double)": np.float64,
        }
        self._types |= {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Returns the logits (n, V) after each token."""
        first, *states = self._session.get_inputs()
        shaped = {each.name: [size if isinstance(size, int) else 1 for size in each.shape] for each in (first, *states)}
        state = {each.name: np.zeros(shaped[each.name], self._types[each.type]) for each in states}
        names = ["logits", *(self._pairs[name] for name in state)]
        rows = []
        for token in tokens:
            feed = np.full(shaped[first.name], token, self._types[first.type])
            found, *after = self._session.run(names, {first.name: feed, **state})
            state = dict(zip(state, after, strict=True))
            rows.append(found.reshape(-1).astype(np.float64))
        return np.stack(rows)
