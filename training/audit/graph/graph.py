"""Follows an ONNX graph from its inputs to its outputs, and says what each tensor is in a network of Wane: a constant,
the tokens, or the result of an embedding, recurrent layers and an affine map (`values.py`).

The nodes around the layers (Transpose, Reshape, Squeeze, Cast, dropout, ...) only move axes, which `axes.py` follows.
Wane's networks have no other nodes. The output of such a node is `Unknown`, with the reason, and the graph is refused
only if the logits depend on it. No node is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from wane.models.imported.graph_file import opset_of, real_inputs
from wane.training.audit.graph import constants
from wane.training.audit.graph.affine import ending, gemm, mat_mul, rows_of, scaled, summed
from wane.training.audit.graph.axes import (
    Axes,
    AxesError,
    Dimension,
    features,
    flatten,
    reshape,
    size,
    squeeze,
    transpose,
    unsqueeze,
)
from wane.training.audit.graph.constants import NotFolded
from wane.training.audit.graph.node import FLOATS, UNROLLED, WHOLE, Node, NotFollowed, described
from wane.training.audit.graph.recurrent import NotRecurrent, read_cell
from wane.training.audit.graph.values import Constant, Filled, Input, Rows, Stage, Unknown, Value, one_hot, product

LARGEST_TOTAL = 1 << 32
"""The greatest number of bytes of all arrays that are computed from the initialisers."""


def follow(model: ModelProto, tensors: Mapping[str, NDArray[Any]]) -> dict[str, Value]:
    """Returns the value of each output of a graph. `model`: as `read_graph` checks it. `tensors`: its initialisers."""
    graph, opset = model.graph, opset_of(model)
    values: dict[str, Value] = {name: Constant(array, name) for name, array in tensors.items()}
    values |= {given.name: _input(given) for given in real_inputs(graph)}
    # Kept by their ids, so that no id is used twice.
    owners = {id(owner): owner for owner in map(_owner, tensors.values())}
    total = 0
    for proto in graph.node:
        inputs = tuple(values[name] if name else None for name in proto.input)
        attributes = {one.name: _attribute(one) for one in proto.attribute}
        found = _outputs(Node(proto, attributes, inputs, opset))
        new = {id(owner): owner for value in found for owner in map(_owner, _arrays(value))}
        total += sum(owner.nbytes for key, owner in new.items() if key not in owners)
        if total > LARGEST_TOTAL:
            reason = f"the arrays that are computed from the weights have more than {LARGEST_TOTAL:,} bytes"
            found = [Unknown(f"{described(proto)}: {reason}")] * len(proto.output)
        else:
            owners |= new
        for place, name in enumerate(proto.output):
            if name:
                values[name] = found[place] if place < len(found) else Unknown(f"{described(proto)} has no such output")
    return {output.name: values[output.name] for output in graph.output}


def _owner(array: NDArray[Any]) -> NDArray[Any]:
    """Returns the array whose memory an array shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _arrays(value: Value) -> list[NDArray[Any]]:
    """Returns the arrays of a value."""
    if isinstance(value, Constant):
        return [value.array]
    if not isinstance(value, Rows):
        return []
    found = [value.stage.table, value.stage.matrix, value.stage.bias]
    found += [array for cell in value.stage.cells for array in cell.weights.values()]
    return [array for array in found if array is not None]


def _input(given: ValueInfoProto) -> Value:
    """Returns the value of a graph input. An axis of length 1 has no dimension."""
    if not given.type.HasField("tensor_type"):
        return Unknown(f"the input {given.name} is not a tensor")
    kind, axes = given.type.tensor_type, list[tuple[Dimension, ...]]()
    for place, dimension in enumerate(kind.shape.dim):
        known = dimension.dim_value if dimension.HasField("dim_value") and dimension.dim_value > 0 else None
        axes.append(() if known == 1 else (Dimension(f"{given.name}.{place}", known),))
    if kind.elem_type not in (*FLOATS, *WHOLE):
        return Unknown(f"the input {given.name} is {TensorProto.DataType.Name(kind.elem_type)}")
    return Input(given.name, tuple(axes), kind.elem_type in WHOLE)


def _attribute(given: AttributeProto) -> Any:
    value = helper.get_attribute_value(given)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return [one.decode("utf-8", "replace") for one in value]
    return value


