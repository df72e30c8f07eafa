"""Small ONNX graphs for the tests, built without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
value = helper.make_tensor_value_info


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: dict[str, Any] | None = None,
    opset: int = 20,
) -> Path:
    """Writes a model and returns its path. `weights`: arrays, which become initialisers."""
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path
