"""The five graphs of a bundle, made from a graph of one step. `models/export/roles.py` has their inputs and outputs.

The nodes of the step stand in the body of a `Scan` over the tokens. If its rows cannot run together, they stand in the
body of a `Scan` over the rows, which may be in the body of the first. Sessions hold states in float32 with the batch
first, and exactly: a value of another type may have several pieces. The graphs convert them to and from the step's own
layout and type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from wane.models.architecture import StateTensor
from wane.models.bundle_checks import ROLES, TOP, BundleError
from wane.models.imported.graph_file import (
    GraphError,
    Limits,
    every_initialiser,
    initialisers,
    opset_of,
    read_graph,
    subgraphs,
    values_of,
)
from wane.models.imported.signature import PIECES, Port, Signature
from wane.models.manifest import Manifest, Role

IR_VERSION = 10  # the oldest supported onnxruntime (1.20) can read this version

LEAST_EXTERNAL = 256
"""The smallest number of bytes of a tensor that is stored in the weights file."""

BUNDLE_LIMITS = Limits(file_bytes=8 * 2**20, nodes=50_000, hard_links=True)
"""The limits of the graphs of a bundle. Their weights are in the weights file, whose hash is known."""

OLDEST_WRAPPED = 13
"""The oldest operator set of a graph that is imported. Since this version, operators read axes as an input."""

IMPOSSIBLE = 300.0
"""How much lower the logit of an added token is than the lowest other logit. The exponential of a number that is lower
by 105 than another one is 0 in float32."""

SAME_RANK = ("Add", "Sub", "Mul", "Div", "Cast", "Identity", "Tanh", "LogSoftmax")
"""Operators between the last matrix and the logits: their results have the shape of their input."""


@dataclass(frozen=True, slots=True)
class Step:
    """A graph of one step.

    `tensors`: its constants by name. `vocabulary`: the number of its logits. `hidden`: the value that is the input of
    the last matrix, None if it was not found; then `hidden` of the bundle is the logits. `added`: the number of tokens
    after the last one that the step does not know. Their probability is 0.
    """

    signature: Signature
    nodes: tuple[onnx.NodeProto, ...]
    tensors: dict[str, NDArray[Any]]
    opset: int
    vocabulary: int
    hidden: str | None
    width: int
    added: int

    @property
    def size(self) -> int:
        """The size of the vocabulary, with the added tokens."""
        return self.vocabulary + self.added

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The state tensors of a session."""
        return tuple(StateTensor(name=f"state.{port.name}", shape=port.kept) for port in self.signature.inputs.states)

    def external(self) -> dict[str, NDArray[Any]]:
        """Returns the tensors that are stored in the weights file."""
        return {name: value for name, value in self.tensors.items() if value.nbytes >= LEAST_EXTERNAL}


def read_step(
    model: onnx.ModelProto, folder: Path, signature: Signature, vocabulary: int, rank: int, added: int = 0
) -> Step:
    """Returns the step of a checked model. `rank`: the number of axes of its logits. Raises GraphError."""
    if (opset := opset_of(model)) < OLDEST_WRAPPED:
        raise GraphError(
            f"uses the operator set {opset}, but a graph is wrapped in loops from {OLDEST_WRAPPED} on: export it again "
            "with another opset_version"
        )
    tensors = initialisers(model, folder)
    for inner in (inner for node in model.graph.node for inner in subgraphs(node)):
        for tensor in every_initialiser(inner):
            if tensor.data_location == TensorProto.EXTERNAL:
                tensor.CopyFrom(numpy_helper.from_array(values_of(tensor, folder), tensor.name))
    nodes = []
    for node in model.graph.node:
        value = [attribute.t for attribute in node.attribute if attribute.name == "value"]
        if node.op_type == "Constant" and value and value[0].data_type != TensorProto.STRING:
            tensors[node.output[0]] = numpy_helper.to_array(value[0])
        else:
            nodes.append(node)
    hidden, width = (_last_matrix(nodes, tensors, signature.logits) if rank == 2 else None) or (None, vocabulary)
    return Step(signature, tuple(nodes), tensors, opset, vocabulary, hidden, width, added)


def build_roles(
    step: Step, weights_file: str, extents: Mapping[str, tuple[int, int]], together: bool
) -> dict[Role, bytes]:
    """Returns the graphs of a bundle as the bytes of ONNX files. `extents`: the range of bytes of each tensor in the
    weights file. `together`: whether the rows of a batch run together."""
    return {role: _Graph(step, weights_file, extents, together).build(role) for role in ROLES}


