"""Reads an ONNX file of unknown origin, and checks it before onnxruntime opens it.

A file is refused if it is larger than the limits, if it has an operator that is not in ONNX's own operator set, if its
names clash, if its nodes form a cycle, if a loop has no small constant number of iterations, or if its external data
lie outside the file's folder or behind a link. The size of a tensor is computed from its shape before any of its bytes
are read. Subgraphs of `If`, `Loop` and `Scan` are checked like the graph.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, defs, helper, numpy_helper

from wane.models.bundle_checks import NEWEST_OPSET, BundleError, open_regular

OLDEST_OPSET = 9
"""The oldest operator set of a graph. `Scan` has its present inputs since this version."""

DEEPEST = 16
"""The largest depth of subgraphs inside subgraphs."""

LONGEST_LOOP = 10_000
"""The largest number of iterations of a `Loop`, times those of the loops around it."""

MOST_ENTRIES = 16
"""The largest number of entries that describe the external data of a tensor. ONNX has five."""

STANDARD = ("", "ai.onnx")
"""The names of ONNX's own operator set."""

RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
"""Operators whose results differ from run to run. A session that is replayed or rebuilt would get other answers."""

FIELDS: Mapping[int, str] = {
    TensorProto.FLOAT: "float_data",
    TensorProto.DOUBLE: "double_data",
    TensorProto.INT64: "int64_data",
    TensorProto.UINT64: "uint64_data",
    TensorProto.UINT32: "uint64_data",
    TensorProto.INT32: "int32_data",
    TensorProto.INT16: "int32_data",
    TensorProto.INT8: "int32_data",
    TensorProto.UINT16: "int32_data",
    TensorProto.UINT8: "int32_data",
    TensorProto.BOOL: "int32_data",
    TensorProto.FLOAT16: "int32_data",
}
"""The types of tensors that are read, each with the field that has the values of a tensor without `raw_data`."""


class GraphError(Exception):
    """Raised for a file that is refused. The message names the file, the part of it, and the reason."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a file.

    `file_bytes`: the size of the file, without external data. `tensor_bytes`: the size of all its tensors together,
    with external data. `nodes`: the number of nodes, with those of subgraphs. `hard_links`: whether a file of external
    data may have several names.
    """

    file_bytes: int = 2**30
    tensor_bytes: int = 2**30
    nodes: int = 20_000
    hard_links: bool = False

    @property
    def parts(self) -> int:
        """The number of nodes, subgraphs, attributes, tensors, and names of inputs and outputs."""
        return 20 * self.nodes


LIMITS = Limits()


def read_graph(path: Path, limits: Limits = LIMITS) -> onnx.ModelProto:
    """Returns the model in the file `path`, checked. External data stay in their files. Raises GraphError."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limits.file_bytes:
                raise GraphError(f"{path}: has {size:,} bytes, more than the limit of {limits.file_bytes:,}")
            data = file.read(limits.file_bytes + 1)
    except BundleError as error:
        raise GraphError(str(error)) from error
    except OSError as error:
        raise GraphError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > limits.file_bytes:  # the file has grown
        raise GraphError(f"{path}: has more than {limits.file_bytes:,} bytes")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise GraphError(f"{path}: is not an ONNX file: {error}") from error
    try:
        check_model(model, path.parent, limits)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error
    return model


def check_model(model: onnx.ModelProto, folder: Path, limits: Limits = LIMITS) -> None:
    """Checks a model whose external data lie in `folder`. Raises GraphError."""
    if not model.graph.node:
        raise GraphError("is not an ONNX file, or its graph has no node")
    if model.functions:
        raise GraphError(
            f"has the function {model.functions[0].name!r} of its own: inline it "
            "(onnx.inliner.inline_local_functions), and save the model again"
        )
    if model.training_info:
        raise GraphError("has training information: export the model for inference")
    versions = [each.version for each in model.opset_import if each.domain in STANDARD]
    if len(versions) != 1:
        raise GraphError(f"names ONNX's operator set {len(versions)} times, but must name it once")
    if not OLDEST_OPSET <= versions[0] <= NEWEST_OPSET:
        raise GraphError(
            f"uses the operator set {versions[0]}, but must use one of {OLDEST_OPSET} to {NEWEST_OPSET}: export it "
            "again with another opset_version"
        )
    _Check(folder, limits, versions[0]).graph(model.graph, {}, {}, 0, 1)


def opset_of(model: onnx.ModelProto) -> int:
    """Returns the version of ONNX's operator set that a checked model uses."""
    return next(int(each.version) for each in model.opset_import if each.domain in STANDARD)


