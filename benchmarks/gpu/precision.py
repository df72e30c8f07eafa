"""An ONNX graph whose products are computed in bf16.

The service has no such graphs: their answers would have no error bound, because the error of a step is not carried.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

PRODUCTS = ("Gemm", "MatMul")


def in_bf16(graph: bytes) -> bytes:
    """Returns the graph with the inputs of every product cast to bf16 and its result cast back to float32. onnxruntime
    casts the weights once, when it loads the graph."""
    model = onnx.load_from_string(graph)
    nodes, cast = [], set[str]()
    for node in model.graph.node:
        if node.op_type in PRODUCTS:
            for index, name in enumerate(node.input):
                if name and name not in cast:
                    nodes.append(helper.make_node("Cast", [name], [f"{name}.bf16"], to=TensorProto.BFLOAT16))
                    cast.add(name)
                node.input[index] = f"{name}.bf16" if name else name
            result = node.output[0]
            node.output[0] = f"{result}.product"
            nodes += [node, helper.make_node("Cast", [node.output[0]], [result], to=TensorProto.FLOAT)]
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    data: bytes = model.SerializeToString(deterministic=True)
    return data
