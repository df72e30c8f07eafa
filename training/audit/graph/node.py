"""A node of an ONNX graph with the values of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto, TensorProto

from wane.training.audit.graph.values import Constant, Value

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
WHOLE = (TensorProto.INT64, TensorProto.INT32)

UNROLLED = (
    "Perhaps the layers are unrolled: torch's dynamo exporter unrolls torch.nn.RNN, and "
    "torch.onnx.export(..., dynamo=False) does not"
)
"""What an error advises if the graph has the steps of a layer in place of a recurrent node."""


class NotFollowed(ValueError):
    """Raised if a node is not one of Wane's networks. The message says why, without the node's name."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node with the values of its inputs (None for those that it lacks)."""

    proto: NodeProto
    attributes: Mapping[str, Any]
    inputs: tuple[Value | None, ...]
    opset: int

    @property
    def first(self) -> Value:
        """The first input. Raises NotFollowed if there is none."""
        if not self.inputs or self.inputs[0] is None:
            raise NotFollowed("it has no input")
        return self.inputs[0]

    @property
    def arrays(self) -> list[Any]:
        """The arrays of the inputs; None for inputs that are not constants."""
        return [value.array if isinstance(value, Constant) else None for value in self.inputs]

    def array(self, place: int) -> Any:
        """Returns the array of an input. Raises NotFollowed unless it is a constant."""
        if place >= len(self.inputs) or not isinstance(value := self.inputs[place], Constant):
            raise NotFollowed(f"its input {place} depends on the tokens")
        return value.array


def described(proto: NodeProto) -> str:
    """Returns the node's name and operator, for an error message."""
    return f"the node {proto.name or (proto.output[0] if proto.output else '')} ({proto.op_type})"
