"""Reads tensors of the Open Inference Protocol from requests, and writes them into answers.

A body with binary tensors begins with a JSON header. The length of the JSON header is in the request header
`Inference-Header-Content-Length`. The bytes of the binary tensors follow, in the order of the `inputs` in the JSON
header. A tensor is binary if its `parameters` have a `binary_data_size`. Numbers are little-endian. A BYTES value is
encoded as its length in 4 bytes, followed by its bytes.

Every size in a request is compared with the number of received bytes before memory of that size is allocated. Each
error names the invalid tensor or header.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
from msgspec import Raw
from numpy.typing import NDArray

from wane.service.api.encode import CONTENT_TYPE, VALUES_AT_ONCE, Reply, json_bytes
from wane.service.api.schemas.inference import InputTensor
from wane.service.errors import InvalidRequest, TooLarge, UnsupportedMedia, truncate_repr

HEADER_LENGTH = "inference-header-content-length"
ENCODING = "content-encoding"
BINARY_TYPE = (b"content-type", b"application/octet-stream")
BINARY_SIZE, BINARY = "binary_data_size", "binary_data"
SHARED_MEMORY = "shared_memory_"
CLASSIFICATION = "classification"
DIGITS = re.compile("[0-9]{1,15}")
LENGTH_BYTES = 4  # the number of bytes that encode the length of a BYTES value
DTYPES: Mapping[str, np.dtype[Any]] = {"INT64": np.dtype("<i8"), "FP32": np.dtype("<f4"), "BOOL": np.dtype("?")}
WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # values of zlib's `wbits` for the gzip format and the zlib format

Datatype = Literal["INT64", "FP32", "BOOL", "BYTES"]


class TensorSpec(NamedTuple):
    """The datatype and the shape of a tensor in a signature. A dimension of -1 has any size."""

    datatype: Datatype
    shape: tuple[int, ...]


class Tensor(NamedTuple):
    """An input tensor. `values` are int64 of shape `shape`, or a flat list of texts."""

    shape: tuple[int, ...]
    values: NDArray[np.int64] | list[str]


# Bodies


def inflated(raw: bytes, encoding: str, most: int) -> bytes:
    """Decompresses a body with a `Content-Encoding`. Raises UnsupportedMedia for an unknown encoding, InvalidRequest
    for a damaged body, and TooLarge for more than `most` bytes."""
    wbits = WBITS.get(encoding.strip().lower())
    if wbits is None:
        raise UnsupportedMedia(
            f"content-encoding {truncate_repr(encoding)} is not supported; the server accepts gzip and deflate"
        )
    inflater = zlib.decompressobj(wbits)
    try:
        body = inflater.decompress(raw, most + 1)
    except zlib.error as error:
        raise InvalidRequest(
            f"content-encoding is {encoding}, but the body is not valid {encoding}: {error}", ENCODING
        ) from error
    if len(body) > most:
        raise TooLarge(f"the decompressed body is too long; at most {most} bytes are accepted")
    if not inflater.eof:
        raise InvalidRequest(f"content-encoding is {encoding}, but the {encoding} data is incomplete", ENCODING)
    if inflater.unused_data:
        raise InvalidRequest(
            f"content-encoding is {encoding}, but the body has bytes after the {encoding} data", ENCODING
        )
    return body


def is_encoded(encoding: str | None) -> bool:
    """Returns whether a body with this `Content-Encoding` must be decompressed."""
    return encoding is not None and encoding.strip().lower() not in ("", "identity")


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


def read_tensors(
    inputs: Sequence[InputTensor], binary: memoryview, specs: Mapping[str, TensorSpec]
) -> dict[str, Tensor]:
    """Returns the input tensors by name. `binary` is the binary part of the body. Raises InvalidRequest."""
    found: dict[str, Tensor] = {}
    for given in inputs:
        name = given.name
        spec = specs.get(name)
        if spec is None:
            there = ", ".join(specs)
            raise InvalidRequest(f"there is no input {truncate_repr(name)}; there are {there}", "inputs")
        if name in found:
            raise InvalidRequest(f"input {name} is given twice", name)
        shape = _shape(given, spec)
        size = _binary_size(given)
        if size is None:
            found[name] = Tensor(shape, _of_json(given, spec, shape))
            continue
        if given.data is not None:
            raise InvalidRequest(f"{name} has both data and {BINARY_SIZE}; give one of them", name)
        if size > len(binary):
            raise InvalidRequest(f"{name}: {BINARY_SIZE} is {size}, but {len(binary)} bytes of the body are left", name)
        found[name] = Tensor(shape, _of_binary(name, spec, shape, binary[:size]))
        binary = binary[size:]
    if len(binary):
        raise InvalidRequest(f"the body has {len(binary)} bytes after the last tensor", "inputs")
    return found


def _shape(given: InputTensor, spec: TensorSpec) -> tuple[int, ...]:
    name = given.name
    if given.datatype != spec.datatype:
        raise InvalidRequest(f"{name} has datatype {truncate_repr(given.datatype)}, but must be {spec.datatype}", name)
    if len(given.shape) != len(spec.shape):
        raise InvalidRequest(f"{name} has {len(given.shape)} dimensions, but must have {len(spec.shape)}", name)
    for size in given.shape:
        if type(size) is not int:
            raise InvalidRequest(f"{name}: shape holds {truncate_repr(size)}, but must hold whole numbers", name)
        if size < 0:
            raise InvalidRequest(f"{name}: shape holds {truncate_repr(size)}, which is negative", name)
        if size == 0:
            raise InvalidRequest(f"{name} is empty: its shape is {given.shape}", name)
        if size > 2**63 - 1:
            raise InvalidRequest(f"{name}: shape holds {truncate_repr(size)}, which exceeds the body's length", name)
    return tuple(given.shape)


def _binary_size(given: InputTensor) -> int | None:
    """Returns an input's number of bytes in the binary part, or None if the input's values are in the JSON."""
    name = given.name
    for parameter in given.parameters:
        if parameter.startswith(SHARED_MEMORY):
            raise InvalidRequest(f"{name}: shared memory is not supported ({parameter})", name)
        if parameter != BINARY_SIZE:
            raise InvalidRequest(f"{name}: there is no parameter {truncate_repr(parameter)}", name)
    if BINARY_SIZE not in given.parameters:
        return None
    size = given.parameters[BINARY_SIZE]
    if type(size) is not int:
        raise InvalidRequest(f"{name}: {BINARY_SIZE} must be a whole number, not {truncate_repr(size)}", name)
    if size < 0:
        raise InvalidRequest(f"{name}: {BINARY_SIZE} is {truncate_repr(size)}, which is negative", name)
    return size


def _of_binary(
    name: str, spec: TensorSpec, shape: tuple[int, ...], binary: memoryview
) -> NDArray[np.int64] | list[str]:
    count = _product(shape)
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


def _of_json(given: InputTensor, spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[np.int64] | list[str]:
    name, data = given.name, given.data
    if data is None:
        raise InvalidRequest(f"{name} has neither data nor {BINARY_SIZE}", name)
    if len(shape) == 2 and data and type(data[0]) is list:
        if len(data) != shape[0] or any(type(row) is not list or len(row) != shape[1] for row in data):
            raise InvalidRequest(f"{name}: data is not nested like shape {[*shape]}", name)
        data = [value for row in data for value in row]
    if len(data) != _product(shape):
        raise InvalidRequest(f"{name}: data has {len(data)} values, but shape {[*shape]} has {_product(shape)}", name)
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


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


# Outputs


class OutputFormat(NamedTuple):
    """The name of a requested output, and whether its values are sent in the binary part of the answer."""

    name: str
    binary: bool


def output_format(name: str, parameters: Mapping[str, Any], *, binary: bool) -> OutputFormat:
    """Returns the format of a requested output. `binary` says whether the request's outputs are binary by default.
    Raises InvalidRequest."""
    for parameter, value in parameters.items():
        if parameter.startswith(SHARED_MEMORY):
            raise InvalidRequest(f"{name}: shared memory is not supported ({parameter})", name)
        if parameter == CLASSIFICATION:
            raise InvalidRequest(f"{name}: classification is not supported; ask for top_ids and top_logprobs", name)
        if parameter != BINARY:
            raise InvalidRequest(f"{name}: there is no parameter {truncate_repr(parameter)}", name)
        if type(value) is not bool:
            raise InvalidRequest(f"{name}: {BINARY} must be true or false, not {truncate_repr(value)}", name)
        binary = value
    return OutputFormat(name, binary)


async def reply(
    head: Mapping[str, object], wanted: Sequence[OutputFormat], values: Mapping[str, NDArray[Any]]
) -> Reply:
    """Returns the response with the outputs in the order of `wanted`. `head` has the other fields of the answer.
    Encodes a long output in pieces, and lets the event loop run other work between two pieces."""
    outputs: list[dict[str, object]] = []
    binary: list[bytes] = []
    for name, is_binary in wanted:
        array = values[name]
        datatype = DATATYPES[array.dtype.kind]
        document: dict[str, object] = {"name": name, "datatype": datatype, "shape": array.shape}
        if is_binary:
            binary.append(array.astype(DTYPES[datatype], copy=False).tobytes())
            document["parameters"] = {BINARY_SIZE: len(binary[-1])}
        else:
            document["data"] = Raw(await _json(array))
        outputs.append(document)
    header = json_bytes({**head, "outputs": outputs})
    if not binary:
        return Reply(header)
    answer = Reply(b"".join((header, *binary)), headers={HEADER_LENGTH: str(len(header))})
    answer.raw_headers[answer.raw_headers.index(CONTENT_TYPE)] = BINARY_TYPE
    return answer


DATATYPES = {"i": "INT64", "f": "FP32", "b": "BOOL"}


async def _json(array: NDArray[Any]) -> bytes:
    """Returns the values as a flat JSON list, in which NaN is null."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if len(flat) <= VALUES_AT_ONCE:
        return orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)
    parts: list[bytes] = []
    for start in range(0, len(flat), VALUES_AT_ONCE):
        await asyncio.sleep(0)
        parts.append(orjson.dumps(flat[start : start + VALUES_AT_ONCE], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])
    return b"[" + b",".join(parts) + b"]"
