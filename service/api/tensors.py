"""Reads tensors of the Open Inference Protocol from requests, and writes them into answers.

A body with binary tensors begins with a JSON header. The length of the JSON header is in the request header
`Inference-Header-Content-Length`. The bytes of the binary tensors follow, in the order of the `inputs` in the JSON
header. A tensor is binary if its `parameters` have a `binary_data_size`. Numbers are little-endian. A BYTES value is
encoded as its length in 4 bytes, followed by its bytes.

All models have the same inputs and outputs. Only two sizes differ between models: V is the size of the vocabulary, and
K is the number of tokens in `top_ids` (see `listed`).

    inputs    tokens INT64 [-1, -1] | text BYTES [-1] | events BYTES [-1, -1];  lengths INT64 [-1]
    outputs   top_ids INT64 [-1, K], top_logprobs FP32 [-1, K], logits FP32 [-1, V], token_logprobs FP32 [-1, -1],
              error_bound FP32 [-1], top1_proved BOOL [-1], position INT64 [-1]

Every size in a request is compared with the number of received bytes before memory of that size is allocated. Each
error names the invalid tensor or header.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.responses import Response

from wane.service.api.encode import VALUES_AT_ONCE, json_bytes, made_in_turns, pieces, reply_in_pieces
from wane.service.api.schemas.inference import InputTensor
from wane.service.engine.engine import Engine
from wane.service.errors import InvalidRequest, truncate_repr
from wane.service.settings import Settings
from wane.service.types.cost import Cost

HEADER_LENGTH = "inference-header-content-length"
BINARY_TYPE = (b"content-type", b"application/octet-stream")
BINARY_SIZE, BINARY = "binary_data_size", "binary_data"
SHARED_MEMORY = "shared_memory_"
CLASSIFICATION = "classification"
CONTENT = "content_type"  # says how MLServer's clients convert a tensor, and changes nothing here
DIGITS = re.compile("[0-9]{1,15}")
LENGTH_BYTES = 4  # the number of bytes that encode the length of a BYTES value
DTYPES: Mapping[str, np.dtype[Any]] = {"INT64": np.dtype("<i8"), "FP32": np.dtype("<f4"), "BOOL": np.dtype("?")}

Datatype = Literal["INT64", "FP32", "BOOL", "BYTES"]


class TensorSpec(NamedTuple):
    """The datatype and the shape of a tensor in a signature. A dimension of -1 has any size."""

    datatype: Datatype
    shape: tuple[int, ...]


TOKENS, TEXT, EVENTS, LENGTHS = "tokens", "text", "events", "lengths"
INPUTS: Mapping[str, TensorSpec] = {
    TOKENS: TensorSpec("INT64", (-1, -1)),
    TEXT: TensorSpec("BYTES", (-1,)),
    EVENTS: TensorSpec("BYTES", (-1, -1)),
    LENGTHS: TensorSpec("INT64", (-1,)),
}
SOURCES = (TOKENS, TEXT, EVENTS)
"""The names of the input tensors that hold a sequence. A request has exactly one of these inputs."""

TOP_IDS, TOP_LOGPROBS, LOGITS, TOKEN_LOGPROBS = "top_ids", "top_logprobs", "logits", "token_logprobs"
ERROR_BOUND, TOP1_PROVED, POSITION = "error_bound", "top1_proved", "position"
DEFAULT_OUTPUTS = (TOP_IDS, TOP_LOGPROBS, ERROR_BOUND, POSITION)
PREDICTED = frozenset({TOP_IDS, TOP_LOGPROBS, LOGITS, ERROR_BOUND, TOP1_PROVED})
"""The outputs that need a prediction of the next token."""
OUTPUTS = PREDICTED | {TOKEN_LOGPROBS, POSITION}

MOST_LISTED = 16


def listed(engine: Engine, settings: Settings) -> int:
    """Returns K, the number of tokens in `top_ids`. K is the smallest of 16, the setting `top_k_limit`, and the size of
    the vocabulary. In a vocabulary of events, `<eos>` and `<unk>` do not count, because they are never listed."""
    vocabulary = engine.vocabulary
    return min(MOST_LISTED, vocabulary.size - len(vocabulary.unlisted), settings.top_k_limit)


def outputs(engine: Engine, settings: Settings) -> dict[str, TensorSpec]:
    """Returns the output tensors of a model, by name."""
    k = listed(engine, settings)
    return {
        TOP_IDS: TensorSpec("INT64", (-1, k)),
        TOP_LOGPROBS: TensorSpec("FP32", (-1, k)),
        LOGITS: TensorSpec("FP32", (-1, engine.vocabulary.size)),
        TOKEN_LOGPROBS: TensorSpec("FP32", (-1, -1)),
        ERROR_BOUND: TensorSpec("FP32", (-1,)),
        TOP1_PROVED: TensorSpec("BOOL", (-1,)),
        POSITION: TensorSpec("INT64", (-1,)),
    }


class Tensor(NamedTuple):
    """An input tensor. `values` are int64 of shape `shape`, or a flat list of texts."""

    shape: tuple[int, ...]
    values: NDArray[np.int64] | list[str]


# Bodies


def divided(raw: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    """Returns the JSON header and the binary part of a body. If `header_length` is None, the whole body is JSON. Raises
    InvalidRequest."""
    if header_length is None:
        return raw, memoryview(b"")
    if DIGITS.fullmatch(header_length) is None or int(header_length) == 0:
        raise InvalidRequest(
            f"{HEADER_LENGTH} must be a whole number of bytes, at least 1, not {truncate_repr(header_length)}",
            HEADER_LENGTH,
        )
    length = int(header_length)
    if length > len(raw):
        raise InvalidRequest(f"{HEADER_LENGTH} is {length}, but the body has {len(raw)} bytes", HEADER_LENGTH)
    return raw[:length], memoryview(raw)[length:]


# Inputs


def read_tensors(inputs: Sequence[InputTensor], binary: memoryview) -> dict[str, Tensor]:
    """Returns the input tensors by name. `binary` is the binary part of the body. Raises InvalidRequest."""
    tensors: dict[str, Tensor] = {}
    for tensor in inputs:
        name = tensor.name
        spec = INPUTS.get(name)
        if spec is None:
            there = ", ".join(INPUTS)
            raise InvalidRequest(f"there is no input {truncate_repr(name)}; there are {there}", "inputs")
        if name in tensors:
            raise InvalidRequest(f"input {name} is given twice", name)
        shape = _shape(tensor, spec)
        size = _binary_size(tensor)
        if size is None:
            tensors[name] = Tensor(shape, _of_json(tensor, spec, shape))
            continue
        if tensor.data is not None:
            raise InvalidRequest(f"{name} has both data and {BINARY_SIZE}; give one of them", name)
        if size > len(binary):
            raise InvalidRequest(f"{name}: {BINARY_SIZE} is {size}, but {len(binary)} bytes of the body are left", name)
        tensors[name] = Tensor(shape, _of_binary(name, spec, shape, binary[:size]))
        binary = binary[size:]
    if len(binary):
        raise InvalidRequest(f"the body has {len(binary)} bytes after the last tensor", "inputs")
    return tensors


def _shape(tensor: InputTensor, spec: TensorSpec) -> tuple[int, ...]:
    name = tensor.name
    if tensor.datatype != spec.datatype:
        raise InvalidRequest(f"{name} has datatype {truncate_repr(tensor.datatype)}, but must be {spec.datatype}", name)
    is_column = len(spec.shape) == 1 and len(tensor.shape) == 2 and tensor.shape[1] == 1  # as some clients write a list
    if len(tensor.shape) != len(spec.shape) and not is_column:
        raise InvalidRequest(f"{name} has {len(tensor.shape)} dimensions, but must have {len(spec.shape)}", name)
    for size in tensor.shape:
        if type(size) is not int:
            raise InvalidRequest(f"{name}: shape holds {truncate_repr(size)}, but must hold whole numbers", name)
        if size < 0:
            raise InvalidRequest(f"{name}: shape holds {truncate_repr(size)}, which is negative", name)
        if size == 0:
            raise InvalidRequest(f"{name} is empty: its shape is {tensor.shape}", name)
        if size > 2**63 - 1:
            raise InvalidRequest(f"{name}: shape holds {truncate_repr(size)}, which exceeds the body's length", name)
    return tuple(tensor.shape[: len(spec.shape)])


def _check_parameters(name: str, parameters: Mapping[str, Any], known: str) -> None:
    """Raises InvalidRequest if a tensor has another parameter than `known` and `content_type`."""
    for parameter in parameters:
        if parameter.startswith(SHARED_MEMORY):
            raise InvalidRequest(f"{name}: shared memory is not supported ({parameter})", name)
        if parameter not in (known, CONTENT):
            raise InvalidRequest(f"{name}: there is no parameter {truncate_repr(parameter)}", name)


def _binary_size(tensor: InputTensor) -> int | None:
    """Returns an input's number of bytes in the binary part, or None if the input's values are in the JSON."""
    name = tensor.name
    _check_parameters(name, tensor.parameters, BINARY_SIZE)
    size = tensor.parameters.get(BINARY_SIZE)
    if size is None:
        return None
    if type(size) is not int:
        raise InvalidRequest(f"{name}: {BINARY_SIZE} must be a whole number, not {truncate_repr(size)}", name)
    if size < 0:
        raise InvalidRequest(f"{name}: {BINARY_SIZE} is {truncate_repr(size)}, which is negative", name)
    return size


def _of_binary(
    name: str, spec: TensorSpec, shape: tuple[int, ...], binary: memoryview
) -> NDArray[np.int64] | list[str]:
    count = math.prod(shape)
    if spec.datatype == "BYTES":
        return _texts(name, count, binary)
    dtype = DTYPES[spec.datatype]
    if len(binary) != count * dtype.itemsize:
        raise InvalidRequest(
            f"{name}: {BINARY_SIZE} is {len(binary)}, but shape {[*shape]} of {spec.datatype} takes "
            f"{count * dtype.itemsize} bytes",
            name,
        )
    numbers: NDArray[np.int64] = np.frombuffer(binary, dtype).reshape(shape)
    return numbers


def _texts(name: str, count: int, binary: memoryview) -> list[str]:
    if count * LENGTH_BYTES > len(binary):
        raise InvalidRequest(
            f"{name}: {BINARY_SIZE} is {len(binary)}, but {count} values of BYTES take at least "
            f"{count * LENGTH_BYTES} bytes",
            name,
        )
    texts: list[str] = []
    place = 0
    for index in range(count):
        start = place + LENGTH_BYTES
        place = start + int.from_bytes(binary[place:start], "little")
        if start > len(binary) or place > len(binary):
            raise InvalidRequest(f"{name}: value {index} ends beyond the tensor's {BINARY_SIZE} of {len(binary)}", name)
        try:
            texts.append(str(binary[start:place], "utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{name}: value {index} is not UTF-8: {error.reason}", name) from error
    if place != len(binary):
        raise InvalidRequest(
            f"{name}: {BINARY_SIZE} is {len(binary)}, but the tensor's {count} values take {place} bytes", name
        )
    return texts


def _of_json(tensor: InputTensor, spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[np.int64] | list[str]:
    name, data = tensor.name, tensor.data
    if data is None:
        raise InvalidRequest(f"{name} has neither data nor {BINARY_SIZE}", name)
    if len(tensor.shape) == 2 and data and type(data[0]) is list:
        if len(data) != shape[0] or any(type(row) is not list or len(row) != tensor.shape[1] for row in data):
            raise InvalidRequest(f"{name}: data is not nested like shape {tensor.shape}", name)
        data = [value for row in data for value in row]
    if len(data) != math.prod(shape):
        raise InvalidRequest(f"{name}: data has {len(data)} values, but shape {[*shape]} has {math.prod(shape)}", name)
    kind, what = (str, "texts") if spec.datatype == "BYTES" else (int, "whole numbers")
    if set(map(type, data)) != {kind}:
        wrong = next(value for value in data if type(value) is not kind)
        raise InvalidRequest(f"{name}: data holds {truncate_repr(wrong)}, but must hold {what}", name)
    if spec.datatype == "BYTES":
        return data
    try:
        return np.array(data, np.int64).reshape(shape)
    except OverflowError:
        wrong = next(value for value in data if not -(2**63) <= value < 2**63)
        raise InvalidRequest(f"{name}: {truncate_repr(wrong)} is out of the range of INT64", name) from None


# Outputs


def of_outputs(rows: int, widths: Iterable[tuple[int, bool]]) -> Cost:
    """Returns the cost of an inference's answer. widths: for each output, the number of its values in a row, and
    whether they are binary."""
    sizes = [width * (BINARY_BYTES if is_binary else JSON_BYTES) for width, is_binary in widths]
    return Cost(rows, answer_bytes=rows * sum(sizes))


BINARY_BYTES, JSON_BYTES = 4, 12
"""The bytes of a float32 in an answer: in a binary tensor, and about, with a comma, in JSON."""


Rows = NDArray[Any] | Sequence[NDArray[Any]]
"""The values of an output: an array, or its rows, which may be large and are not copied into one array."""


class OutputFormat(NamedTuple):
    """The name of a requested output, and whether its values are sent in the binary part of the answer."""

    name: str
    binary: bool


def output_format(name: str, parameters: Mapping[str, Any], *, binary: bool) -> OutputFormat:
    """Returns the format of a requested output. `binary` says whether the request's outputs are binary by default.
    Raises InvalidRequest."""
    if CLASSIFICATION in parameters:
        raise InvalidRequest(f"{name}: classification is not supported; ask for top_ids and top_logprobs", name)
    _check_parameters(name, parameters, BINARY)
    value = parameters.get(BINARY)
    if value is None:
        return OutputFormat(name, binary)
    if type(value) is not bool:
        raise InvalidRequest(f"{name}: {BINARY} must be true or false, not {truncate_repr(value)}", name)
    return OutputFormat(name, value)


async def reply(head: Mapping[str, object], wanted: Sequence[OutputFormat], values: Mapping[str, Rows]) -> Response:
    """Returns the response with the outputs in the order of `wanted`. `head` has the other fields of the answer. A long
    response is encoded and sent in pieces."""
    binary = [values[name] for name, is_binary in wanted if is_binary]
    made = _header(head, wanted, values)
    if not binary:
        return await reply_in_pieces(made)
    header = await made_in_turns(made)
    headers = [BINARY_TYPE, (HEADER_LENGTH.encode(), b"%d" % sum(map(len, header)))]
    return await reply_in_pieces(chain(header, *map(_bytes, binary)), headers)


def _header(head: Mapping[str, object], wanted: Sequence[OutputFormat], values: Mapping[str, Rows]) -> Iterator[bytes]:
    """Yields the JSON of an answer in pieces."""
    yield b"{"
    for name, value in head.items():
        yield json_bytes(name) + b":"
        yield from pieces(value)
        yield b","
    yield b'"outputs":['
    for number, (name, is_binary) in enumerate(wanted):
        rows = values[name]
        datatype = DATATYPES[rows[0].dtype.kind]
        shape = (len(rows), *rows[0].shape)
        document: dict[str, object] = {"name": name, "datatype": datatype, "shape": shape}
        if is_binary:
            document["parameters"] = {BINARY_SIZE: math.prod(shape) * DTYPES[datatype].itemsize}
        about = json_bytes(document)
        yield (b"," if number else b"") + (about if is_binary else about[:-1] + b',"data":[')
        if not is_binary:
            for place, piece in enumerate(_slices(rows)):
                values_json = orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]  # NaN is null
                yield (b"," if place else b"") + values_json
            yield b"]}"
    yield b"]}"


def _slices(rows: Rows) -> Iterator[NDArray[Any]]:
    """Yields the values of an output in row-major order, VALUES_AT_ONCE at a time or fewer."""
    for flat in [rows.reshape(-1)] if isinstance(rows, np.ndarray) else rows:
        for start in range(0, len(flat), VALUES_AT_ONCE):
            yield np.ascontiguousarray(flat[start : start + VALUES_AT_ONCE])


def _bytes(rows: Rows) -> Iterator[bytes]:
    """Yields the bytes of a binary output in pieces."""
    for piece in _slices(rows):
        yield piece.astype(DTYPES[DATATYPES[piece.dtype.kind]], copy=False).tobytes()


DATATYPES = {"i": "INT64", "f": "FP32", "b": "BOOL"}