def check_roles(path: Path, manifest: Manifest) -> None:
    """Checks the graphs of the bundle at `path` before onnxruntime opens them. Raises BundleError."""
    for role, name in manifest.graphs.items():
        try:
            model = read_graph(path / name, BUNDLE_LIMITS)
        except GraphError as error:
            raise BundleError(str(error)) from error
        for tensor in every_initialiser(model.graph):
            for entry in tensor.external_data:
                if entry.key == "location" and entry.value not in manifest.files:
                    raise BundleError(
                        f"{path / name}: its weights are in {entry.value!r}, which has no hash in `files`"
                    )
        for kind, values, expected in (
            ("inputs", model.graph.input, _inputs(role, manifest.state)),
            ("outputs", model.graph.output, _outputs(role, manifest.state)),
        ):
            found = {value.name for value in values}
            if found != expected:
                raise BundleError(f"{path / name}: its {kind} are {sorted(found)}, but must be {sorted(expected)}")


def _inputs(role: Role, states: Sequence[StateTensor]) -> set[str]:
    if role == "head":
        return {"hidden"}
    names = {"tokens"} | (set() if role == "window" else {tensor.name for tensor in states})
    return names | (set() if role == "step" else {"lengths"}) | ({"targets"} if role == "scan" else set())


def _outputs(role: Role, states: Sequence[StateTensor]) -> set[str]:
    answer = {"logits", "top_logits", "top_ids", "log_sum_exp"}
    if role == "head":
        return answer
    names = {"hidden"} | {f"next.{tensor.name}" for tensor in states}
    return names | {"advance": set(), "scan": {"logprobs", "hiddens"}}.get(role, answer)


def _last_matrix(
    nodes: Sequence[onnx.NodeProto], tensors: Mapping[str, NDArray[Any]], logits: str
) -> tuple[str, int] | None:
    """Returns the input of the last matrix before the logits (B, V), a value (B, H), and H. Returns None if the logits
    are computed in another way."""
    producers = {name: node for node in nodes for name in node.output}
    value = logits
    while (node := producers.get(value)) is not None:
        if node.op_type in ("Gemm", "MatMul"):
            names = {attribute.name: attribute.i for attribute in node.attribute}
            matrix = tensors.get(node.input[1])
            if matrix is None or matrix.ndim != 2 or matrix.dtype != np.float32 or names.get("transA"):
                return None
            if node.input[0] in tensors or any(name and name not in tensors for name in node.input[2:]):
                return None
            return node.input[0], matrix.shape[1 if names.get("transB") else 0]
        varying = [name for name in node.input if name not in tensors]
        if node.op_type not in SAME_RANK or len(varying) != 1 or not _keeps_type(node):
            return None
        if any(tensors[name].ndim > 2 for name in node.input if name in tensors):
            return None
        value = varying[0]
    return None


def _keeps_type(node: onnx.NodeProto) -> bool:
    return node.op_type != "Cast" or all(attribute.i == TensorProto.FLOAT for attribute in node.attribute)