def real_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Returns the inputs of a graph without those that an initialiser gives, which old files also list as inputs."""
    given = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in given]


def initialisers(model: onnx.ModelProto, folder: Path) -> dict[str, NDArray[Any]]:
    """Returns the values of a checked model's initialisers by name. `folder`: the folder of its external data. Raises
    GraphError."""
    return {tensor.name: values_of(tensor, folder) for tensor in model.graph.initializer}


def values_of(tensor: TensorProto, folder: Path) -> NDArray[Any]:
    """Returns the values of a tensor of a checked model. Raises GraphError."""
    if tensor.data_location != TensorProto.EXTERNAL:
        found: NDArray[Any] = numpy_helper.to_array(tensor)
        return found
    dtype, size = helper.tensor_dtype_to_np_dtype(tensor.data_type), _bytes_of(tensor)
    location, offset, _ = _external(tensor)
    with _open_external(tensor, folder, location) as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) != size:
        raise GraphError(f"the tensor {tensor.name!r} needs {size} bytes of {location!r}, which has fewer")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype).reshape(tuple(tensor.dims))


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the subgraphs of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


class _Check:
    def __init__(self, folder: Path, limits: Limits, opset: int) -> None:
        self._folder = folder
        self._limits = limits
        self._opset = opset
        self._nodes = 0
        self._parts = 0
        self._bytes = 0

    def graph(
        self,
        graph: onnx.GraphProto,
        outer: Mapping[str, str],
        constants: Mapping[str, TensorProto | int],
        depth: int,
        repeated: int,
    ) -> None:
        """Checks a graph or a subgraph.

        `outer`: the values of the graphs around it that it may read, each with a description of where it comes from.
        `constants`: those of them that are constants. `repeated`: how many times the loops around it run it.
        """
        if depth > DEEPEST:
            raise GraphError(f"has subgraphs that are more than {DEEPEST} levels deep")
        self._nodes += len(graph.node)
        if self._nodes > self._limits.nodes:
            raise GraphError(f"has more than {self._limits.nodes:,} nodes")
        self._count(len(graph.node), len(graph.initializer), len(graph.input), len(graph.output))
        for node in graph.node:
            self._count(len(node.attribute), len(node.input), len(node.output))
            for attribute in node.attribute:
                self._count(len(attribute.graphs), len(attribute.tensors))
        if graph.sparse_initializer:
            raise GraphError("has a sparse initialiser: save it as a dense one")
        known, fixed = dict(outer), dict(constants)
        given: set[str] = set()
        for tensor in graph.initializer:
            self._tensor(tensor, "the initialiser")
            _define(known, tensor.name, "an initialiser")
            fixed[tensor.name] = tensor
            given.add(tensor.name)
        for value in graph.input:
            if value.name in given and depth == 0:  # old files also list initialisers as inputs
                given.discard(value.name)
            else:
                _define(known, value.name, "an input")
        produced = _producers(graph.node, known)
        for index, node in enumerate(graph.node):
            where = _describe(node, index)
            self._operator(node, where, fixed)
            for name in node.input:
                if name and name not in known:
                    raise GraphError(_undefined(graph.node, produced, where, name))
            times = repeated
            if node.op_type == "Loop":
                times *= _trips(node, where, fixed)
                if times > LONGEST_LOOP:
                    raise GraphError(f"{where} runs its body {times:,} times, more than the limit of {LONGEST_LOOP:,}")
            for inner in subgraphs(node):
                self.graph(inner, known, fixed, depth + 1, times)
            for name in node.output:
                if name:
                    known[name] = where
            if node.op_type == "Constant" and len(node.output) != 1:
                raise GraphError(f"{where} has {len(node.output)} outputs, but must have one")
            if node.op_type == "Constant" and (constant := _constant(node)) is not None:
                fixed[node.output[0]] = constant
        for value in graph.output:
            if value.name not in known:
                raise GraphError(f"the output {value.name!r} is not computed by any node")
        names = [value.name for value in graph.output]
        if depth == 0 and len(set(names)) < len(names):
            raise GraphError(f"two outputs have the name {next(n for n in names if names.count(n) > 1)!r}")

    def _count(self, *parts: int) -> None:
        self._parts += sum(parts)
        if self._parts > self._limits.parts:
            raise GraphError(
                f"has more than {self._limits.parts:,} nodes, subgraphs, attributes, tensors, inputs and outputs"
            )

    def _operator(self, node: onnx.NodeProto, where: str, fixed: Mapping[str, TensorProto | int]) -> None:
        """Checks that a node is an operator of ONNX, and the tensors in its attributes."""
        if node.domain not in STANDARD:
            raise GraphError(
                f"{where} is of the operator set {node.domain!r}. Only operators of ONNX's own set are run"
            )
        try:
            schema = defs.get_schema(node.op_type, self._opset, "")
        except defs.SchemaError:
            schema = None
        if schema is None or schema.deprecated:
            raise GraphError(f"{where}: the operator set {self._opset} of ONNX has no operator {node.op_type!r}")
        if node.op_type in RANDOM:
            raise GraphError(f"{where} draws random numbers, so that a session could not be replayed")
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
            training = fixed.get(node.input[2])
            if not isinstance(training, TensorProto) or not _is_false(training):
                raise GraphError(
                    f"{where} may draw random numbers: its training_mode is not the constant false. Export the model "
                    "for inference (model.eval() in torch)"
                )
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                raise GraphError(f"{where}: its attribute {attribute.name!r} refers to a function's attribute")
            if attribute.type in (AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS):
                raise GraphError(f"{where}: its attribute {attribute.name!r} is a sparse tensor")
            tensors = [*attribute.tensors, *([attribute.t] if attribute.HasField("t") else [])]
            for tensor in tensors:
                if tensor.data_location == TensorProto.EXTERNAL:
                    raise GraphError(f"{where}: its attribute {attribute.name!r} has external data")
                if tensor.data_type != TensorProto.STRING:  # an operator with a string makes no logits
                    self._tensor(tensor, f"{where}: the tensor {attribute.name!r}")

    def _tensor(self, tensor: TensorProto, what: str) -> None:
        """Counts a tensor's bytes by its shape, and checks that the file has as many."""
        what = f"{what} {tensor.name!r}"
        if tensor.data_type not in FIELDS:
            raise GraphError(f"{what} has the type {_type_name(tensor.data_type)}, which is not read")
        if any(size < 0 for size in tensor.dims):
            raise GraphError(f"{what} has the shape {list(tensor.dims)}")
        if tensor.HasField("segment"):
            raise GraphError(f"{what} is stored in segments, which are not read")
        size = _bytes_of(tensor)
        self._bytes += size
        if self._bytes > self._limits.tensor_bytes:
            raise GraphError(
                f"{what} of shape {list(tensor.dims)} has {size:,} bytes: all tensors together have more than the "
                f"limit of {self._limits.tensor_bytes:,}"
            )
        if tensor.data_location == TensorProto.EXTERNAL:
            location, offset, length = _external(tensor)
            with _open_external(tensor, self._folder, location) as file:
                status = os.fstat(file.fileno())
            if status.st_nlink > 1 and not self._limits.hard_links:
                raise GraphError(
                    f"{what}: its external data {location!r} have a second name (a hard link), perhaps outside of the "
                    "folder: copy the file"
                )
            rest = status.st_size - offset
            length = rest if length is None else length
            if length != size or rest < size:
                raise GraphError(
                    f"{what} of shape {list(tensor.dims)} needs {size:,} bytes, but {location!r} has "
                    f"{max(0, min(length, rest)):,} for it"
                )
            return
        field = FIELDS[tensor.data_type]
        found, needed = len(getattr(tensor, field)), math.prod(tensor.dims)
        if tensor.HasField("raw_data"):
            found, needed = len(tensor.raw_data), size
        if found != needed:
            raise GraphError(f"{what} of shape {list(tensor.dims)} has {found:,} values or bytes instead of {needed:,}")


