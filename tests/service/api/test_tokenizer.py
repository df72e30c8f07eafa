"""Tests of the tokenizer's routes."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.service.engine_harness import EngineHarness, MakeHarness, name_vocabulary
from tests.service.server_harness import served
from wane.service.api import encode

NAMES = ("open", "read", "close", "write")

MOST = 100
"""The largest number of tokens of a text."""

WAIT_S = 2  # how long the text takes if nothing gives it up


@pytest.fixture(params=["words", "events"])
def harness(request: pytest.FixtureRequest, make_harness: MakeHarness) -> EngineHarness:
    return make_harness(vocabulary=name_vocabulary(request.param, NAMES), max_scored_tokens=MOST, max_input_tokens=MOST)


@pytest.fixture
async def client(harness: EngineHarness) -> AsyncIterator[httpx.AsyncClient]:
    limits = {"max_scored_tokens": MOST, "max_input_tokens": MOST}
    async with served(harness, **limits) as server, httpx.AsyncClient(base_url=server.url) as client:
        yield client


@pytest.mark.parametrize("prompt", ["open\nread<eos>close<eos><eos>open", "<eos>", "", "<eos>nope"])
async def test_a_text_becomes_tokens(client: httpx.AsyncClient, harness: EngineHarness, prompt: str) -> None:
    is_text = harness.engine.vocabulary.kind == "words"
    wanted = {
        "open\nread<eos>close<eos><eos>open": [2, 0, 3, 0, 4, 0, 0, 2] if is_text else [2, 3, 0, 4, 0, 0, 2],
        "<eos>": [0],
        "": [],
        "<eos>nope": [0, 1],
    }
    answer = (await client.post("/tokenize", json={"prompt": prompt})).json()
    assert (answer["tokens"], answer["count"]) == (wanted[prompt], len(wanted[prompt]))


@pytest.mark.parametrize("prompt", ["<eos>" * (MOST + 1), "open\n" * (MOST + 1), "open<eos>" * MOST])
async def test_a_text_with_too_many_tokens_is_refused(client: httpx.AsyncClient, prompt: str) -> None:
    refused = await client.post("/tokenize", json={"prompt": prompt})
    assert refused.status_code == 413
    assert f"at most {MOST} are allowed" in refused.json()["error"]["message"]


async def test_a_text_that_takes_long_is_given_up_at_the_deadline(
    client: httpx.AsyncClient, harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    of, name = (
        (harness.vocabulary, "encode") if harness.vocabulary.kind == "words" else (harness.engine.events, "tokens")
    )
    method = getattr(of, name)

    def waits(*arguments: Any, **options: Any) -> Any:
        is_over.wait(WAIT_S)
        return method(*arguments, **options)

    monkeypatch.setattr(of, name, waits)
    headers = {"x-request-timeout-ms": "100"}
    refused = await client.post("/tokenize", json={"prompt": "open" + " " * 5000}, headers=headers)
    is_over.set()
    assert refused.status_code == 504, refused.text


async def test_tokens_become_a_text(client: httpx.AsyncClient, harness: EngineHarness) -> None:
    between = " " if harness.engine.vocabulary.kind == "words" else "\n"
    answer = await client.post("/detokenize", json={"tokens": [2, 3, 0]})
    assert answer.json() == {"prompt": between.join(["open", "read", "\n"])}


async def test_a_long_text_is_encoded_in_pieces(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    def json_bytes(value: object) -> bytes:
        nonlocal longest
        made = in_one_piece(value)
        longest = max(longest, len(made))
        return made

    in_one_piece = encode.json_bytes
    monkeypatch.setattr(encode, "VALUES_AT_ONCE", 2)
    monkeypatch.setattr(encode, "CHARACTERS", 4, raising=False)
    monkeypatch.setattr(encode, "json_bytes", json_bytes)
    answer = await client.post("/detokenize", json={"tokens": [2, 3] * (MOST // 2)})
    assert len(answer.json()["prompt"]) > MOST
    assert longest <= 20
