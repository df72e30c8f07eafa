"""Language models as ONNX graphs, built without torch or Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from tests.models.imported.graphs import FLOAT, INT32, INT64, save, value
from wane.models.layer_registry import Kind
from wane.training.audit.foreign_model import ForeignModel
from wane.training.audit.graph.onnx_file import read_onnx

VOCABULARY, WIDTH, UNITS = 11, 5, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
KINDS: dict[tuple[str, str], Kind] = {
    ("LSTM", ""): "lstm",
    ("GRU", ""): "gru",
    ("RNN", "Tanh"): "rnn_tanh",
    ("RNN", "Relu"): "rnn_relu",
}


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Returns random numbers between -0.5 and 0.5."""
    return np.random.default_rng((seed, *shape)).uniform(-0.5, 0.5, shape).astype(np.float32)


class LanguageModel:
    """A graph of a Gather, recurrent nodes in time-major order, MatMul and Add. Tests change its parts.

    nodes: the nodes between the embedding, whose output is `embedded`, and the output layer, which reads `top`.
    """

    def __init__(self, operator: str = "LSTM", layers: int = 1, **attributes: Any) -> None:
        self.weights: dict[str, Any] = {"table": random(VOCABULARY, WIDTH)}
        self.inputs = [value("tokens", INT64, ["time", "batch"])]
        self.outputs = [value("logits", FLOAT, None)]
        self.before = [node("Gather", "table", "tokens", "embedded")]
        self.nodes: list[onnx.NodeProto] = []
        below, width = "embedded", WIDTH
        if operator == "GRU":
            attributes = {"linear_before_reset": 1} | attributes
        for layer in range(layers):
            rows = GATES[operator] * UNITS
            self.weights |= {
                f"W{layer}": random(1, rows, width, seed=layer),
                f"R{layer}": random(1, rows, UNITS, seed=layer + 10),
                f"B{layer}": random(1, 2 * rows, seed=layer + 20),
            }
            parts = [below, *(f"{part}{layer}" for part in "WRB")]
            self.nodes.append(node(operator, *parts, f"y{layer}", f"h{layer}", hidden_size=UNITS, **attributes))
            self.nodes[-1].input[:] = parts
            self.nodes[-1].output[:] = [f"y{layer}", f"h{layer}"]
            self.weights["one"] = np.array([1])
            self.nodes.append(node("Squeeze", f"y{layer}", "one", f"x{layer}"))
            below, width = f"x{layer}", UNITS
        self.top = below
        self.weights |= {"out": random(UNITS, VOCABULARY), "bias": random(VOCABULARY)}
        self.after = [node("MatMul", self.top, "out", "product"), node("Add", "bias", "product", "logits")]

    @property
    def recurrent(self) -> onnx.NodeProto:
        """The first recurrent node."""
        return next(one for one in self.nodes if one.op_type in GATES)

    def given(self, place: int, name: str) -> None:
        """Sets an input of the first recurrent node."""
        inputs = [*self.recurrent.input, *[""] * 8][:8]
        inputs[place] = name
        self.recurrent.input[:] = inputs if place == 7 else inputs[: max(place + 1, len(self.recurrent.input))]

    def save(self, path: Path, opset: int = 20) -> Path:
        """Writes the file `model.onnx` of a folder. Returns its path."""
        nodes = [*self.before, *self.nodes, *self.after]
        return save(path / "model.onnx", nodes, self.inputs, self.outputs, self.weights, opset)


def node(operator: str, *names: str, **attributes: Any) -> onnx.NodeProto:
    """Returns a node of one output, whose name is the last of `names`."""
    return helper.make_node(operator, names[:-1], names[-1:], name=f"the_{names[-1]}", **attributes)