class _Graph:
    """A graph under construction, or the body of a loop in it. Values are identified by name."""

    def __init__(
        self,
        step: Step,
        weights_file: str,
        extents: Mapping[str, tuple[int, int]],
        together: bool,
        outer: _Graph | None = None,
    ) -> None:
        self._step = step
        self._weights_file = weights_file
        self._extents = extents
        self._together = together
        self._outer = outer
        self._prefix: str = "" if outer is None else f"{outer._prefix}{len(outer._nodes)}."
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: dict[str, onnx.TensorProto] = {} if outer is None else outer._tensors

    def build(self, role: Role) -> bytes:
        """Returns the graph of a role as the bytes of an ONNX file."""
        step, states = self._step, self._step.states
        inputs, outputs = [], []

        def read(name: str, shape: Sequence[int | str], element: int = TensorProto.INT64) -> str:
            inputs.append(helper.make_tensor_value_info(name, element, shape))
            return name

        def write(name: str, value: str, shape: Sequence[int | str], element: int = TensorProto.FLOAT) -> None:
            self._nodes.append(helper.make_node("Identity", [value], [name]))
            outputs.append(helper.make_tensor_value_info(name, element, shape))

        def answer(logits: str) -> None:
            count = min(TOP, step.size)
            top, ids = self.nodes("TopK", 2, logits, self.integers(count), axis=1)
            # Like the other graphs of Wane: ReduceLogSumExp is slow on the CPU.
            largest = self.node("Slice", top, self.integers(0), self.integers(1), self.integers(1))
            terms = self.node("Exp", self.node("Sub", logits, largest))
            total = self.node("Log", self.node("ReduceSum", terms, self.integers(1)))
            write("logits", logits, ["B", step.size])
            write("top_logits", top, ["B", count])
            write("top_ids", ids, ["B", count], TensorProto.INT64)
            write("log_sum_exp", self.node("Squeeze", self.node("Add", largest, total), self.integers(1)), ["B"])

        if role == "head":
            answer(self.head(read("hidden", ["B", step.width], TensorProto.FLOAT)))
            return self._model(role, inputs, outputs)
        tokens = read("tokens", ["B"] if role == "step" else ["B", "T"])
        targets = read("targets", ["B", "T"]) if role == "scan" else ""
        lengths = "" if role == "step" else read("lengths", ["B"])
        if role == "window":
            before = [self.zeros(lengths, tensor.shape) for tensor in states]
        else:
            before = [read(tensor.name, ["B", *tensor.shape], TensorProto.FLOAT) for tensor in states]
        if role == "step":
            hidden, after = self.step(tokens, before)
        else:
            hidden, after, each = self.sequence(tokens, targets, lengths, before)
            if role == "scan":
                write("logprobs", self.node("Transpose", each[0], perm=[1, 0]), ["B", "T"])
                write("hiddens", self.node("Transpose", each[1], perm=[1, 0, 2]), ["B", "T", step.width])
        if role in ("step", "window"):
            answer(self.head(hidden))
        write("hidden", hidden, ["B", step.width])
        for tensor, value in zip(states, after, strict=True):
            write(f"next.{tensor.name}", value, ["B", *tensor.shape])
        return self._model(role, inputs, outputs)

    def nodes(self, operator: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Adds a node with `count` outputs. Returns their names."""
        base = f"wane/{self._prefix}{len(self._nodes)}"
        names = [f"{base}.{index}" for index in range(count)]
        self._nodes.append(helper.make_node(operator, list(inputs), names, name=base, **attributes))
        return names

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Adds a node with one output. Returns the output's name."""
        return self.nodes(operator, 1, *inputs, **attributes)[0]

    def integers(self, *values: int) -> str:
        """Adds a constant int64 vector."""
        return self._tensor(f"wane/integers {' '.join(map(str, values))}", np.array(values, np.int64))

    def integer(self, value: int) -> str:
        """Adds a constant int64 scalar."""
        return self._tensor(f"wane/integer {value}", np.array(value, np.int64))

    def number(self, value: float) -> str:
        """Adds a constant float32 scalar."""
        return self._tensor(f"wane/number {value!r}", np.array(value, np.float32))

    def zeros(self, rows: str, shape: Sequence[int]) -> str:
        """Returns float32 zeros (B, *shape) for a value `rows` (B)."""
        whole = self.node("Concat", self.node("Shape", rows), self.integers(*shape), axis=0)
        zero = helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0])
        return self.node("ConstantOfShape", whole, value=zero)

    def step(self, tokens: str, states: Sequence[str]) -> tuple[str, list[str]]:
        """Runs tokens (B) from states (B, *shape). Returns hidden (B, H), and the next states."""
        if not self._together:
            if self._outer is None:
                return self._deeper(tokens, states)
            hidden, *after = self.scan(lambda body, _, row: ([], body._row(row[0], row[1:])), [], [tokens, *states])[1]
            return hidden, after
        port = self._step.signature.inputs.tokens
        shape = [-1 if axis == port.axis else 1 for axis in range(len(port.shape))]
        hidden, after = self._inline_step(tokens, states, shape)
        ports = self._step.signature.inputs.states
        after = [self._first(value, port) for value, port in zip(after, ports, strict=True)]
        return self.node("Reshape", hidden, self.integers(-1, self._step.width)), after

    def _deeper(self, tokens: str, states: Sequence[str]) -> tuple[str, list[str]]:
        """Like `step`, in the body of a loop of one iteration. onnxruntime rounds a product differently in a loop in a
        loop, so that `step` would not be bit-identical to the graphs that read sequences."""
        first = self.integers(0)
        one = [self.node("Unsqueeze", each, first) for each in (tokens, *states)]

        def iteration(body: _Graph, _: list[str], slices: list[str]) -> tuple[list[str], list[str]]:
            hidden, after = body.step(slices[0], slices[1:])
            return [], [hidden, *after]

        hidden, *after = (self.node("Squeeze", each, first) for each in self.scan(iteration, [], one)[1])
        return hidden, after

    def _row(self, token: str, states: Sequence[str]) -> list[str]:
        """Runs one token () from the states (*shape) of one row. Returns hidden (H), and the next states."""
        hidden, after = self._inline_step(token, states, self._step.signature.inputs.tokens.batched(1))
        rows = []
        for value, port in zip(after, self._step.signature.inputs.states, strict=True):
            shape = port.kept if port.pieces == 1 else port.row
            rows.append(self._split(self.node("Reshape", value, self.integers(*shape)), port, 0))
        return [self.node("Reshape", hidden, self.integers(self._step.width)), *rows]

    def head(self, hidden: str) -> str:
        """Returns the logits (B, V) of hidden (B, H)."""
        logits = self._own_logits(hidden)
        if not self._step.added:
            return logits
        if self._step.opset < 18:  # the first operator set in which the axes are an input
            least = self.node("ReduceMin", logits, axes=[1])
        else:
            least = self.node("ReduceMin", logits, self.integers(1))
        added = self.node("Sub", least, self.number(IMPOSSIBLE))
        return self.node("Concat", logits, *[added] * self._step.added, axis=1)

    def _own_logits(self, hidden: str) -> str:
        """Returns the step's own logits of hidden (B, H)."""
        if self._step.hidden is None:
            return hidden
        if self._together:
            return self._inline_head(hidden, -1)
        shape = (1, self._step.width)

        def row(body: _Graph, _: list[str], slices: list[str]) -> tuple[list[str], list[str]]:
            logits = body._inline_head(body.node("Reshape", slices[0], body.integers(*shape)), 1)
            return [], [body.node("Reshape", logits, body.integers(self._step.vocabulary))]

        return self.scan(row, [], [hidden])[1][0]

    def sequence(
        self, tokens: str, targets: str, lengths: str, states: Sequence[str]
    ) -> tuple[str, list[str], list[str]]:
        """Runs tokens (B, T) of the given lengths (B) from `states`. Returns hidden (B, H) and the states after the
        last token of each row. With `targets` (B, T), also returns log p(target), (T, B), and hidden after every token,
        (T, B, H), both 0 beyond the length of a row."""
        by_time = [self.node("Transpose", each, perm=[1, 0]) for each in (tokens, targets) if each]
        shapes = [(self._step.width,), *(tensor.shape for tensor in self._step.states)]

        def one(body: _Graph, carried: list[str], slices: list[str]) -> tuple[list[str], list[str]]:
            position, hidden, *before = carried
            now, after = body.step(slices[0], before)
            reads = body.node("Less", position, lengths)
            kept = []
            for old, new, shape in zip([hidden, *before], [now, *after], shapes, strict=True):
                mask = body.node("Reshape", reads, body.integers(-1, *[1] * len(shape)))
                kept.append(body.node("Where", mask, new, old))
            each = []
            if targets:
                logprobs = body.node("LogSoftmax", body.head(now), axis=-1)
                chosen = body.node(
                    "GatherElements", logprobs, body.node("Reshape", slices[1], body.integers(-1, 1)), axis=1
                )
                chosen = body.node("Reshape", chosen, body.integers(-1))
                mask = body.node("Reshape", reads, body.integers(-1, 1))
                each = [
                    body.node("Where", reads, chosen, body.number(0.0)),
                    body.node("Where", mask, now, body.number(0.0)),
                ]
            return [body.node("Add", position, body.integers(1)), *kept], each

        start = [self.integers(0), self.zeros(lengths, (self._step.width,)), *states]
        (_, hidden, *after), each = self.scan(one, start, by_time)
        return hidden, after, each

    def scan(
        self,
        one: Callable[[_Graph, list[str], list[str]], tuple[list[str], list[str]]],
        carried: Sequence[str],
        slices: Sequence[str],
    ) -> tuple[list[str], list[str]]:
        """Adds a loop over the first axis of `slices`. `one(body, carried, slices)` adds one iteration, and returns the
        next carried values and the values of this iteration. Returns the last carried values, and the values of all
        iterations, stacked."""
        body = _Graph(self._step, self._weights_file, self._extents, self._together, self)
        before = [f"wane/{body._prefix}carried.{index}" for index in range(len(carried))]
        sliced = [f"wane/{body._prefix}slice.{index}" for index in range(len(slices))]
        after, each = one(body, before, sliced)
        # A name of its own for each output, because a value may be two outputs.
        results = [body.node("Identity", value) for value in [*after, *each]]
        # The types are omitted, because ONNX infers them in a loop's body.
        graph = helper.make_graph(
            body._nodes,
            "body",
            [onnx.ValueInfoProto(name=name) for name in before + sliced],
            [onnx.ValueInfoProto(name=name) for name in results],
        )
        found = self.nodes("Scan", len(results), *carried, *slices, body=graph, num_scan_inputs=len(slices))
        return found[: len(carried)], found[len(carried) :]

    def _inline_step(self, tokens: str, states: Sequence[str], shape: Sequence[int]) -> tuple[str, list[str]]:
        """Adds the nodes of the step. `shape`: that of the step's own tokens. Returns its values of `hidden`, in
        float32, and of the next states, both in the step's own layout."""
        signature, inputs = self._step.signature, self._step.signature.inputs
        whole = self.node("Reshape", tokens, self.integers(*shape))
        if self._step.added:  # an added token is read as the last one, because the step has no other
            whole = self.node("Min", whole, self.integers(self._step.vocabulary - 1))
        given = {inputs.tokens.name: self._cast(whole, inputs.tokens.element, TensorProto.INT64)}
        for port, state in zip(inputs.states, states, strict=True):
            given[port.name] = self._own_layout(self._join(state, port, 1 if self._together else 0), port)
        hidden = self._step.hidden or signature.logits
        first, *after = self._inline("step/", given, [hidden, *signature.after])
        return self._cast(first, TensorProto.FLOAT, TensorProto.FLOAT if self._step.hidden else 0), after

    def _inline_head(self, hidden: str, rows: int) -> str:
        """Adds the nodes from `hidden` to the logits. Returns the logits (rows, V)."""
        assert self._step.hidden is not None, "the step has no last matrix: this is a bug"
        (logits,) = self._inline("head/", {self._step.hidden: hidden}, [self._step.signature.logits])
        return self.node(
            "Reshape", self._cast(logits, TensorProto.FLOAT, 0), self.integers(rows, self._step.vocabulary)
        )

    def _own_layout(self, state: str, port: Port) -> str:
        """Returns a state in the step's own layout: (B, *shape) with the batch on its own axis, or one row's."""
        if not self._together:
            return self.node("Reshape", state, self.integers(*port.batched(1)))
        if not port.row:
            return self.node("Reshape", state, self.integers(-1))
        assert port.axis is not None, "rows without a batch axis run together: this is a bug"
        if port.axis == 0:
            return state
        order = [*range(1, port.axis + 1), 0, *range(port.axis + 1, len(port.shape))]
        return self.node("Transpose", state, perm=order)

    def _join(self, state: str, port: Port, axis: int) -> str:
        """Returns a session's state in the type of the step. `axis`: that of the pieces, if there are several."""
        if port.pieces == 1:
            return self._cast(state, port.element, TensorProto.FLOAT)
        whole = TensorProto.DOUBLE if port.element == TensorProto.DOUBLE else TensorProto.INT64
        pieces = self.nodes("Split", port.pieces, state, self.integers(*[1] * port.pieces), axis=axis)
        *lower, value = (self._cast(self.node("Squeeze", p, self.integers(axis)), whole, 0) for p in pieces)
        for piece, bits in zip(reversed(lower), reversed(PIECES[port.element]), strict=True):
            if whole == TensorProto.INT64:
                value = self.node("Mul", value, self.integer(1 << bits))
            value = self.node("Add", value, piece)
        return self._cast(value, port.element, whole)

    def _split(self, value: str, port: Port, axis: int) -> str:
        """Returns a state of the step in float32, as a session keeps it. `axis`: that of the pieces."""
        if port.pieces == 1:
            return self._cast(value, TensorProto.FLOAT, port.element)
        pieces = []
        if port.element == TensorProto.DOUBLE:
            for _ in PIECES[port.element]:
                pieces.append(self._cast(value, TensorProto.FLOAT, TensorProto.DOUBLE))
                value = self.node("Sub", value, self._cast(pieces[-1], TensorProto.DOUBLE, TensorProto.FLOAT))
        else:
            value = self._cast(value, TensorProto.INT64, port.element)
            for bits in PIECES[port.element]:
                pieces.append(self.node("Mod", value, self.integer(1 << bits)))  # at least 0
                value = self.node("Div", self.node("Sub", value, pieces[-1]), self.integer(1 << bits))
        parts = [self.node("Unsqueeze", piece, self.integers(axis)) for piece in (*pieces, value)]
        return self.node("Concat", *(self._cast(part, TensorProto.FLOAT, 0) for part in parts), axis=axis)

    def _first(self, value: str, port: Port) -> str:
        """Returns a state as a session keeps it, with its batch on the first axis."""
        if port.axis:
            order = [port.axis, *(axis for axis in range(len(port.shape)) if axis != port.axis)]
            value = self.node("Transpose", value, perm=order)
        shape = port.kept if port.pieces == 1 else port.row
        return self._split(self.node("Reshape", value, self.integers(-1, *shape)), port, 1)

    def _cast(self, value: str, element: int, now: int) -> str:
        return value if element == now else self.node("Cast", value, to=element)

    def _inline(self, prefix: str, given: Mapping[str, str], wanted: Sequence[str]) -> list[str]:
        """Adds the step's nodes that compute `wanted` from the values `given`. Returns the names of `wanted`."""
        needed, chosen = set(wanted), []
        for node in reversed(self._step.nodes):
            if needed.intersection(node.output) and not all(name in given for name in node.output if name in needed):
                chosen.append(node)
                needed.update(reads(node))
        names: dict[str, str] = dict(given)
        for name in needed:
            if name in self._step.tensors and name not in given:
                names[name] = self._tensor(name, self._step.tensors[name], f"weights/{name}")

        def renamed(name: str) -> str:
            return names.get(name, f"{prefix}{name}") if name else ""

        self._nodes.extend(_renamed(node, renamed) for node in reversed(chosen))
        return [renamed(name) for name in wanted]

    def _tensor(self, name: str, value: NDArray[Any], key: str | None = None) -> str:
        """Adds a constant, and returns its name in the graph. A tensor of the weights file refers to it."""
        key = key or name
        if key in self._tensors:
            return key
        if name not in self._extents or key == name:
            self._tensors[key] = numpy_helper.from_array(value, key)
            return key
        offset, length = self._extents[name]
        tensor = TensorProto(name=key, data_type=helper.np_dtype_to_tensor_dtype(value.dtype), dims=value.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for entry, content in {"location": self._weights_file, "offset": offset, "length": length}.items():
            tensor.external_data.add(key=entry, value=str(content))
        self._tensors[key] = tensor
        return key

    def _model(
        self, role: Role, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
    ) -> bytes:
        graph = helper.make_graph(self._nodes, role, inputs, outputs, [*self._tensors.values()])
        opsets = [helper.make_opsetid("", self._step.opset)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        model.producer_name = "wane"
        data: bytes = model.SerializeToString(deterministic=True)
        return data


def reads(node: onnx.NodeProto) -> set[str]:
    """Returns the names of the values that a node reads, with those that its subgraphs read from outside."""
    found = {name for name in node.input if name}
    for graph in subgraphs(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {name for inner in graph.node for name in inner.output}
        inside = {name for inner in graph.node for name in reads(inner)} | {value.name for value in graph.output}
        found |= inside - own
    return found


def _renamed(node: onnx.NodeProto, name: Callable[[str], str]) -> onnx.NodeProto:
    """Returns a copy of a node with other names, also in its subgraphs."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.ClearField("doc_string")
    copy.ClearField("metadata_props")
    copy.input[:] = [name(each) for each in node.input]
    copy.output[:] = [name(each) for each in node.output]
    for graph in subgraphs(copy):
        del graph.value_info[:]
        inner = [_renamed(each, name) for each in graph.node]
        del graph.node[:]
        graph.node.extend(inner)
        for value in (*graph.input, *graph.output, *graph.initializer):
            value.name = name(value.name)
    return copy
