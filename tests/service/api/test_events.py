"""Tests of models of events on every route of the server. The expected lists of events are computed in numpy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.asyncio.client import connect

from tests.service.engine.test_events import CACHE, NAMES, assert_lists, distribution, ranking
from tests.service.engine_harness import EngineHarness, MakeHarness, name_vocabulary
from tests.service.server_harness import ServerHarness, served
from wane.service.types.answer import Prediction

CLOSE = 1e-5
TOKENS = [4, 9, 4, 30, 12]
EVENTS = [NAMES[token - 2] for token in TOKENS]
SHOWN = 'write "events": ["item 0", "item 1"] instead'


@pytest.fixture(params=[{}, {"cache": CACHE}, {"start": "zero"}], ids=["network", "cache", "zero start"])
def harness(request: pytest.FixtureRequest, make_harness: MakeHarness) -> EngineHarness:
    vocabulary = name_vocabulary(names=NAMES)
    return make_harness(vocabulary=vocabulary, certified=True, unknown="skip", **request.param)


@pytest.fixture
async def server(harness: EngineHarness) -> AsyncIterator[ServerHarness]:
    async with served(harness) as server:
        yield server


@pytest.fixture
async def client(server: ServerHarness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url) as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.is_success, response.text
    return response.json()


async def refused(client: httpx.AsyncClient, path: str, **body: Any) -> str:
    """Sends a request. Asserts that it is answered with 422, and returns the error message."""
    response = await client.post(path, json=body)
    assert response.status_code == 422, response.text
    document = response.json()
    detail = document["detail"] if "detail" in document else document["error"]["message"]
    assert isinstance(detail, str)
    return detail


def of(harness: EngineHarness, tokens: Sequence[int] = TOKENS) -> NDArray[np.float64]:
    return distribution(harness, tokens, cache=harness.manifest.cache is not None)


def assert_ranked(found: Sequence[dict[str, Any]], wanted: NDArray[np.float64], count: int, **filters: Any) -> None:
    """Asserts that a JSON list of predictions is correct: see `assert_lists`."""
    predictions = [Prediction(one["token_id"], one["token"], one["probability"], one["logprob"]) for one in found]
    assert_lists(predictions, wanted, count, **filters)
    assert [one["token"] for one in found] == [["<eos>", "<unk>", *NAMES][one["token_id"]] for one in found]


FILTERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"include_end": True}, {"include_end": True}),
    ({"exclude": ["item 3", "no such item"]}, {"exclude": (5,)}),
    ({"exclude_seen": True}, {"exclude": TOKENS}),
    ({"candidates": ["item 3", "item 50", "item 3"]}, {"candidates": (5, 52)}),
    ({"candidates": ["item 3", "item 2"], "exclude_seen": True}, {"candidates": (5,)}),
]


@pytest.mark.parametrize(("body", "filters"), FILTERS, ids=range(len(FILTERS)))
async def test_a_prediction(
    harness: EngineHarness, client: httpx.AsyncClient, body: dict[str, Any], filters: dict[str, Any]
) -> None:
    for mode in ("recurrent", "both"):
        answer = await post(client, "/v1/predict", events=EVENTS, mode=mode, top_k=8, **body)
        assert_ranked(answer["predictions"], of(harness), 8, **filters)
        assert answer.get("seen_tokens") == (len(TOKENS) if "exclude_seen" in body else None)
        assert answer.get("unknown") == (["no such item"] if "no such item" in body.get("exclude", ()) else None)
    same = await post(client, "/v1/predict", tokens=TOKENS, mode="recurrent", top_k=8, **body)
    assert [one["token_id"] for one in same["predictions"]] == [one["token_id"] for one in answer["predictions"]]


async def test_a_batch(harness: EngineHarness, client: httpx.AsyncClient) -> None:
    inputs = [{"events": EVENTS}, TOKENS, {"events": ["nope", *EVENTS[:2]]}, {"events": []}, "item 1"]
    answer = await post(client, "/v1/predict", inputs=inputs, mode="recurrent", exclude=["item 3"])
    first, second, third, fourth, fifth = answer["results"]
    assert_ranked(first["predictions"], of(harness), 5, exclude=(5,))
    assert_ranked(second["predictions"], of(harness), 5, exclude=(5,))
    assert_ranked(third["predictions"], of(harness, TOKENS[:2]), 5, exclude=(5,))
    assert ("unknown" in first, third["unknown"]) == (False, ["nope"])
    assert "give at least one event" in fourth["error"]["detail"]
    assert SHOWN in fifth["error"]["detail"]


async def test_an_invalid_filter_fails_every_input_of_a_batch(client: httpx.AsyncClient) -> None:
    inputs = [{"events": EVENTS}, {"events": []}]
    answer = await post(client, "/v1/predict", inputs=inputs, candidates=["nope"], unknown="refuse")
    first, second = answer["results"]
    assert "candidates[0] is 'nope'" in first["error"]["detail"]
    assert "give at least one event" in second["error"]["detail"]


@pytest.mark.parametrize("route", ["step", "many", "columns", "websocket"])
async def test_the_steps_of_a_session(
    harness: EngineHarness, server: ServerHarness, client: httpx.AsyncClient, route: str
) -> None:
    await post(client, "/v1/sessions", session="s")
    socket = None
    if route == "websocket":
        socket = await connect(server.url.replace("http", "ws", 1) + "/v1/sessions/s/stream", proxy=None)
    given = [*EVENTS[:2], "nope", *EVENTS[2:]]
    known: list[int] = []
    for event in given:
        body: dict[str, Any] = {"events": [event], "expected_position": len(known), "exclude_seen": True, "top_k": 6}
        if event != "nope":
            known.append(NAMES.index(event) + 2)
        if socket is not None:
            await socket.send(json.dumps(body))
            answer = json.loads(await socket.recv())
        elif route == "step":
            answer = await post(client, "/v1/sessions/s/tokens", **body)
        else:
            form = "columns" if route == "columns" else "documents"
            answer = await post(client, "/v1/sessions/tokens", steps=[{"session": "s", **body}], format=form)
            if route == "many":
                (answer,) = answer["results"]
        if route == "columns":
            assert answer["error"] == [None]
            ids = answer["token_id"][0]
            assert ids == sorted(ids, key=lambda one: (-of(harness, known)[one], one))
            assert set(ids) == set(ranking(of(harness, known), 6, exclude=known))
            answer = {name: values[0] for name, values in answer.items() if isinstance(values, list)}
            answer = {name: value for name, value in answer.items() if value is not None}
        else:
            assert_ranked(answer["predictions"], of(harness, known), 6, exclude=known)
        assert (answer["position"], answer["seen_tokens"]) == (len(known), len(known))
        assert answer.get("unknown") == (["nope"] if event == "nope" else None)
    if socket is not None:
        await socket.send(json.dumps({"rewind": 0}))
        answer = json.loads(await socket.recv())
        assert bool(answer["predictions"]) is bool(harness.manifest.start_tokens)
        await socket.close()


async def test_a_session_from_a_history_of_events(harness: EngineHarness, client: httpx.AsyncClient) -> None:
    created = await post(client, "/v1/sessions", session="h", events=["nope", *EVENTS], position=len(EVENTS))
    assert (created["position"], created["unknown"]) == (len(EVENTS), ["nope"])
    answer = await post(client, "/v1/predict", session="h", exclude_seen=True)
    assert_ranked(answer["predictions"], of(harness), 5, exclude=TOKENS)
    assert answer["error_bound"] == 0  # the history contains all tokens of the session
    message = await refused(client, "/v1/sessions", events=EVENTS, position=2)
    assert "the history has 5 tokens, but must have at most 2" in message
    message = await refused(client, "/v1/sessions", events=EVENTS, history=TOKENS, position=5)
    assert "give `history` or `events`, not both" in message


async def test_a_score(harness: EngineHarness, client: httpx.AsyncClient) -> None:
    given = ["nope", *EVENTS[:2], "what", *EVENTS[2:]]
    score = await post(client, "/v1/score", events=given)
    has_start = bool(harness.manifest.start_tokens)
    own = [
        pytest.approx(np.log(of(harness, TOKENS[:index])[token]), abs=1e-4) if index or has_start else None
        for index, token in enumerate(TOKENS)
    ]
    assert score["logprobs"] == [None, *own[:2], None, *own[2:]]
    assert score["tokens"] == [None, *TOKENS[:2], None, *TOKENS[2:]]
    assert score["unknown"] == ["nope", "what"]
    async with client.stream("POST", "/v1/score", json={"events": given, "stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    documents = [json.loads(line.removeprefix("data: ")) for line in lines]
    parts = [one for one in documents if "logprobs" in one]
    assert [value for part in parts for value in part["logprobs"]] == score["logprobs"]
    assert sum(len(part["tokens"]) for part in parts) == len(given)
    assert documents[-1]["unknown"] == ["nope", "what"]


async def test_generation_and_comparison(harness: EngineHarness, client: httpx.AsyncClient) -> None:
    made = await post(client, "/v1/generate", events=["nope", *EVENTS], max_tokens=1, temperature=0)
    wanted = of(harness)
    wanted[1] = 0  # `<unk>` is never drawn
    assert wanted[made["tokens"][0]] == pytest.approx(wanted.max(), abs=CLOSE)
    assert made["unknown"] == ["nope"]
    compared = await post(client, "/v1/compare", events=["nope", *EVENTS], windows=[8], repeat=1)
    (found,) = compared["models"]
    assert_ranked(found["recurrent"]["predictions"], of(harness), 5)
    assert (found["tokens"], found["unknown"]) == (len(TOKENS), ["nope"])


async def test_unknown_is_a_field_of_a_request(harness: EngineHarness, client: httpx.AsyncClient) -> None:
    given = [*EVENTS, "nope"]
    skipped = await post(client, "/v1/predict", events=given, unknown="skip")
    assert_ranked(skipped["predictions"], of(harness), 5)
    read = await post(client, "/v1/predict", events=given, unknown="token")
    assert_ranked(read["predictions"], of(harness, [*TOKENS, 1]), 5)
    assert skipped["unknown"] == read["unknown"] == ["nope"]
    message = await refused(client, "/v1/predict", events=given, unknown="refuse")
    assert message.startswith("events[5] is 'nope', which the vocabulary of fake lacks")
    message = await refused(client, "/v1/predict", events=given, unknown="ignore")
    assert message == "unknown is \"ignore\", but must be 'refuse', 'skip' or 'token'"
    message = await refused(client, "/v1/predict", tokens=TOKENS, unknown="skip")
    assert message == "`unknown` is given without `events` or `inputs` or `candidates` or `exclude`"
    found = await post(client, "/v1/predict", events=EVENTS, candidates=["item 3", "new"])
    assert_ranked(found["predictions"], of(harness), 5, candidates=(5,))
    assert found["unknown"] == ["new"]
    message = await refused(client, "/v1/predict", events=EVENTS, candidates=["item 3", "new"], unknown="refuse")
    assert message.startswith("candidates[1] is 'new'")
    found = await post(client, "/v1/predict", events=EVENTS, exclude=["new"])
    assert found["unknown"] == ["new"]
    message = await refused(client, "/v1/predict", events=EVENTS, exclude=["new"], unknown="refuse")
    assert message.startswith("exclude[0] is 'new'")
    message = await refused(client, "/v1/compare", events=["nope"], unknown="skip", windows=[2])
    assert "the model's vocabulary has none of the given events" in message


async def test_text_is_refused_with_a_way_to_write_it(client: httpx.AsyncClient) -> None:
    text = " ".join(EVENTS)
    for path in ("/v1/predict", "/v1/compare", "/v1/score", "/v1/generate", "/v1/sessions/a/tokens"):
        message = await refused(client, path, input=text)
        assert message == f"input is text, but model fake reads events: {SHOWN}"
    assert SHOWN in await refused(client, "/v1/sessions", input=text, position=20)
    steps = await post(client, "/v1/sessions/tokens", steps=[{"session": "a", "input": text}])
    assert SHOWN in steps["results"][0]["error"]["detail"]


async def test_filters_of_a_text_model_are_refused(make_harness: MakeHarness) -> None:
    async with served(make_harness()) as server, httpx.AsyncClient(base_url=server.url) as client:
        for name, value in (("exclude", ["a"]), ("candidates", ["a"]), ("exclude_seen", True), ("include_end", True)):
            message = await refused(client, "/v1/predict", tokens=[5], **{name: value})
            assert message == f"{name} is only for models whose vocabulary has events; fake has a text vocabulary"
        message = await refused(client, "/v1/predict", events=["a"])
        assert message == "events is only for models whose vocabulary has events; fake has a text vocabulary"


async def test_the_lists_of_a_filter_are_bounded_by_a_setting(make_harness: MakeHarness) -> None:
    harness = make_harness(vocabulary=name_vocabulary(names=NAMES), settings_max_filter_events=2)
    async with served(harness, max_filter_events=2) as server, httpx.AsyncClient(base_url=server.url) as client:
        for name in ("exclude", "candidates"):
            body = {"events": EVENTS, name: EVENTS[:3]}
            message = await refused(client, "/v1/predict", **body)
            assert message == f"{name} holds 3 values, but must hold at most 2"
            steps = await post(client, "/v1/sessions/tokens", steps=[{"session": "a", **body}])
            assert steps["results"][0]["error"]["detail"] == message


async def test_open_inference_reads_events(harness: EngineHarness, client: httpx.AsyncClient) -> None:
    given = ["item 7", "nope", *EVENTS[1:]]
    tokens = [9, *TOKENS[1:]]
    tensor = {"name": "events", "shape": [1, len(given)], "datatype": "BYTES", "data": given}
    names = ("top_ids", "top_logprobs", "position", "token_logprobs")
    answer = await post(client, "/v2/models/fake/infer", inputs=[tensor], outputs=[{"name": name} for name in names])
    assert json.loads(answer["parameters"]["unknown"]) == ["nope"]
    found = {one["name"]: one["data"] for one in answer["outputs"]}
    wanted = of(harness, tokens)
    ids = found["top_ids"]
    assert len(ids) == 16 and wanted[ids] == pytest.approx(wanted[ranking(wanted, 16)], abs=CLOSE)
    assert found["position"] == [len(tokens)]
    score = await post(client, "/v1/score", events=given)
    for one, other in zip(found["token_logprobs"], score["logprobs"], strict=True):
        assert (one is None or np.isnan(one)) if other is None else one == pytest.approx(other, abs=1e-5)
    body = {"inputs": [tensor], "parameters": {"unknown": "refuse"}}
    response = await client.post("/v2/models/fake/infer", json=body)
    assert response.status_code == 400 and "events[0][1] is 'nope'" in response.json()["error"]
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["item 1"]}
    response = await client.post("/v2/models/fake/infer", json={"inputs": [text]})
    assert response.status_code in (400, 422) and SHOWN in response.json()["error"]


async def test_openai_reads_one_event_in_each_line(harness: EngineHarness, client: httpx.AsyncClient) -> None:
    lines = "\n".join(["nope", *EVENTS])
    answer = await post(client, "/v1/completions", model="fake", prompt=lines, max_tokens=1, temperature=0, logprobs=5)
    wanted = of(harness)
    wanted[1] = 0
    (token,) = answer["choices"][0]["logprobs"]["tokens"]
    assert wanted[["<eos>", "<unk>", *NAMES].index(token)] == pytest.approx(wanted.max(), abs=CLOSE)
    assert answer["unknown"] == ["nope"]
    assert answer["usage"]["prompt_tokens"] == len(TOKENS)
    assert (await post(client, "/tokenize", prompt="\n".join(EVENTS)))["tokens"] == TOKENS
