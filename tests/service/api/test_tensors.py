"""Tests of the tensors of the Open Inference Protocol. Each error must name the tensor or the header at fault."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import numpy as np
import pytest

from wane.service.api.encode import CHARACTERS, VALUES_AT_ONCE, LongReply
from wane.service.api.schemas.inference import InputTensor
from wane.service.api.tensors import (
    HEADER_LENGTH,
    OutputFormat,
    Rows,
    Tensor,
    divided,
    output_format,
    read_tensors,
    reply,
)
from wane.service.errors import InvalidRequest

INT64 = struct.Struct("<q")


def numbers(*values: int) -> bytes:
    return b"".join(map(INT64.pack, values))


def texts(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def tensor(name: str = "tokens", shape: Any = (1, 2), datatype: str = "INT64", **given: Any) -> InputTensor:
    return InputTensor(name=name, shape=[*shape], datatype=datatype, **given)


def binary(size: Any, **given: Any) -> InputTensor:
    return tensor(parameters={"binary_data_size": size}, **given)


def read(*inputs: InputTensor, body: bytes = b"") -> dict[str, Tensor]:
    return read_tensors(inputs, memoryview(body))


def values(found: Tensor) -> list[Any]:
    return found.values if isinstance(found.values, list) else found.values.tolist()


@pytest.mark.parametrize("data", [[5, 6, 7, 8, 9, 10], [[5, 6, 7], [8, 9, 10]]], ids=["flat", "nested"])
def test_json_data_is_flat_or_nested(data: list[Any]) -> None:
    assert values(read(tensor(shape=(2, 3), data=data))["tokens"]) == [[5, 6, 7], [8, 9, 10]]


def test_binary_data_is_little_endian() -> None:
    assert values(read(binary(16), body=numbers(5, -(2**63)))["tokens"]) == [[5, -(2**63)]]


def test_binary_tensors_follow_each_other_in_the_order_of_the_inputs() -> None:
    lengths = binary(8, name="lengths", shape=(1,))
    found = read(lengths, binary(16), body=numbers(2, 5, 6))
    assert values(found["lengths"]) == [2] and values(found["tokens"]) == [[5, 6]]


def test_each_tensor_is_binary_or_json_on_its_own() -> None:
    found = read(tensor(name="lengths", shape=(1,), data=[1]), binary(16), body=numbers(5, 6))
    assert values(found["lengths"]) == [1] and values(found["tokens"]) == [[5, 6]]


def test_texts_are_read_from_both() -> None:
    body = texts("é\n".encode(), b"")
    size = {"binary_data_size": len(body)}
    for given in (tensor("text", (2,), "BYTES", data=["é\n", ""]), tensor("text", (2,), "BYTES", parameters=size)):
        assert values(read(given, body=body if given.parameters else b"")["text"]) == ["é\n", ""]


BAD: dict[str, tuple[InputTensor, bytes, str]] = {
    "a wrong name": (tensor("token", data=[1, 2]), b"", "there is no input 'token'; there are tokens, text"),
    "a wrong datatype": (tensor(datatype="INT32", data=[1, 2]), b"", "tokens has datatype 'INT32', but must be INT64"),
    "a wrong rank": (tensor(shape=(2,), data=[1, 2]), b"", "tokens has 1 dimensions, but must have 2"),
    "no rank": (tensor(shape=(), data=[1]), b"", "tokens has 0 dimensions"),
    "an empty batch": (tensor(shape=(0, 2), data=[]), b"", "tokens is empty"),
    "an empty sequence": (binary(0, shape=(2, 0)), b"", "tokens is empty"),
    "a negative dimension": (tensor(shape=(-1, 2), data=[]), b"", "tokens: shape holds -1, which is negative"),
    "a dimension that is no number": (tensor(shape=("1", 2), data=[]), b"", "tokens: shape holds '1'"),
    "a dimension that is a bool": (tensor(shape=(True, 2), data=[1, 2]), b"", "tokens: shape holds True"),
    "a dimension that is a float": (tensor(shape=(1.0, 2), data=[1, 2]), b"", "tokens: shape holds 1.0"),
    "a huge dimension": (tensor(shape=(10**30, 2), data=[1]), b"", "exceeds the body"),
    "a product of dimensions that exceeds the data": (
        tensor(shape=(2**62, 2**62), data=[1]),
        b"",
        "tokens: data has 1 values, but shape",
    ),
    "a product of dimensions that exceeds the body": (binary(8, shape=(2**62, 2**62)), numbers(1), "takes"),
    "no data": (tensor(), b"", "tokens has neither data nor binary_data_size"),
    "data twice": (binary(16, data=[1, 2]), numbers(1, 2), "tokens has both data and binary_data_size"),
    "too much data": (tensor(data=[1, 2, 3]), b"", "tokens: data has 3 values"),
    "too little data": (tensor(data=[1]), b"", "tokens: data has 1 values"),
    "ragged data": (tensor(shape=(2, 2), data=[[1, 2], [3]]), b"", "tokens: data is not nested like shape"),
    "half nested data": (tensor(shape=(2, 1), data=[[1], 2]), b"", "tokens: data is not nested"),
    "data nested too deep": (
        tensor(shape=(1, 1), data=[[[1]]]),
        b"",
        "tokens: data holds [1], but must hold whole numbers",
    ),
    "data of floats": (tensor(data=[1, 2.0]), b"", "tokens: data holds 2.0, but must hold whole numbers"),
    "NaN": (tensor(data=[1, float("nan")]), b"", "tokens: data holds nan"),
    "data of bools": (tensor(data=[1, True]), b"", "tokens: data holds True"),
    "data of null": (tensor(data=[1, None]), b"", "tokens: data holds None"),
    "data of texts": (tensor(data=[1, "2"]), b"", "tokens: data holds '2'"),
    "texts of numbers": (tensor("text", (1,), "BYTES", data=[5]), b"", "text: data holds 5, but must hold texts"),
    "a number of more than 64 bits": (tensor(data=[1, 2**63]), b"", "out of the range of INT64"),
    "a binary_data_size that is no number": (
        binary("16"),
        numbers(1, 2),
        "tokens: binary_data_size must be a whole number, not '16'",
    ),
    "a binary_data_size that is a float": (binary(16.0), numbers(1, 2), "must be a whole number, not 16.0"),
    "a binary_data_size that is a bool": (binary(True), numbers(1, 2), "must be a whole number, not True"),
    "a binary_data_size that is a text": (binary("16"), numbers(1, 2), "must be a whole number, not '16'"),
    "a negative binary_data_size": (binary(-16), numbers(1, 2), "tokens: binary_data_size is -16, which is negative"),
    "a binary_data_size that does not fit the shape": (binary(8), numbers(1), "of INT64 takes 16 bytes"),
    "a binary_data_size that exceeds the body": (binary(24), numbers(1, 2), "but 16 bytes of the body are left"),
    "a huge binary_data_size": (binary(10**30), b"", "but 0 bytes of the body are left"),
    "bytes left over": (binary(16), numbers(1, 2, 3), "the body has 8 bytes after the last tensor"),
    "bytes without a tensor": (tensor(data=[1, 2]), b"x", "the body has 1 bytes after the last tensor"),
    "an input in shared memory": (
        tensor(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 8}),
        b"",
        "tokens: shared memory is not supported",
    ),
    "an unknown parameter": (tensor(parameters={"kind": "x"}, data=[1, 2]), b"", "no parameter 'kind'"),
    "a text without its length": (
        tensor("text", (2,), "BYTES", parameters={"binary_data_size": 7}),
        texts(b"abc"),
        "text: binary_data_size is 7, but 2 values of BYTES take at least 8 bytes",
    ),
    "a text that ends beyond its size": (
        tensor("text", (1,), "BYTES", parameters={"binary_data_size": 5}),
        struct.pack("<I", 2**32 - 1) + b"a",
        "text: value 0 ends beyond the tensor's binary_data_size of 5",
    ),
    "a second text that ends beyond its size": (
        tensor("text", (2,), "BYTES", parameters={"binary_data_size": 9}),
        texts(b"abc") + b"\0\0",
        "text: value 1 ends beyond the tensor's binary_data_size of 9",
    ),
    "bytes after the texts": (
        tensor("text", (1,), "BYTES", parameters={"binary_data_size": 6}),
        texts(b"a") + b"b",
        "text: binary_data_size is 6, but the tensor's 1 values take 5 bytes",
    ),
    "a text that is not UTF-8": (
        tensor("text", (1,), "BYTES", parameters={"binary_data_size": 5}),
        texts(b"\xff"),
        "text: value 0 is not UTF-8",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_tensor_is_refused_by_name(name: str) -> None:
    given, body, said = BAD[name]
    with pytest.raises(InvalidRequest) as caught:
        read(given, body=body)
    assert said in caught.value.message, caught.value.message
    assert len(caught.value.message) < 250


def test_an_input_given_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="input tokens is given twice"):
        read(tensor(data=[1, 2]), tensor(data=[1, 2]))


# Headers


def test_the_header_length_divides_the_body() -> None:
    head, rest = divided(b"{}abc", "2")
    assert (head, bytes(rest)) == (b"{}", b"abc")
    head, rest = divided(b"{}", None)
    assert (head, bytes(rest)) == (b"{}", b"")


@pytest.mark.parametrize("given", ["", "0", "-1", "+2", "2.0", "two", " 2", "2 ", "1" * 30, "٢"])
def test_an_invalid_header_length_is_refused(given: str) -> None:
    with pytest.raises(InvalidRequest, match="inference-header-content-length must be a whole number"):
        divided(b"{}", given)


def test_a_header_length_that_exceeds_the_body_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="inference-header-content-length is 3, but the body has 2 bytes"):
        divided(b"{}", "3")


# Encodings


# Outputs


def test_an_output_s_format_overrides_the_default() -> None:
    assert output_format("logits", {}, binary=True) == OutputFormat("logits", True)
    assert output_format("logits", {"binary_data": False}, binary=True) == OutputFormat("logits", False)
    assert output_format("logits", {"binary_data": True}, binary=False) == OutputFormat("logits", True)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"classification": 3}, "logits: classification is not supported"),
        ({"shared_memory_region": "r"}, "logits: shared memory is not supported"),
        ({"binary_data": 1}, "logits: binary_data must be true or false, not 1"),
        ({"other": 1}, "logits: there is no parameter 'other'"),
    ],
)
def test_a_bad_parameter_of_an_output_is_refused(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        output_format("logits", parameters, binary=False)
    assert said in caught.value.message


async def test_a_long_output_is_encoded_in_pieces() -> None:
    array = np.arange(100_000, dtype=np.float32)
    array[50_000] = np.nan
    answer = await reply({"model_name": "m"}, [OutputFormat("logits", False)], {"logits": array})
    assert bytes(answer.body).count(b",") > 99_999 and b"49999.0,null,50001.0" in bytes(answer.body)


async def test_a_long_header_before_binary_outputs_is_made_in_many_turns_of_the_event_loop() -> None:
    turns, seen = 0, set[int]()

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    class Row(np.ndarray[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            seen.add(turns)
            return np.asarray(self)[key]

    logits = [np.arange(100_000, dtype=np.float32).view(Row)] * 4
    working = asyncio.create_task(others())
    arrays: dict[str, Rows] = {"logits": logits, "c": np.array([1.5], np.float32)}
    answer = await reply({}, [OutputFormat("logits", False), OutputFormat("c", True)], arrays)
    working.cancel()
    length = int(dict(answer.raw_headers)[HEADER_LENGTH.encode()])
    assert length > 2**21 and len(seen) >= 10


async def test_a_long_text_in_the_head_of_an_answer_is_encoded_in_pieces() -> None:
    head = {"model_name": "m", "parameters": {"unknown": '"' * 2**22}}
    arrays = {"c": np.array([1.5], np.float32)}
    answer = await reply(head, [OutputFormat("c", False)], arrays)
    assert isinstance(answer, LongReply)
    made = [*answer._begun, *answer._rest]
    assert max(map(len, made)) <= 2 * VALUES_AT_ONCE * CHARACTERS
    assert json.loads(b"".join(made))["parameters"] == head["parameters"]


async def test_binary_outputs_follow_the_header_in_order() -> None:
    arrays = {"a": np.array([1, 2], np.int64), "b": np.array([True]), "c": np.array([1.5], np.float32)}
    answer = await reply({}, [OutputFormat(name, True) for name in "cab"], arrays)
    headers = dict(answer.raw_headers)
    length = int(headers[HEADER_LENGTH.encode()])
    assert answer.body[length:] == struct.pack("<f", 1.5) + numbers(1, 2) + b"\1"
    assert headers[b"content-type"] == b"application/octet-stream"
    assert int(headers[b"content-length"]) == len(answer.body)
