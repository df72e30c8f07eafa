"""Runs ONNX's LSTM operator with a bundle's weights, to measure the cost of a long sequence without Wane's graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

OPSET = 20
ONNX_ORDER = (0, 3, 1, 2)
"""For each gate in ONNX's order (i, o, f, c), the index of the same gate in torch's order (i, f, g, o). torch's name
for the gate c is g."""


class NativeLstm:
    """An LSTM's graph (an embedding, one LSTM layer and an output layer) in ONNX Runtime. The runtime uses `threads`
    threads, which spin while they wait."""

    def __init__(self, bundle: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        weights = load_file(bundle / "weights.safetensors")
        self._sessions = {
            scored: onnxruntime.InferenceSession(graph(weights, scored), options, providers=["CPUExecutionProvider"])
            for scored in (False, True)
        }

    def state(self, tokens: NDArray[np.int64]) -> list[NDArray[np.float32]]:
        """Returns the states h and c after `tokens` (T), each of the shape (1, H)."""
        return [value[0] for value in self._sessions[False].run(["h", "c"], {"tokens": tokens})]

    def score(self, tokens: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the log-probabilities (T) of `targets` (T). `targets[t]` is predicted from `tokens[0]` to
        `tokens[t]`."""
        (logprobs,) = self._sessions[True].run(["logprobs"], {"tokens": tokens, "targets": targets})
        found: NDArray[np.float32] = logprobs[:, 0]
        return found


def graph(weights: dict[str, NDArray[np.float32]], scored: bool) -> bytes:
    """Builds the graph. If `scored` is false, the graph maps tokens[T] to the states h and c. If `scored` is true, it
    maps tokens[T] and targets[T] to logprobs[T,1]."""
    hidden = weights["head.weight"].shape[1]

    def gates(name: str) -> NDArray[np.float32]:
        blocks = np.split(weights[f"layers.0.cell.{name}"], 4)
        return np.concatenate([blocks[index] for index in ONNX_ORDER])

    held = {
        "embedding": weights["embedding.weight"],
        "W": gates("weight_ih_l0")[None],
        "R": gates("weight_hh_l0")[None],
        "B": np.concatenate([gates("bias_ih_l0"), gates("bias_hh_l0")])[None],
        "batch": np.array([1]),
        "flat": np.array([-1, hidden]),
        "head": np.ascontiguousarray(weights["head.weight"].T),
        "bias": weights["head.bias"],
    }
    nodes = [
        helper.make_node("Gather", ["embedding", "tokens"], ["x"]),
        helper.make_node("Unsqueeze", ["x", "batch"], ["by_time"]),
        helper.make_node("LSTM", ["by_time", "W", "R", "B"], ["y" if scored else "", "h", "c"], hidden_size=hidden),
    ]
    inputs = [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["T"])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, hidden]) for name in ("h", "c")]
    if scored:
        nodes += [
            helper.make_node("Reshape", ["y", "flat"], ["rows"]),
            helper.make_node("Gemm", ["rows", "head", "bias"], ["logits"]),
            helper.make_node("LogSoftmax", ["logits"], ["every"], axis=1),
            helper.make_node("Unsqueeze", ["targets", "batch"], ["columns"]),
            helper.make_node("GatherElements", ["every", "columns"], ["logprobs"], axis=1),
        ]
        inputs.append(helper.make_tensor_value_info("targets", TensorProto.INT64, ["T"]))
        outputs = [helper.make_tensor_value_info("logprobs", TensorProto.FLOAT, ["T", 1])]
    made = helper.make_graph(
        nodes, "native", inputs, outputs, [numpy_helper.from_array(value, name) for name, value in held.items()]
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data
