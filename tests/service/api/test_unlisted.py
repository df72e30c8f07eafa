"""Tests that reserved tokens, such as padding, are never listed, drawn or accepted on any route, and `<unk>` only with
`include_unknown`. In the fake model's output layer, padding and `<unk>` are the most probable tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect

from tests.service.api.test_events import post
from tests.service.engine_harness import EngineHarness, MakeHarness, name_vocabulary
from tests.service.server_harness import ServerHarness, served

NAMES = ("[PAD]", *(f"item{index}" for index in range(30)))
PAD, UNK, KNOWN = 2, 1, 7
"""`KNOWN` is the id of an ordinary token."""

KINDS = pytest.mark.parametrize("kind", ["words", "events"])


@pytest.fixture
def harness(make_harness: MakeHarness, kind: str) -> EngineHarness:
    harness = make_harness(vocabulary=name_vocabulary(kind, NAMES), certified=True)
    # The hidden vector after KNOWN, to which the rows of the output layer for <unk> and padding are parallel.
    hidden = np.tanh(harness.runner.embedding[KNOWN])
    harness.runner.head[[UNK, PAD]] = hidden * np.float32(10), hidden * np.float32(20)
    return harness


@pytest.fixture
async def server(harness: EngineHarness) -> AsyncIterator[ServerHarness]:
    async with served(harness) as server:
        yield server


@pytest.fixture
async def client(server: ServerHarness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url) as client:
        yield client


def ids(answer: Any) -> list[int]:
    return [one["token_id"] for one in answer["predictions"]]


async def step(client: httpx.AsyncClient, url: str, route: str, **body: Any) -> list[int]:
    """Runs one step by one of the routes of steps, and returns the ids of the listed tokens."""
    if route == "step":
        return ids(await post(client, "/v1/sessions/s/tokens", **body))
    if route == "websocket":
        async with connect(url.replace("http", "ws", 1) + "/v1/sessions/s/stream", proxy=None) as socket:
            await socket.send(json.dumps(body))
            return ids(json.loads(await socket.recv()))
    answer = await post(client, "/v1/sessions/tokens", steps=[{"session": "s", **body}], format=route)
    if route == "documents":
        return ids(answer["results"][0])
    found: list[int] = answer["token_id"][0]
    return found


@KINDS
@pytest.mark.parametrize("route", ["step", "websocket", "documents", "columns"])
@pytest.mark.parametrize("top_k", [3, 15, 40])
async def test_steps_list_unk_only_on_request_and_never_padding(
    harness: EngineHarness, server: ServerHarness, client: httpx.AsyncClient, kind: str, route: str, top_k: int
) -> None:
    await post(client, "/v1/sessions", session="s")
    for position in range(2):
        body = {"tokens": [KNOWN], "expected_position": position, "top_k": top_k}
        listed = await step(client, server.url, route, **body)
        logits = harness.runner.logits([0, *[KNOWN] * (position + 1)])
        assert {UNK, PAD} == set(np.argsort(-logits)[:2].tolist())
        wanted = [
            one for one in np.argsort(-logits).tolist() if one not in (UNK, PAD, *([0] if kind == "events" else []))
        ]
        assert listed == wanted[:top_k]
        # The same step again is a replay, so it does not change the session.
        listed = await step(client, server.url, route, **body, include_unknown=True)
        assert listed == [UNK, *wanted][:top_k]


@KINDS
async def test_predictions_scores_and_generations_of_every_protocol(
    harness: EngineHarness, client: httpx.AsyncClient, kind: str
) -> None:
    logits = harness.runner.logits([0, KNOWN]).astype(np.float64)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    usual = [one for one in np.argsort(-logits).tolist() if one not in (UNK, PAD, *([0] if kind == "events" else []))]
    for mode in ("recurrent", "window", "both"):
        body: dict[str, Any] = {"tokens": [KNOWN], "mode": mode, "top_k": 4}
        answer = await post(client, "/v1/predict", **body)
        assert ids(answer) == usual[:4]
        # The probabilities are those of the whole distribution.
        assert [one["logprob"] for one in answer["predictions"]] == pytest.approx(logprobs[usual[:4]], abs=1e-4)
        assert ids(await post(client, "/v1/predict", **body, include_unknown=True)) == [UNK, *usual[:3]]

    drawn = {"tokens": [KNOWN], "max_tokens": 1, "top_logprobs": 2}
    for temperature in (0, 1):
        made = await post(client, "/v1/generate", **drawn, temperature=temperature, seed=1)
        assert made["tokens"][0] not in (UNK, PAD)
        made = await post(client, "/v1/generate", **drawn, temperature=temperature, seed=1, include_unknown=True)
        assert made["tokens"] == [UNK]
    everything = [one for one in np.argsort(-logits).tolist() if one not in (UNK, PAD)]  # includes <eos>
    made = await post(client, "/v1/generate", **drawn, temperature=0)
    assert [one["token_id"] for one in made["predictions"][0]] == everything[:2]
    completion = {"model": "fake", "prompt": [KNOWN], "max_tokens": 1, "temperature": 0, "logprobs": 2}
    (choice,) = (await post(client, "/v1/completions", **completion))["choices"]
    texts = harness.engine.vocabulary.texts
    assert [*choice["logprobs"]["top_logprobs"][0]] == [texts[one] for one in everything[:2]]
    (choice,) = (await post(client, "/v1/completions", **completion, include_unknown=True))["choices"]
    assert choice["logprobs"]["tokens"] == ["<unk>"]

    score = await post(client, "/v1/score", tokens=[KNOWN, everything[0]], top_k=2)
    assert [one["token_id"] for one in score["predictions"][1]] == everything[:2]
    score = await post(client, "/v1/score", tokens=[KNOWN, everything[0]], top_k=2, include_unknown=True)
    assert [one["token_id"] for one in score["predictions"][1]] == [UNK, everything[0]]

    inputs = [{"name": "tokens", "shape": [1, 1], "datatype": "INT64", "data": [KNOWN]}]
    for sequence in ({}, {"sequence_id": 5, "sequence_start": True}):
        infer = {"inputs": inputs, "outputs": [{"name": "top_ids"}]}
        answer = await post(client, "/v2/models/fake/infer", **infer, parameters=sequence)
        assert answer["outputs"][0]["data"] == usual[:16]
        infer["parameters"] = {**sequence, "include_unknown": True}
        answer = await post(client, "/v2/models/fake/infer", **infer)
        assert answer["outputs"][0]["data"] == [UNK, *usual[:15]]
    listed = (await client.get("/v1/models/fake/vocabulary")).json()["events"]
    assert [one["name"] for one in listed] == [*NAMES[1:]]


@KINDS
async def test_padding_is_refused_as_input_of_every_protocol(client: httpx.AsyncClient, kind: str) -> None:
    named: dict[str, Any] = {"events": ["item1", "[PAD]"]} if kind == "events" else {"input": "item1 [PAD]"}
    prompt = "\n".join(named["events"]) if kind == "events" else named["input"]
    tensor = {"datatype": "BYTES", "data": named.get("events") or [prompt]}
    tensor |= {"name": "events", "shape": [1, 2]} if kind == "events" else {"name": "text", "shape": [1]}
    ids_tensor = {"name": "tokens", "shape": [1, 2], "datatype": "INT64", "data": [KNOWN, PAD]}
    await post(client, "/v1/sessions", session="s")
    bodies: list[tuple[str, dict[str, Any]]] = [
        (path, given)
        for path in ("/v1/predict", "/v1/score", "/v1/generate", "/v1/compare", "/v1/sessions/s/tokens")
        for given in (named, {"tokens": [KNOWN, PAD]})
    ]
    bodies += [
        ("/v1/sessions/s/tokens", {"tokens": [PAD]}),
        ("/v1/sessions", {**named, "position": 2}),
        ("/v1/sessions", {"history": [KNOWN, PAD], "position": 2}),
        ("/v1/completions", {"model": "fake", "prompt": prompt}),
        ("/v1/completions", {"model": "fake", "prompt": [KNOWN, PAD]}),
        ("/tokenize", {"model": "fake", "prompt": prompt}),
        ("/v2/models/fake/infer", {"inputs": [tensor]}),
        ("/v2/models/fake/infer", {"inputs": [ids_tensor]}),
        ("/v1/generate", {"tokens": [KNOWN], "logit_bias": {str(PAD): 100}}),
    ]
    if kind == "events":
        bodies.append(("/v1/predict", {"events": ["item1"], "candidates": ["[PAD]"]}))
    for path, body in bodies:
        response = await client.post(path, json=body)
        assert response.status_code in (400, 422), (path, body, response.text)
        assert "[PAD]" in response.text, (path, body, response.text)
        assert "reserves" in response.text or "never drawn" in response.text, (path, body, response.text)
    steps = [{"session": "s", "tokens": [PAD]}, {"session": "s", "tokens": [KNOWN]}]
    for form in ("documents", "columns"):
        answer = await client.post("/v1/sessions/tokens", json={"steps": steps[:1], "format": form})
        assert "[PAD]" in answer.text and "reserves" in answer.text
    assert (await client.get("/v1/sessions/s")).json()["position"] == 0
