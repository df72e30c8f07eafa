"""Nodes that compute an affine map of the features, or the function after the last one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wane.training.audit.graph.axes import Axes, features, is_features
from wane.training.audit.graph.node import UNROLLED, Node, NotFollowed
from wane.training.audit.graph.values import Constant, Filled, Input, Rows, Value, one_hot


def rows_of(value: Value | None) -> Rows:
    """Returns a tensor to which an affine map may apply: its last axis is the features. An input of one-hot tokens is
    one. Raises NotFollowed."""
    if isinstance(value, Input) and not value.whole and len(value.axes) > 1 and value.axes[-1]:
        if (width := value.axes[-1][0].size) is None:
            raise NotFollowed(f"the input {value.name} has no fixed number of classes")
        value = one_hot(value, value.axes[:-1], width, given=True)
    if isinstance(value, Filled):
        raise NotFollowed(f"it computes with an initial state outside of an LSTM, GRU or RNN node. {UNROLLED}")
    if not isinstance(value, Rows):
        raise NotFollowed("its input is not computed from an embedding of the tokens")
    if not is_features(value.axes[-1]) or value.stage.ending is not None:
        raise NotFollowed("it does not read the features along the last axis")
    return value


def _pair(node: Node) -> tuple[Rows, Constant, bool]:
    """Returns the computed input and the constant input of a node with two inputs, and whether the computed input is
    the first. Raises NotFollowed."""
    one, other = node.inputs[:2]
    if isinstance(one, Constant):
        return rows_of(other), one, False
    if not isinstance(other, Constant):
        raise NotFollowed(
            "both inputs depend on the tokens (a skip connection, a gate or attention), which plain layers of Wane lack"
        )
    return rows_of(one), other, True


def _with_width(axes: Axes, width: int) -> Axes:
    return (*axes[:-1], features(width))


def mat_mul(node: Node) -> Value:
    rows, matrix, first = _pair(node)
    if not first or matrix.array.ndim != 2 or len(matrix.array) != rows.stage.width:
        raise NotFollowed("it is not a product of the features with a matrix")
    stage = rows.stage.multiplied(Constant(matrix.array.T, matrix.name))
    return Rows(_with_width(rows.axes, stage.width), stage)


def gemm(node: Node) -> Value:
    rows, matrix = rows_of(node.first), node.array(1)
    if len(rows.axes) != 2 or node.attributes.get("transA", 0) or matrix.ndim != 2:
        raise NotFollowed("it is not a product of the features with a matrix")
    matrix = (matrix if node.attributes.get("transB", 0) else matrix.T) * matrix.dtype.type(
        node.attributes.get("alpha", 1)
    )
    if matrix.shape[1] != rows.stage.width:
        raise NotFollowed("its matrix does not fit the features")
    stage = rows.stage.multiplied(Constant(matrix, node.proto.input[1]))
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = node.array(2) * node.array(2).dtype.type(node.attributes.get("beta", 1))
        stage = stage.shifted(_vector(Constant(bias, node.proto.input[2]), stage.width))
    return Rows(_with_width(rows.axes, stage.width), stage)


def _vector(value: Constant, width: int) -> Constant:
    """Returns a constant with one number for each feature, or one for all. Raises NotFollowed."""
    if (
        value.array.dtype.kind != "f"
        or value.array.size not in (1, width)
        or value.array.shape[-1:] not in ((), (1,), (width,))
    ):
        raise NotFollowed(f"its constant has shape {list(value.array.shape)}, expected one number for each of {width}")
    return value


def summed(sign: int) -> Callable[[Node], Value]:
    def apply(node: Node) -> Value:
        rows, constant, first = _pair(node)
        if sign < 0 and not first:
            raise NotFollowed("it subtracts the features from a constant")
        _ranks(rows, constant)
        return replace(rows, stage=rows.stage.shifted(_vector(constant, rows.stage.width), sign))

    return apply


def _ranks(rows: Rows, constant: Constant) -> None:
    if constant.array.ndim > len(rows.axes):
        raise NotFollowed("its constant has more axes than its other input")


def scaled(power: int) -> Callable[[Node], Value]:
    def apply(node: Node) -> Value:
        rows, constant, first = _pair(node)
        if power < 0 and not first:
            raise NotFollowed("it divides a constant by the features")
        _ranks(rows, constant)
        stage = rows.stage.scaled(_vector(constant, rows.stage.width), power)
        if stage is None:
            raise NotFollowed("it scales one-hot tokens")
        return replace(rows, stage=stage)

    return apply


def ending(node: Node) -> Value:
    rows = rows_of(node.first)
    rank = len(rows.axes)
    if node.attributes.get("axis", -1 if node.opset >= 13 else 1) not in (-1, rank - 1):
        raise NotFollowed("its axis is not the last")
    if not rows.stage.cells:
        raise NotFollowed("Wane's networks have no such function before the layers")
    return replace(rows, stage=replace(rows.stage, ending=node.proto.op_type))
