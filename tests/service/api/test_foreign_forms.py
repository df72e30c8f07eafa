"""Tests of requests as other programs write them: compressed, with a byte-order mark, with nulls, and with fields of
other servers."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.service.engine_harness import name_vocabulary
from tests.service.fake_engine import MANIFEST
from tests.service.net.test_receive_budget import BODY_BYTES, BUDGET, filled
from tests.service.slow_client import dialogue, serving
from wane.service.api.body import MOST_MEMBERS, inflated
from wane.service.api.encode import event
from wane.service.engine.event_names import EventNames
from wane.service.errors import InvalidRequest, TooLarge
from wane.service.settings import Settings
from wane.service.types.body import SESSION_ID, anchored
from wane.service.types.predict import PredictBody
from wane.service.types.request import is_session_id

PREDICT: dict[str, object] = {"tokens": [5], "top_k": 1}
TENSOR: dict[str, object] = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["The"]}
INFER = "/v2/models/rnn-stable/infer"
BODIES: list[tuple[str, dict[str, object]]] = [
    ("/v1/predict", PREDICT),
    ("/v1/score", {"tokens": [5, 6]}),
    ("/v1/sessions", {"mode": "recurrent"}),
    ("/v1/completions", {"model": "rnn-stable", "prompt": [5], "max_tokens": 1}),
    (INFER, {"inputs": [TENSOR]}),
]


def compressed(body: object, encoding: str) -> bytes:
    data = json.dumps(body).encode()
    return zlib.compress(data) if encoding == "deflate" else gzip.compress(data)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "x-gzip"])
@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_a_compressed_body_is_read_on_every_route(
    http: httpx.Client, path: str, body: dict[str, object], encoding: str
) -> None:
    content = compressed(body, encoding)
    assert http.post(path, content=content, headers={"content-encoding": encoding}).is_success
    parts = http.post(path, content=iter([content[:9], content[9:]]), headers={"content-encoding": encoding})
    assert parts.is_success, parts.text


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_a_body_in_an_unknown_encoding_is_415(http: httpx.Client, path: str, body: dict[str, object]) -> None:
    response = http.post(path, json=body, headers={"content-encoding": "br"})
    assert response.status_code == 415 and "gzip" in response.text
    assert http.post(path, json=body, headers={"content-encoding": "identity"}).is_success


@pytest.mark.parametrize(
    "raw",
    [b"abc", gzip.compress(b"{}")[:-1], gzip.compress(b"{}") + b"x", gzip.compress(b" ") + gzip.compress(b"{}")[:-1]],
    ids=["no gzip", "cut", "with bytes after its end", "cut in the second member"],
)
@pytest.mark.parametrize("path", ["/v1/predict", INFER])
def test_a_damaged_body_is_refused_with_the_reason(http: httpx.Client, path: str, raw: bytes) -> None:
    response = http.post(path, content=raw, headers={"content-encoding": "gzip"})
    assert response.status_code in (400, 422) and "content-encoding is gzip" in response.text


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_a_gzip_body_may_have_several_members(
    http: httpx.Client, path: str, body: dict[str, object], size: int
) -> None:
    data = json.dumps(body).encode()
    members = b"".join(gzip.compress(data[start : start + size]) for start in range(0, len(data), size))
    response = http.post(path, content=members + gzip.compress(b""), headers={"content-encoding": "gzip"})
    assert response.is_success, response.text


def test_the_members_of_a_body_are_limited_together() -> None:
    members = gzip.compress(bytes(600)) * 2
    assert inflated(members, "gzip", 1200) == bytes(1200)
    with pytest.raises(TooLarge, match="1199 bytes"):
        inflated(members, "gzip", 1199)
    with pytest.raises(InvalidRequest, match="bytes after"):
        inflated(zlib.compress(b"a") * 2, "deflate", 1200)
    with pytest.raises(InvalidRequest, match=f"more than {MOST_MEMBERS} members"):
        inflated(gzip.compress(b"") * (MOST_MEMBERS + 1), "gzip", 1200)


@pytest.mark.parametrize(
    "encodings", [("gzip", "identity"), ("identity", "gzip"), ("gzip", "gzip"), ("identity", "identity")], ids=str
)
@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_two_encodings_of_a_body_are_refused(
    http: httpx.Client, path: str, body: dict[str, object], encodings: tuple[str, str]
) -> None:
    headers = [("content-encoding", encoding) for encoding in encodings]
    response = http.post(path, content=compressed(body, "gzip"), headers=headers)
    assert response.status_code == 415 and ", ".join(encodings) in response.text


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/sessions", INFER])
def test_a_decompressed_body_over_the_limit_is_413(http: httpx.Client, path: str) -> None:
    bomb = gzip.compress(bytes(2**26))
    response = http.post(path, content=bomb, headers={"content-encoding": "gzip"})
    assert response.status_code == 413 and "4194304" in response.text


async def test_decompressed_bytes_count_towards_the_receive_budget() -> None:
    bomb = gzip.compress(b'{"tokens":[5]}' + b" " * (BODY_BYTES - 100))
    head = b"POST /v1/predict HTTP/1.1\r\ncontent-encoding: gzip\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    request = head % len(bomb) + bomb
    async with serving(**BUDGET) as server:
        assert (await dialogue(server, request)).startswith(b"HTTP/1.1 200")
        assert server.limits.taken_bytes == 0
        async with filled(server):
            assert (await dialogue(server, request)).startswith(b"HTTP/1.1 429")


async def test_small_compressed_bodies_that_come_together_are_all_answered() -> None:
    """The largest possible size of each would fill half of the receive budget."""
    tokens = random.Random(0).choices(range(24), k=2000)
    body = gzip.compress(json.dumps({"tokens": tokens}).encode())
    head = b"POST /v1/predict HTTP/1.1\r\ncontent-encoding: gzip\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    async with serving(**BUDGET) as server:
        answers = await asyncio.gather(*[dialogue(server, head % len(body) + body) for _ in range(20)])
        assert {answer[:12] for answer in answers} == {b"HTTP/1.1 200"}
        assert server.limits.taken_bytes == 0


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
@pytest.mark.parametrize("size", [0, 40_000])
def test_a_byte_order_mark_is_ignored(http: httpx.Client, path: str, body: dict[str, object], size: int) -> None:
    content = b"\xef\xbb\xbf" + json.dumps(body).encode() + b" " * size
    response = http.post(path, content=content)
    assert response.is_success, response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/predict", {"tokens": [5], "top_k": None, "truncated": None, "exclude_seen": None, "mode": None}),
        ("/v1/predict", {"inputs": [[5], "the"], "top_k": None, "prove": None, "cache": None}),
        ("/v1/score", {"tokens": [5], "method": None, "model": None}),
        ("/v1/generate", {"tokens": [5], "stop": None, "max_tokens": None, "temperature": None}),
        ("/v1/sessions/tokens", {"steps": [{"session": "n", "tokens": [5], "create": True, "top_k": None}]}),
        (INFER, {"parameters": None, "inputs": [TENSOR], "outputs": None, "id": None}),
        (INFER, {"inputs": [TENSOR | {"parameters": None}]}),
        (INFER, {"inputs": [TENSOR | {"parameters": {"binary_data_size": None}}]}),
        (INFER, {"inputs": [TENSOR], "outputs": [{"name": "top_ids", "parameters": None}]}),
        (INFER, {"inputs": [TENSOR], "outputs": [{"name": "top_ids", "parameters": {"binary_data": None}}]}),
    ],
)
def test_a_null_counts_as_absent(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json=body)
    assert response.is_success and '"error":' not in response.text, response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": None},
        {"suffix": ""},
        {"best_of": None},
        {"best_of": 1},
        {"best_of": 2, "n": 2},
        {"best_of": 1, "n": 2},
        {"stop": ""},
        {"stop": []},
        {"stop": [""]},
        {"stop": ["", "zzz"]},
    ],
)
def test_fields_of_openai_that_change_nothing_pass(http: httpx.Client, fields: dict[str, object]) -> None:
    body = {"model": "rnn-stable", "prompt": "The", "max_tokens": 2, "seed": 1}
    response = http.post("/v1/completions", json=body | fields)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0] == http.post("/v1/completions", json=body).json()["choices"][0]


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"best_of": 3}, {"best_of": 3, "n": 2}])
def test_fields_of_openai_that_would_change_something_are_refused(
    http: httpx.Client, fields: dict[str, object]
) -> None:
    response = http.post("/v1/completions", json={"model": "rnn-stable", "prompt": "The", "max_tokens": 1} | fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize(
    "tensor",
    [
        TENSOR | {"parameters": {"content_type": "str"}},
        TENSOR | {"shape": [2, 1], "data": ["The", "A"]},
        TENSOR | {"shape": [2, 1], "data": [["The"], ["A"]]},
    ],
)
def test_tensors_as_other_servers_clients_write_them(http: httpx.Client, tensor: dict[str, object]) -> None:
    wanted = [{"name": "top_ids", "parameters": {"content_type": "np"}}]
    response = http.post(INFER, json={"inputs": [tensor], "outputs": wanted, "parameters": {"content_type": "str"}})
    assert response.status_code == 200, response.text
    assert response.json()["outputs"][0]["shape"][0] == len(tensor["data"])  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [[1, 2], [2, 2], [1, 1, 1]])
def test_text_of_another_shape_is_refused(http: httpx.Client, shape: list[int]) -> None:
    assert http.post(INFER, json={"inputs": [TENSOR | {"shape": shape}]}).status_code == 400


def test_the_configuration_names_the_parameters_of_sequences(http: httpx.Client) -> None:
    sequences = http.get("/v2/models/rnn-stable/config").json()["sequence_batching"]
    assert sequences["max_sequence_idle_microseconds"] == 3600 * 10**6
    names = [one["name"] for one in sequences["control_input"]]
    assert names == ["sequence_start", "sequence_end", "sequence_id"]


def test_line_separators_are_escaped_in_events() -> None:
    text = "a\u2028b\u2029c"
    line = event({"text": text}, "token")
    assert line.decode().splitlines()[:2] == ["event: token", 'data: {"text":"a\\u2028b\\u2029c"}']
    assert json.loads(line.split(b"data: ")[1])["text"] == text


@pytest.fixture
def shop_names() -> EventNames:
    manifest = MANIFEST.model_copy(update={"unknown": "skip"})
    return EventNames(manifest, name_vocabulary("events", ["a", "b"]), Settings())


IDS = ["a b", "user@shop", "a|b=c:d", "é", "東京", "שלום", "a%2Fb", "}", "{x}", "%", "?q#f", "x" * 128, "\U0001f9ea"]


@pytest.mark.parametrize("session", IDS, ids=ascii)
def test_a_session_may_have_any_printable_id_on_every_protocol(http: httpx.Client, session: str) -> None:
    path = f"/v1/sessions/{quote(session, safe='')}"
    created = http.post("/v1/sessions", json={"session": session, "model": "rnn-stable"})
    assert created.status_code == 201 and created.headers["location"] == path, created.text
    assert http.post(f"{path}/tokens", json={"tokens": [5]}).json()["session"] == session
    many = http.post("/v1/sessions/tokens", json={"steps": [{"session": session, "tokens": [6]}]})
    assert many.json()["results"][0]["position"] == 2
    assert http.get(path).json()["session"] == session
    completed = {"model": "rnn-stable", "prompt": "The", "max_tokens": 1, "session": session, "expected_position": 2}
    assert http.post("/v1/completions", json=completed).json()["session"] == session
    sequence = {"sequence_id": session[:100], "sequence_start": True, "sequence_end": True}
    response = http.post(INFER, json={"inputs": [TENSOR], "parameters": sequence})
    assert response.status_code == 200, response.text
    assert http.delete(path).status_code == 204


@pytest.mark.parametrize("session", ["%ff", "e%CC%81", "a%E2%80%AEb", "%2E", "%2e%2e"])
def test_an_invalid_id_in_a_path_is_refused(live: Any, http: httpx.Client, session: str) -> None:
    response = http.post(f"/v1/sessions/{session}/tokens", json={"tokens": [5]})
    assert response.status_code in (404, 422) and response.json()["code"] != "unknown_session", response.text


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        *((one, True) for one in IDS),
        *((f"a{one}", True) for one in "\u3164\u2800\u034f\ufe0f"),  # printable, but without a visible shape
        *((f"a{one}", False) for one in "\u200b\u00ad\u00a0\ue000\u0378"),
        *((one, False) for one in ("", ".", "..", "a/b", "a\\b", "a\n", "\x7f", "\x85", "e\u0301", "\u202e", "\u2028")),
        ("\ufffd", False),
        ("x" * 129, False),
    ],
    ids=ascii,
)
def test_session_ids(text: str, valid: bool) -> None:
    assert is_session_id(text) is valid
    assert anchored(SESSION_ID).startswith("^")


@pytest.mark.parametrize("number", [-(2**63), -1, 0, 2**63 - 1, 2**63, 2**64 - 1])
def test_an_event_may_be_any_integer_of_64_bits(shop_names: EventNames, number: int) -> None:
    found = shop_names.tokens([number], "skip")
    assert found.unknown == (str(number),)
    given = shop_names.filter(PredictBody(tokens=(5,), exclude=(number,), candidates=(number,), unknown="skip"))
    assert given.unknown == (str(number), str(number))


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64, 10**5000], ids=["below", "above", "long"])
def test_a_longer_integer_is_refused_by_its_place(shop_names: EventNames, number: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^events\[1\] is an integer of over 64 bits"):
        shop_names.tokens(["a", number], "skip")
    with pytest.raises(InvalidRequest, match=r"^candidates\[0\] is an integer"):
        shop_names.filter(PredictBody(tokens=(5,), candidates=(number,), unknown="skip"))
