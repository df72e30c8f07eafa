"""Tests of scores over HTTP: complete answers, streamed answers and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from math import exp
from typing import Any, cast

import httpx
import pytest

from tests.service.conftest import SocketServer
from tests.service.fake_engine import FakeEngine, FakeRegistry
from tests.service.live_server import TIMEOUT_S
from wane.service.api import encode
from wane.service.errors import Unavailable
from wane.service.types.answer import Prediction


def events(text: str) -> list[tuple[str, Any]]:
    """Returns the name and the document of every server-sent event in a text."""
    parts = [event.split("\n") for event in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


async def test_other_work_runs_between_the_pieces_of_a_long_score(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (await client.post("/v1/score", json={"input": "abcdefghij"})).content
    turn, sizes, turns = 0, list[int](), list[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def json_bytes(value: object) -> bytes:
        for one in (value, *(value.values() if isinstance(value, dict) else ())):
            if type(one) in (list, tuple):
                sizes.append(len(cast(Sequence[object], one)))
                turns.append(turn)
        return in_one_piece(value)

    in_one_piece = encode.json_bytes
    monkeypatch.setattr(encode, "VALUES_AT_ONCE", 4)
    monkeypatch.setattr(encode, "BYTES_IN_A_TURN", 0)
    monkeypatch.setattr(encode, "json_bytes", json_bytes)
    counting = asyncio.create_task(count_turns())
    content = (await client.post("/v1/score", json={"input": "abcdefghij"})).content
    counting.cancel()
    assert content == whole
    assert sizes == [4, 4, 2] * 2
    assert len(set(turns)) == len(turns)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"a": 1},
        {"a": [], "b": [1, 2]},
        {'a"\u00e9': list(range(9)), "b": None, "c": [None, -1.5, 1e-300] * 4, "d": {"e": [1] * 9}},
        {"a": "text", "b": [[1, 2], [3]] * 3},
        {"a": '"\\\n\u00e9\u2028\U0001f9ea' * 9, "b": ["long " * 9, "short"] * 3, "c": ""},
    ],
)
async def test_encoding_in_pieces_does_not_change_the_bytes(
    document: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "VALUES_AT_ONCE", 2)
    monkeypatch.setattr(encode, "CHARACTERS", 4, raising=False)
    assert b"".join(encode.pieces(document)) == encode.json_bytes(document)


@pytest.mark.parametrize(("listed", "rows"), [(1, 8), (2, 4), (4, 2)])
async def test_a_piece_of_a_list_of_predictions_has_fewer_rows_if_the_rows_are_longer(
    monkeypatch: pytest.MonkeyPatch, listed: int, rows: int
) -> None:
    one = Prediction(token_id=1, token="a", probability=0.5, logprob=-0.7)
    document = {"predictions": [None, *[(one,) * listed] * 31]}
    sizes: list[int] = []

    def json_bytes(value: object) -> bytes:
        sizes.append(len(cast(Sequence[object], value)))
        return in_one_piece(value)

    in_one_piece = encode.json_bytes
    monkeypatch.setattr(encode, "VALUES_AT_ONCE", 8 * len(Prediction.__struct_fields__))
    monkeypatch.setattr(encode, "json_bytes", json_bytes)
    assert b"".join(encode.pieces(document)) == in_one_piece(document)
    assert sizes[1:] == [rows] * (32 // rows)


async def test_a_streamed_score_has_tokens_progress_and_a_finish(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/score", json={"input": "ab", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *before, (last, finish) = events(response.text)
    assert before == [
        ("tokens", {"position": 0, "tokens": [97], "logprobs": [-1.0]}),
        ("progress", {"done": 1, "total": 2}),
        ("tokens", {"position": 1, "tokens": [98], "logprobs": [-1.0]}),
        ("progress", {"done": 2, "total": 2}),
    ]
    assert last == "finish"
    assert (finish["perplexity"], finish["chunks"], finish["error_bound"]) == (2.718281828, 1, 0.0)
    assert "logprobs" not in finish


async def test_a_failure_after_the_first_byte_of_a_score_is_an_event(
    client: httpx.AsyncClient, registry: FakeRegistry
) -> None:
    registry.engine.failure_after_first_token = Unavailable("going away")
    response = await client.post("/v1/score", json={"input": "ab", "stream": True})
    assert response.status_code == 200
    name, document = events(response.text)[-1]
    assert name == "error"
    assert (document["code"], document["status"]) == ("unavailable", 503)


async def test_a_disconnection_ends_a_streamed_score(server: SocketServer, engine: FakeEngine) -> None:
    engine.wait_after_first_token = asyncio.Event()
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client,
        client.stream("POST", "/v1/score", json={"tokens": [1, 2], "stream": True}) as response,
    ):
        assert await anext(response.aiter_lines()) == "event: tokens"
    await engine.closed.wait()


@pytest.mark.parametrize("method", ["sequential", "parallel"])
def test_a_truncated_score_has_a_bound_for_each_token_streamed_or_whole(http: httpx.Client, method: str) -> None:
    body = {"model": "rnn-stable", "tokens": [5, 6, 7] * 300, "method": method, "truncated": True}
    whole = http.post("/v1/score", json=body).json()
    curve = http.get("/v1/models/rnn-stable").json()["certificate"]["error_bound"]
    assert (whole["logprobs"][0], whole["error_bounds"][0]) == (None, None)
    assert len(whole["logprobs"]) == len(whole["error_bounds"]) == 900
    assert whole["error_bound"] == max(whole["error_bounds"][1:]) >= curve[0]
    assert all(curve[min(known, 256) - 1] <= found for known, found in enumerate(whole["error_bounds"][1:], 1))
    mean = sum(whole["logprobs"][1:]) / 899
    assert whole["perplexity"] == pytest.approx(exp(-mean))
    *before, (_, finish) = events(http.post("/v1/score", json={**body, "stream": True}).text)
    tokens = [document for name, document in before if name == "tokens"]
    assert [one for document in tokens for one in document["error_bounds"]] == whole["error_bounds"]
    assert next(one for document in tokens for one in document["logprobs"]) is None
    assert [document["done"] for name, document in before if name == "progress"][-1] == 900
    assert finish["error_bound"] == whole["error_bound"]


def test_one_truncated_token_has_a_null_score(http: httpx.Client) -> None:
    score = http.post("/v1/score", json={"tokens": [5], "truncated": True}).json()
    found = (score["logprobs"], score["error_bounds"], score["perplexity"], score["error_bound"])
    assert found == ([None], [None], None, None)
    assert "error_bounds" not in http.post("/v1/score", json={"tokens": [5]}).json()


@pytest.mark.parametrize("tolerance", [None, 0, 0.01])
def test_a_parallel_score_is_close_to_a_sequential_one(http: httpx.Client, tolerance: float | None) -> None:
    model = "rnn-stable"
    size = next(card for card in http.get("/v1/models").json()["data"] if card["id"] == model)["vocabulary"]["size"]
    tokens = [index * index % size for index in range(3000)]
    in_order = http.post("/v1/score", json={"model": model, "tokens": tokens}).json()
    asked = {"model": model, "tokens": tokens, "method": "parallel", "tolerance": tolerance, "stream": True}
    *before, (_, finish) = events(http.post("/v1/score", json=asked).text)
    logprobs = [logprob for name, document in before if name == "tokens" for logprob in document["logprobs"]]
    assert logprobs == pytest.approx(in_order["logprobs"], abs=1e-3)
    assert [document["done"] for name, document in before if name == "progress"][-1] == len(tokens)
    assert finish["error_bound"] <= (1e-3 if tolerance is None else tolerance)
    assert finish["perplexity"] == pytest.approx(in_order["perplexity"], rel=1e-3)
