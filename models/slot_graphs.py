"""ONNX graphs that read and write states in slots.

The memory of a model's states has one array (N, *shape) for each state tensor, and one array (N, H) for the output
layer's input `hidden`. A slot is one row of all arrays. A graph of a bundle has one row of its state inputs for each
item of a batch. `from_slots` changes a bundle's graph when the model is loaded, so that the graph itself gathers these
rows from the arrays. `write_graph` scatters the results of a run back into the arrays. The states therefore stay on the
device that runs the graphs.

The graph of `from_slots` has these inputs and outputs, in addition to those of `models/export/roles.py`. B is the batch
size, V the vocabulary's size and K the number of largest logits.

    slots                int64 (B), the slot of each item: the index of the item's row in the arrays
    slots.<name>         float32 (N, *shape), the array of the state tensor or of `hidden`. Replaces the input <name>
    check                float32 (B): 0 if every value of an item's logits, hidden and logprobs is finite, and NaN
                         otherwise
    length               float64 (B): the 2-norm of `hidden`
    few_logits, few_ids  float32 and int64 (B, min(FEW, K)): the first columns of top_logits and top_ids
    hidden               in the graph `head`: the gathered rows, float32 (B, H)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 13
"""The operator set of the graphs that read and write slots. It is the first one for which onnxruntime supported
ScatterND on CUDA. If a release of onnxruntime lacked this support, ScatterND would run on the CPU, and the states of
all slots would be copied."""

IR_VERSION = 10  # the oldest supported onnxruntime (1.20) can read this version

FEW = 6
"""The number of columns of `few_logits` and `few_ids`."""

CHECKED = ("logits", "hidden", "logprobs")
"""Outputs that must be finite in every answer."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of one row of each array, by name."""


def from_slots(path: Path, names: Sequence[str]) -> bytes:
    """Returns the graph in the file `path`, changed so that it gathers its inputs `names` from slots. Weights stay in
    the bundle's weights file, and the changed graph refers to them by the same offsets."""
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    gathers = []
    for value in graph.input:
        if value.name in names:
            name, value.name = value.name, f"slots.{value.name}"
            value.type.tensor_type.shape.dim[0].dim_param = "N"
            # The output has the input's earlier name, so no other node changes.
            gathers.append(helper.make_node("Gather", [value.name, "slots"], [name], name=f"gather.{name}", axis=0))
    if gathers:
        graph.input.append(helper.make_tensor_value_info("slots", TensorProto.INT64, ["B"]))
    outputs = {output.name: output.type.tensor_type.shape.dim for output in graph.output}
    if "hidden" in names and "hidden" not in outputs:
        width = next(value for value in graph.input if value.name == "slots.hidden").type.tensor_type.shape.dim[1]
        graph.output.append(helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["B", width.dim_value]))
        outputs["hidden"] = graph.output[-1].type.tensor_type.shape.dim
    added = _summary(graph, [name for name in CHECKED if name in outputs])
    if "top_logits" in outputs:
        added += _few(graph, outputs["top_logits"][1].dim_value)
    nodes = [*gathers, *graph.node, *added]
    del graph.node[:]
    graph.node.extend(nodes)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _summary(graph: onnx.GraphProto, checked: Sequence[str]) -> list[onnx.NodeProto]:
    """Declares the outputs `check` and `length`, and returns their nodes."""
    zero = _constant(graph, "zero", np.array(0, np.float32))
    axis = _constant(graph, "axis", np.array([1], np.int64))
    nodes, sums = [], []
    for name in checked:
        # The product is NaN if the value is not finite, and 0 or -0 otherwise.
        nodes += [
            helper.make_node("Mul", [name, zero], [f"check.{name}"]),
            helper.make_node("ReduceSum", [f"check.{name}", axis], [f"check.{name}.sum"], keepdims=0),
        ]
        sums.append(f"check.{name}.sum")
    nodes.append(helper.make_node("Sum", sums, ["check"]))
    nodes += [
        helper.make_node("Cast", ["hidden"], ["length.exact"], to=TensorProto.DOUBLE),
        helper.make_node("Mul", ["length.exact", "length.exact"], ["length.squares"]),
        helper.make_node("ReduceSum", ["length.squares", axis], ["length.sum"], keepdims=0),
        helper.make_node("Sqrt", ["length.sum"], ["length"]),
    ]
    graph.output.append(helper.make_tensor_value_info("check", TensorProto.FLOAT, ["B"]))
    graph.output.append(helper.make_tensor_value_info("length", TensorProto.DOUBLE, ["B"]))
    return nodes