def keras_model(operator: str, layers: int, path: Path) -> Path:
    """Writes a Keras model of Embedding, LSTM or GRU layers with return_sequences, and Dense with a softmax, as tf2onnx
    writes it. Returns its path.

    The tokens are floats, batch-major. Each layer is between two Transposes. Its initial state is a Fill of the batch's
    size, and its weights are in ONNX's layout. Dense is a Tensordot: it flattens batch and time, and computes the shape
    of the result from that of its input.
    """
    rows = GATES[operator] * UNITS
    weights: dict[str, Any] = {"embedding/embeddings": random(VOCABULARY, WIDTH)}
    weights |= {"dense/kernel": random(UNITS, VOCABULARY), "dense/bias": random(VOCABULARY)}
    weights |= {"0": np.array([0]), "1": np.array([1]), "units": np.array([UNITS], np.int32)}
    weights |= {"01": np.array([0, 1]), "2": np.array([2]), "classes": np.array([VOCABULARY]), "-1": np.array([-1])}
    nodes = [
        node("Cast", "input_1", "model/embedding/Cast", to=INT32),
        node("Gather", "embedding/embeddings", "model/embedding/Cast", "model/embedding"),
    ]
    below, width = "model/embedding", WIDTH
    for layer in range(layers):
        name = f"model/{operator.lower()}_{layer}"
        weights |= {f"{name}/W": random(1, rows, width, seed=layer), f"{name}/R": random(1, rows, UNITS, seed=9)}
        weights |= {f"{name}/B": random(1, 2 * rows, seed=layer)}
        nodes += [
            node("Shape", below, f"{name}/Shape"),
            node("Cast", f"{name}/Shape", f"{name}/Shape32", to=INT32),
            node("Slice", f"{name}/Shape32", "0", "1", f"{name}/strided_slice"),
            node("Concat", f"{name}/strided_slice", "units", f"{name}/packed", axis=0),
            node("Cast", f"{name}/packed", f"{name}/packed64", to=INT64),
            node("ConstantOfShape", f"{name}/packed64", f"{name}/zeros"),
            node("Unsqueeze", f"{name}/zeros", "0", f"{name}/initial"),
            node("Transpose", below, f"{name}/transpose", perm=[1, 0, 2]),
        ]
        states = [f"{name}/initial"] * (2 if operator == "LSTM" else 1)
        more = {"linear_before_reset": 1, "activations": ["Sigmoid", "Tanh"]} if operator == "GRU" else {}
        parts = [f"{name}/transpose", f"{name}/W", f"{name}/R", f"{name}/B", "", *states]
        nodes += [
            node(operator, *parts, f"{name}/Y", hidden_size=UNITS, direction="forward", **more),
            node("Squeeze", f"{name}/Y", "1", f"{name}/squeezed"),
            node("Transpose", f"{name}/squeezed", f"{name}/output", perm=[1, 0, 2]),
        ]
        below, width = f"{name}/output", UNITS
    nodes += [
        node("Shape", below, "dense/Shape"),
        node("Gather", "dense/Shape", "01", "dense/free"),
        node("Gather", "dense/Shape", "2", "dense/axes"),
        node("ReduceProd", "dense/free", "dense/rows", keepdims=1),
        node("ReduceProd", "dense/axes", "dense/columns", keepdims=1),
        node("Concat", "dense/rows", "dense/columns", "dense/flat", axis=0),
        node("Reshape", below, "dense/flat", "dense/Reshape"),
        node("MatMul", "dense/Reshape", "dense/kernel", "dense/MatMul"),
        node("Concat", "dense/free", "classes", "dense/concat", axis=0),
        node("Reshape", "dense/MatMul", "dense/concat", "dense/Tensordot"),
        node("Add", "dense/Tensordot", "dense/bias", "dense/BiasAdd"),
        node("Softmax", "dense/BiasAdd", "dense", axis=-1),
    ]
    inputs, outputs = [value("input_1", FLOAT, ["unk__0", "unk__1"])], [value("dense", FLOAT, ["unk__0", "unk__1", 11])]
    return save(path / "model.onnx", nodes, inputs, outputs, weights, opset=15)


def read(path: Path) -> ForeignModel:
    """Returns the model of a file."""
    return read_onnx(path)[0]