def _outputs(node: Node) -> list[Value]:
    """Returns the values of a node's outputs."""
    proto = node.proto
    for value in node.inputs:
        if isinstance(value, Unknown):
            return [value] * len(proto.output)
    name = described(proto)
    try:
        if proto.domain not in ("", "ai.onnx"):
            raise NotFollowed(f"its domain is {proto.domain}, not ONNX's")
        if proto.op_type == "Constant":
            return [_constant(node)]
        if proto.op_type in ("LSTM", "GRU", "RNN"):
            return _recurrent(node)
        given = [value for value in node.inputs if value is not None]
        if given and all(isinstance(value, Constant) for value in given):
            if proto.op_type in ("ConstantOfShape", "Expand"):
                return [_filled(node)]
            label = " and ".join(dict.fromkeys(value.name for value in given[:1] if isinstance(value, Constant)))
            return [Constant(constants.fold(proto.op_type, node.attributes, node.arrays), label)]
        if proto.op_type == "Split" and isinstance(state := _state(node.first), Filled):
            return [state] * len(proto.output)
        if proto.op_type not in OPERATORS:
            raise NotFollowed("Wane's networks have no such function")
        return [OPERATORS[proto.op_type](node)]
    except (NotFollowed, NotFolded, NotRecurrent, AxesError) as error:
        return [Unknown(f"{name}: {error}")] * len(proto.output)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        return [Unknown(f"{name}: its inputs or attributes are not those of the operator: {error}")] * len(proto.output)


def _constant(node: Node) -> Value:
    ((name, value),) = node.attributes.items() if len(node.attributes) == 1 else (("", None),)
    output = node.proto.output[0]
    if name == "value":
        return Constant(numpy_helper.to_array(value), output)
    if name in ("value_int", "value_ints", "value_float", "value_floats"):
        return Constant(np.array(value, np.int64 if "int" in name else np.float32), output)
    raise NotFollowed("it is not a constant of numbers")


def _filled(node: Node) -> Value:
    """Returns the output of a ConstantOfShape or Expand node with constant inputs."""
    if node.proto.op_type == "ConstantOfShape":
        value = (
            numpy_helper.to_array(node.attributes["value"]) if "value" in node.attributes else np.zeros(1, np.float32)
        )
    else:
        value = node.array(0)
    if value.dtype == object or not value.size or (value != value.flat[0]).any():
        raise NotFollowed("it repeats numbers that are not equal")
    return Filled(float(value.flat[0]))


def _moved(change: Callable[[Node, Axes], Axes]) -> Callable[[Node], Value]:
    """Returns the function of a node that arranges the axes of its first input in another way."""

    def apply(node: Node) -> Value:
        value = node.first
        if isinstance(value, Filled):
            return value
        if isinstance(value, Input | Rows):
            return replace(value, axes=change(node, value.axes))
        raise NotFollowed("its shape depends on the tokens")

    return apply


def _squeezed(node: Node, axes: Axes) -> Axes:
    places = constants.axes_of(node.attributes, node.arrays)
    if places is None:
        raise NotFollowed("it does not name the axes that it removes")
    return squeeze(axes, places)


def _unsqueezed(node: Node, axes: Axes) -> Axes:
    return unsqueeze(axes, constants.axes_of(node.attributes, node.arrays) or [])


def _reshaped(node: Node, axes: Axes) -> Axes:
    return reshape(axes, [*node.array(1).reshape(-1)], allow_zero=bool(node.attributes.get("allowzero", 0)))


def _cast(node: Node) -> Value:
    value, to = node.first, node.attributes.get("to")
    if isinstance(value, Filled):
        return value
    if isinstance(value, Input) and to in WHOLE:
        return replace(value, whole=True)
    if isinstance(value, Rows) and to in FLOATS:
        return value
    raise NotFollowed("it casts to a type that rounds")


def _dropout(node: Node) -> Value:
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if training is not None and not (isinstance(training, Constant) and not training.array.any()):
        raise NotFollowed("it drops units at random (training_mode)")
    return node.first


def _shape(node: Node) -> Value:
    value = node.first
    if not isinstance(value, Input | Rows):
        raise NotFollowed("its input has no known shape")
    found = np.empty(len(value.axes), object)
    found[:] = [size(axis) for axis in value.axes]
    part = found[node.attributes.get("start", 0) : node.attributes.get("end", len(found))]
    return Constant(constants.plain(part), f"the shape of {node.proto.input[0]}")


def _gather(node: Node) -> Value:
    """A row of the embedding for each token, or one place of an axis."""
    table, places = node.inputs[:2]
    axis = node.attributes.get("axis", 0)
    if isinstance(table, Constant) and isinstance(places, Input):
        if axis != 0 or table.array.ndim != 2 or table.array.dtype.kind != "f":
            raise NotFollowed("it does not read rows of a matrix")
        tokens, (rows, width) = replace(places, whole=True), table.array.shape
        return Rows(
            (*places.axes, features(width)), Stage(tokens, rows, width, table.array, names={"table": table.name})
        )
    value, wanted = _state(node.first), node.array(1)
    if isinstance(value, Filled):
        return value
    if not isinstance(value, Input | Rows) or wanted.size != 1:
        raise NotFollowed("it does not read a row for each token, or one place of an axis")
    place = int(wanted.reshape(-1)[0])
    value, axes = _part(value, axis, slice(place, place + 1 if place != -1 else None))
    return replace(value, axes=squeeze(axes, [axis]) if wanted.ndim == 0 else axes)


def _slice(node: Node) -> Value:
    value = _state(node.first)
    if isinstance(value, Filled):
        return value
    if not isinstance(value, Input | Rows):
        raise NotFollowed("it selects a part of a tensor that depends on the tokens")
    for place, wanted in constants.slices(node.attributes, node.arrays, len(value.axes)).items():
        value, axes = _part(value, place, wanted)
        value = replace(value, axes=axes)
    return value