def _few(graph: onnx.GraphProto, most: int) -> list[onnx.NodeProto]:
    """Declares the outputs `few_logits` and `few_ids`, and returns their nodes."""
    count = min(FEW, most)
    ends = [_constant(graph, f"few.{index}", np.array([index], np.int64)) for index in (0, count, 1)]
    for name, element in (("few_logits", TensorProto.FLOAT), ("few_ids", TensorProto.INT64)):
        graph.output.append(helper.make_tensor_value_info(name, element, ["B", count]))
    return [
        helper.make_node("Slice", ["top_logits", *ends], ["few_logits"]),
        helper.make_node("Slice", ["top_ids", *ends], ["few_ids"]),
    ]


def _constant(graph: onnx.GraphProto, name: str, value: np.ndarray) -> str:
    """Adds a constant and returns its name."""
    name = f"slot_graphs.{name}"
    graph.initializer.append(numpy_helper.from_array(value, name))
    return name


def write_graph(shapes: Shapes) -> bytes:
    """Returns the graph that writes rows of a run's results to slots. For each name it has the inputs slots.<name> (N,
    *shape) and next.<name> (B, *shape), and the output written.<name> (N, *shape). Writes the rows `rows` (n) of
    next.<name> to the slots `to` (n, 1).

    onnxruntime changes slots.<name> in place if written.<name> is bound to the same memory. A slot that occurs twice
    must get the same row twice.
    """
    nodes, inputs, outputs = [], [], []
    for name, shape in shapes.items():
        inputs.append(helper.make_tensor_value_info(f"slots.{name}", TensorProto.FLOAT, ["N", *shape]))
        inputs.append(helper.make_tensor_value_info(f"next.{name}", TensorProto.FLOAT, ["B", *shape]))
        outputs.append(helper.make_tensor_value_info(f"written.{name}", TensorProto.FLOAT, ["N", *shape]))
        nodes.append(helper.make_node("Gather", [f"next.{name}", "rows"], [f"row.{name}"], axis=0))
        nodes.append(helper.make_node("ScatterND", [f"slots.{name}", "to", f"row.{name}"], [f"written.{name}"]))
    inputs.append(helper.make_tensor_value_info("rows", TensorProto.INT64, ["n"]))
    inputs.append(helper.make_tensor_value_info("to", TensorProto.INT64, ["n", 1]))
    return _model("write", nodes, inputs, outputs)


def read_graph(shapes: Shapes) -> bytes:
    """Returns the graph that copies B slots: from slots.<name> (N, *shape) and slots (B) it computes <name> (B,
    *shape)."""
    nodes, outputs = [], []
    inputs = [helper.make_tensor_value_info("slots", TensorProto.INT64, ["B"])]
    for name, shape in shapes.items():
        inputs.append(helper.make_tensor_value_info(f"slots.{name}", TensorProto.FLOAT, ["N", *shape]))
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", *shape]))
        nodes.append(helper.make_node("Gather", [f"slots.{name}", "slots"], [name], axis=0))
    return _model("read", nodes, inputs, outputs)


def top_graph() -> bytes:
    """Returns the graph that copies the first columns of some rows: from top_logits (B, K), top_ids (B, K), the indices
    rows (n) and count (1) it computes logits (n, count) and ids (n, count)."""
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, [size]) for name, size in (("rows", "n"), ("count", 1))
    ]
    outputs, nodes = [], []
    constants = [
        numpy_helper.from_array(np.array([value], np.int64), name) for name, value in (("first", 0), ("axis", 1))
    ]
    for name, element in (("logits", TensorProto.FLOAT), ("ids", TensorProto.INT64)):
        inputs.append(helper.make_tensor_value_info(f"top_{name}", element, ["B", "K"]))
        outputs.append(helper.make_tensor_value_info(name, element, ["n", "count"]))
        nodes.append(helper.make_node("Gather", [f"top_{name}", "rows"], [f"{name}.rows"], axis=0))
        nodes.append(helper.make_node("Slice", [f"{name}.rows", "first", "count", "axis"], [name]))
    return _model("top", nodes, inputs, outputs, constants)


def rows_graph() -> bytes:
    """Returns the graph that copies some rows of one output of a run: from the float32 tensor `values` of any shape and
    the indices `rows` (n) it computes `found`."""
    values = onnx.ValueInfoProto(name="values")
    values.type.tensor_type.elem_type = TensorProto.FLOAT
    found = onnx.ValueInfoProto(name="found")
    found.type.tensor_type.elem_type = TensorProto.FLOAT
    rows = helper.make_tensor_value_info("rows", TensorProto.INT64, ["n"])
    node = helper.make_node("Gather", ["values", "rows"], ["found"], axis=0)
    return _model("rows", [node], [values, rows], [found])


def _model(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[onnx.TensorProto] = (),
) -> bytes:
    graph = helper.make_graph(nodes, name, inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    data: bytes = model.SerializeToString(deterministic=True)
    return data