def _bytes_of(tensor: TensorProto) -> int:
    size: int = math.prod(tensor.dims) * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
    return size


def _type_name(data_type: int) -> str:
    known: dict[int, str] = {number: name for name, number in TensorProto.DataType.items()}
    return known.get(data_type, str(data_type))


def _external(tensor: TensorProto) -> tuple[str, int, int | None]:
    """Returns the location, the offset and, if it is stated, the length of a tensor's external data."""
    if len(tensor.external_data) > MOST_ENTRIES:
        raise GraphError(f"the initialiser {tensor.name!r}: its external data have {len(tensor.external_data)} entries")
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries["length"]) if entries.get("length") else None
    except ValueError as error:
        raise GraphError(f"the initialiser {tensor.name!r}: its external data: {error}") from error
    if offset < 0 or (length is not None and length < 0):
        raise GraphError(f"the initialiser {tensor.name!r}: its external data have a negative offset or length")
    return entries.get("location", ""), offset, length


def _open_external(tensor: TensorProto, folder: Path, location: str) -> Any:
    """Opens the file of a tensor's external data. It must be a regular file in the model's folder, without a link on
    the way to it."""
    what = f"the initialiser {tensor.name!r}: its external data {location!r}"
    parts = PurePosixPath(location).parts
    if not parts or parts[0] == "/" or ".." in parts or "\\" in location or "\0" in location:
        raise GraphError(f"{what} must be a file inside the folder of the ONNX file")
    if "_ORT_MEM_ADDR_" in location:  # onnxruntime's mark of an address in memory
        raise GraphError(f"{what} has a name that onnxruntime reads as an address in memory")
    place = folder
    try:
        for part in parts:
            place = place / part
            if stat.S_ISLNK(os.lstat(place).st_mode):
                raise GraphError(f"{what} is a link, or behind one")
        if not stat.S_ISREG(os.lstat(place).st_mode):
            raise GraphError(f"{what} must be a regular file")
        return os.fdopen(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise GraphError(f"{what} cannot be read: {error.strerror}") from error


def every_initialiser(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Yields the initialisers of a graph and of its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for inner in subgraphs(node):
            yield from every_initialiser(inner)


def _define(known: dict[str, str], name: str, what: str) -> None:
    _check_name(name, what)
    if name in known:
        raise GraphError(f"the names clash: {name!r} is {known[name]} and {what}")
    known[name] = what


def _check_name(name: str, what: str) -> None:
    if not isinstance(name, str):  # protobuf's value of a text that is not UTF-8
        raise GraphError(f"the name {name!r} of {what} is not UTF-8")
    if "\0" in name:
        raise GraphError(f"the name {name!r} of {what} has a zero character, at which onnxruntime ends the name")


def _producers(nodes: Sequence[onnx.NodeProto], known: Mapping[str, str]) -> dict[str, int]:
    """Returns the index of the node that computes each value of a graph."""
    found: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in node.output:
            if name in found:
                first = _describe(nodes[found[name]], found[name])
                raise GraphError(f"the names clash: {name!r} is an output of {first} and of {_describe(node, index)}")
            if name in known:
                raise GraphError(
                    f"the names clash: {name!r} is {known[name]} and an output of {_describe(node, index)}"
                )
            if name:
                _check_name(name, f"an output of {_describe(node, index)}")
                found[name] = index
    return found


def _undefined(nodes: Sequence[onnx.NodeProto], produced: Mapping[str, int], where: str, name: str) -> str:
    """Returns why a node cannot read the value `name`."""
    if name not in produced:
        return f"{where} reads {name!r}, which nothing computes"
    sorter = TopologicalSorter(
        {index: {produced[name] for name in node.input if name in produced} for index, node in enumerate(nodes)}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        ring = " -> ".join(_describe(nodes[index], index) for index in reversed(error.args[1]))
        return f"the graph has a cycle: {ring}"
    return f"{where} reads {name!r} before it is computed: sort the nodes, and save the model again"


def _describe(node: onnx.NodeProto, index: int) -> str:
    return f"node {node.name or index} ({node.op_type})"


def _constant(node: onnx.NodeProto) -> TensorProto | int | None:
    """Returns the value of a `Constant` node that is a tensor or an integer."""
    for attribute in node.attribute:
        if attribute.name == "value":
            return attribute.t
        if attribute.name == "value_int":
            return int(attribute.i)
        if attribute.name == "value_ints" and len(attribute.ints) == 1:
            return int(attribute.ints[0])
    return None


def _is_false(tensor: TensorProto) -> bool:
    one_bool = tensor.data_type == TensorProto.BOOL and math.prod(tensor.dims) == 1
    return one_bool and tensor.data_location != TensorProto.EXTERNAL and not numpy_helper.to_array(tensor).any()


def _trips(node: onnx.NodeProto, where: str, constants: Mapping[str, TensorProto | int]) -> int:
    """Returns the largest number of iterations of a `Loop`."""
    name = node.input[0] if node.input else ""
    if name not in constants:
        raise GraphError(f"{where} has no constant number of iterations, so that it may run without end")
    found = constants[name]
    if isinstance(found, int):
        return max(found, 0)
    whole = found.data_type in (TensorProto.INT64, TensorProto.INT32)
    if not whole or math.prod(found.dims) != 1 or found.data_location == TensorProto.EXTERNAL:
        raise GraphError(f"{where}: its number of iterations {name!r} is not one integer")
    return max(int(numpy_helper.to_array(found).reshape(())), 0)