def _state(value: Value) -> Value:
    """Returns zeros for an input of real numbers: only an initial state of several layers is cut to pieces."""
    return Filled(0.0, value.name) if isinstance(value, Input) and not value.whole else value


def _part(value: Input | Rows, place: int, wanted: slice) -> tuple[Input | Rows, Axes]:
    """Returns the value and its axes after a selection along one axis: all of it, or the last token."""
    axes = value.axes
    if not -len(axes) <= place < len(axes):
        raise NotFollowed(f"it selects along the axis {place} of {len(axes)}")
    axis, whole = axes[place % len(axes)], wanted.start == 0 and wanted.stop is None
    length = size(axis)
    start, stop = wanted.start, wanted.stop
    if isinstance(length, int):
        start, stop, _ = wanted.indices(length)
        whole = (start, stop) == (0, length)
    if whole:
        return value, axes
    last = (start, stop) == (length - 1, length) if isinstance(length, int) else (start, stop) == (-1, None)
    if not last or not isinstance(value, Rows) or [one.name for one in axis] != [value.stage.time]:
        unrolled = "" if isinstance(value, Rows) and value.stage.cells else f". {UNROLLED}"
        raise NotFollowed(f"it selects a part of the tokens, of the sequences or of the features{unrolled}")
    left = tuple(() if index == place % len(axes) else one for index, one in enumerate(axes))
    return replace(value, stage=replace(value.stage, last=True)), left


def _one_hot(node: Node) -> Value:
    tokens, depth, values = node.first, node.array(1), node.array(2)
    if not isinstance(tokens, Input) or depth.size != 1 or [*values.reshape(-1)] != [0, 1]:
        raise NotFollowed("it does not turn tokens into zeros and ones")
    if node.attributes.get("axis", -1) not in (-1, len(tokens.axes)):
        raise NotFollowed("its classes are not the last axis")
    return one_hot(tokens, tokens.axes, int(depth.reshape(-1)[0]))


def _recurrent(node: Node) -> list[Value]:
    """A recurrent layer: its outputs Y (time, 1, batch, units), Y_h (1, batch, units) and Y_c."""
    rows = rows_of(node.first)
    if len(rows.axes) != 3:
        raise NotFollowed("its input has not the axes time, batch, features")
    time, batch, _ = rows.axes
    if not time:
        raise NotFollowed(
            "it runs one token at a time. Export the graph of a sequence (`wane import` serves a graph of one step)"
        )
    if len(time) != 1 or rows.stage.time not in (None, time[0].name) or rows.stage.last:
        raise NotFollowed("its input's first axis is not the time of the layers below")
    stage = rows.stage
    cell, starts = read_cell(node.proto.op_type, described(node.proto), node.attributes, node.inputs, stage.width)
    # the affine map between two layers becomes part of the upper layer's input weights
    weight, weight_name = cell.weights["weight_ih_l0"], cell.names["weight_ih_l0"]
    if stage.bias is not None:
        bias = cell.weights["bias_ih_l0"] + product(weight, stage.bias)
        cell.weights["bias_ih_l0"] = bias
        cell.names["bias_ih_l0"] = " + ".join(
            filter(None, [cell.names.get("bias_ih_l0"), f"{weight_name} @ {stage.names['bias']}"])
        )
    if stage.matrix is not None:
        cell.weights["weight_ih_l0"] = product(weight, stage.matrix)
        cell.names["weight_ih_l0"] = f"{weight_name} @ {stage.names['matrix']}"
    after = replace(
        stage,
        width=cell.units,
        cells=(*stage.cells, cell),
        matrix=None,
        bias=None,
        names={name: value for name, value in stage.names.items() if name == "table"},
        time=time[0].name,
        starts=(*stage.starts, *starts),
    )
    last = replace(after, last=True)
    memory = Unknown(f"{described(node.proto)}: its third output is the memory of its units, not their output")
    return [Rows((time, (), batch, features(cell.units)), after), Rows(((), batch, features(cell.units)), last), memory]


OPERATORS: Mapping[str, Callable[[Node], Value]] = {
    "Add": summed(1),
    "Cast": _cast,
    "Div": scaled(-1),
    "Dropout": _dropout,
    "Flatten": _moved(lambda node, axes: flatten(axes, node.attributes.get("axis", 1))),
    "Gather": _gather,
    "Gemm": gemm,
    "Identity": lambda node: node.first,
    "LogSoftmax": ending,
    "MatMul": mat_mul,
    "Mul": scaled(1),
    "OneHot": _one_hot,
    "Reshape": _moved(_reshaped),
    "Shape": _shape,
    "Slice": _slice,
    "Softmax": ending,
    "Squeeze": _moved(_squeezed),
    "Sub": summed(-1),
    "Transpose": _moved(lambda node, axes: transpose(axes, node.attributes.get("perm"))),
    "Unsqueeze": _moved(_unsqueezed),
}
