"""A writer of ONNX graphs whose weights stay in the safetensors file.

In a graph, a weight is external data: a name, a shape, and the range of its bytes in the weights file. Values that are
computed from weights alone (reordered gates, per-token tables) are ordinary nodes. onnxruntime computes them once, when
it loads the graph, so the files contain no value twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from wane.models.manifest import Precision

OPSET = 20
IR_VERSION = 10  # the oldest supported onnxruntime (1.20) can read this version

Dimension = int | str


class GraphWriter:
    """One graph under construction. Values are identified by name. Methods that add a value return its name."""

    def __init__(
        self,
        name: str,
        weights_file: str,
        extents: Mapping[str, tuple[int, int]],
        prefix: str = "",
        precision: Precision = "float32",
    ) -> None:
        """precision: the number format of the products with weights (`models/export/linear.py`)."""
        self.precision = precision
        self._name = name
        self._weights_file = weights_file
        self._extents = extents
        self._prefix = prefix
        self._nodes: list[onnx.NodeProto] = []
        self._initialisers: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._output_of: dict[str, str] = {}

    def nodes(self, operator: str, *inputs: str, outputs: int = 1, omit: int = 0, **attributes: object) -> list[str]:
        """Adds a node. The first `omit` outputs are not computed. Returns the names of the other outputs."""
        base = f"{self._prefix}{operator.lower()}.{len(self._nodes)}"
        names = [f"{base}.{index}" if index >= omit else "" for index in range(outputs)]
        self._nodes.append(helper.make_node(operator, list(inputs), names, name=base, **attributes))
        return names[omit:]

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Adds a node with one output. Returns the output's name."""
        return self.nodes(operator, *inputs, **attributes)[0]

    def weight(self, name: str, *shape: int) -> str:
        """Adds a tensor of the weights file. `shape` is the shape in the graph. It may split the tensor's axes."""
        offset, length = self._extents[name]
        assert length == 4 * math.prod(shape), (
            f"{name}: {length} bytes do not match the float32 shape {shape}: this is a bug"
        )
        key = f"{name}:{'x'.join(map(str, shape))}"
        if key not in self._initialisers:
            tensor = TensorProto(name=key, data_type=TensorProto.FLOAT, dims=shape)
            tensor.data_location = TensorProto.EXTERNAL
            entries = {"location": self._weights_file, "offset": str(offset), "length": str(length)}
            for entry, value in entries.items():
                tensor.external_data.add(key=entry, value=value)
            self._initialisers[key] = tensor
        return key

    def integers(self, *values: int) -> str:
        """Adds a constant int64 vector."""
        return self._constant(f"integers {' '.join(map(str, values))}", np.array(values, dtype=np.int64))

    def integer(self, value: int) -> str:
        """Adds a constant int64 scalar."""
        return self._constant(f"integer {value}", np.array(value, dtype=np.int64))

    def number(self, value: float) -> str:
        """Adds a constant float32 scalar."""
        return self._constant(f"number {value!r}", np.array(value, dtype=np.float32))

    def byte(self, value: int) -> str:
        """Adds a constant uint8 scalar."""
        return self._constant(f"byte {value}", np.array(value, dtype=np.uint8))

    def vector(self, name: str, values: NDArray[np.floating]) -> str:
        """Adds a constant float32 vector with a unique name."""
        return self._constant(f"vector {name}", values.astype(np.float32))

    def _constant(self, name: str, value: NDArray[np.generic]) -> str:
        name = self._prefix + name
        if name not in self._initialisers:
            self._initialisers[name] = numpy_helper.from_array(value, name)
        return name

    def input(self, name: str, element: int, shape: Sequence[Dimension]) -> str:
        """Declares an input. `element` is a TensorProto type."""
        self._inputs.append(helper.make_tensor_value_info(name, element, shape))
        return name

    def output(self, name: str, value: str, shape: Sequence[Dimension], element: int = TensorProto.FLOAT) -> None:
        """Declares `value` as the graph's output `name`. This renames the value, so outputs must be declared after all
        nodes have been added."""
        self._rename(value, name)
        self._outputs.append(helper.make_tensor_value_info(name, element, shape))

    def _rename(self, value: str, name: str) -> None:
        """Renames a value. If it has been renamed before, adds a copy of it with the new name."""
        if value in self._output_of:
            self._nodes.append(helper.make_node("Identity", [self._output_of[value]], [name], name=name))
        else:
            self._output_of[value] = name
            for node in self._nodes:
                for names in (node.input, node.output):
                    for index, used in enumerate(names):
                        if used == value:
                            names[index] = name

    def scan(
        self,
        step: Callable[[GraphWriter, list[str], list[str]], list[str]],
        states: Sequence[str],
        slices: Sequence[str],
    ) -> list[str]:
        """Adds a loop over the first axis of `slices`, which all have the same length T.

        `step(body, states, slices)` adds one iteration to the graph `body`, where it may also use this graph's values.
        It returns the next states, followed by any other values. `scan` returns all of these values for every step,
        stacked: (T, ...).
        """
        prefix = f"{self._prefix}scan.{len(self._nodes)}."
        body = GraphWriter("body", self._weights_file, self._extents, prefix, self.precision)
        carried = [f"{body._prefix}state.{index}" for index in range(len(states))]
        sliced = [f"{body._prefix}slice.{index}" for index in range(len(slices))]
        after = step(body, carried, sliced)
        results = [f"{body._prefix}next.{index}" for index in range(len(states))]
        results += [f"{body._prefix}stacked.{index}" for index in range(len(after))]
        for value, name in zip(after[: len(states)] + after, results, strict=True):
            body._rename(value, name)
        # The types are omitted, because ONNX infers them in a loop's body.
        body._inputs = [onnx.ValueInfoProto(name=name) for name in carried + sliced]
        body._outputs = [onnx.ValueInfoProto(name=name) for name in results]
        return self.nodes(
            "Scan", *states, *slices, outputs=len(results), body=body._graph(), num_scan_inputs=len(slices)
        )[len(states) :]

    def _graph(self) -> onnx.GraphProto:
        initialisers = list(self._initialisers.values())
        return helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, initialisers)

    def model(self) -> bytes:
        """Returns the finished graph as the bytes of an ONNX file."""
        model = helper.make_model(self._graph(), opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        model.producer_name = "wane"
        data: bytes = model.SerializeToString(deterministic=True)
        return data
