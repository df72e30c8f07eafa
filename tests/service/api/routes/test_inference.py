"""Tests of the routes of the Open Inference Protocol: the requests that they make to the engine, the protocol's error
format, health, and keys.

`tests/clients/test_tritonclient.py` compares the numbers with the native API."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx
import numpy as np
import pytest

from tests.service.api.routes.test_repository import assert_error
from tests.service.conftest import never
from tests.service.fake_engine import FakeEngine, FakeRegistry
from wane.service.app import create_app
from wane.service.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PositionConflict,
    SessionExists,
    TooLarge,
    Unavailable,
    UnknownSession,
)
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings
from wane.service.types.request import PredictRequest, ScoreRequest, StepRequest

INFER = "/v2/models/fake/infer"
TOKENS = {"name": "tokens", "shape": [1, 3], "datatype": "INT64", "data": [5, 6, 7]}
BATCH = {"name": "tokens", "shape": [2, 2], "datatype": "INT64", "data": [[5, 6], [7, 8]]}
LENGTHS = {"name": "lengths", "shape": [1], "datatype": "INT64"}
TEXT = {"name": "text", "shape": [1], "datatype": "BYTES"}
EVENTS = {"name": "events", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}


def body(*inputs: object, outputs: Any = None, **parameters: Any) -> dict[str, Any]:
    wanted = {} if outputs is None else {"outputs": [{"name": name} for name in outputs]}
    return {"inputs": [*inputs] or [TOKENS], "parameters": parameters, **wanted}


def error(response: httpx.Response, status: int = 400, code: str = "invalid_request") -> str:
    return assert_error(response, status, code)


# Requests to the engine


async def test_a_prediction_asks_for_what_the_outputs_need(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(INFER, json=body())
    await client.post(INFER, json=body(outputs=["top1_proved"]))
    await client.post(INFER, json=body(outputs=["token_logprobs"], truncated=True))
    assert engine.asked[0] == PredictRequest(
        (5, 6, 7), top_k=16, owner="", deadline=cast(Any, engine.asked[0]).deadline
    )
    assert cast(PredictRequest, engine.asked[1]).top_k == 1
    assert isinstance(engine.asked[2], ScoreRequest) and engine.asked[2].truncated
    assert len(engine.asked) == 3


async def test_a_position_alone_runs_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post(INFER, json=body(outputs=["position"]))
    assert response.json()["outputs"] == [{"name": "position", "datatype": "INT64", "shape": [1], "data": [3]}]
    assert engine.asked == []


async def test_a_sequence_is_a_step_of_its_session(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post(INFER, json=body(sequence_id=7, expected_position=2, mode="window"))
    assert response.status_code == 200, response.text
    (step,) = engine.asked
    assert isinstance(step, StepRequest)
    assert (step.session, step.tokens, step.expected_position, step.mode) == ("fake:7", (5, 6, 7), 2, "window")
    assert step.top_k == 16


# Errors


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (InvalidRequest("no", "tokens"), 400, "invalid_request"),
        (PositionConflict("no", 7), 409, "position_conflict"),
        (TooLarge("no"), 413, "too_large"),
        (Overloaded("no"), 429, "overloaded"),
        (Unavailable("no"), 503, "unavailable"),
        (DeadlineExceeded("no"), 504, "deadline_exceeded"),
        (RuntimeError("a secret"), 500, "internal"),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize(
    "given",
    [body(), body(BATCH), body(outputs=["token_logprobs"]), body(sequence_id=7)],
    ids=["one", "batch", "score", "sequence"],
)
async def test_errors_of_the_engine_have_the_protocol_s_shape(
    client: httpx.AsyncClient, engine: FakeEngine, given: Any, failure: Exception, status: int, code: str
) -> None:
    engine.failure = failure
    assert "secret" not in error(await client.post(INFER, json=given), status, code)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (body(TOKENS, TOKENS), "input tokens is given twice"),
        (body(LENGTHS | {"data": [1]}), "give exactly one of the inputs tokens, text, events; found none of them"),
        (
            body(TOKENS, TEXT | {"data": ["a"]}),
            "give exactly one of the inputs tokens, text, events; found tokens and text",
        ),
        (body(TEXT | {"data": [""]}), "text[0] is empty"),
        (body(TOKENS, LENGTHS | {"data": [0]}), "lengths[0] is 0, but must be from 1 to 3"),
        (body(TOKENS, LENGTHS | {"data": [4]}), "lengths[0] is 4"),
        (body(TOKENS, LENGTHS | {"shape": [2], "data": [1, 1]}), "lengths has 2 values, but tokens has 1 rows"),
        (body(TEXT | {"data": ["a"]}, LENGTHS | {"data": [1]}), "lengths is given with text"),
        (body(EVENTS), "events is only for models whose vocabulary has events"),
        (body(outputs=["probabilities"]), "there is no output 'probabilities'"),
        (body(outputs=["position", "position"]), "output position is requested twice"),
        (body(temperature=1), "parameters.temperature: there is no such field"),
        (body(mode="fast"), 'parameters.mode is "fast", but must be'),
        (body(window="8"), 'parameters.window is "8", but must be an integer'),
        (body(window=0), "window is 0"),
        (body(window=4, mode="recurrent"), "window is given, but mode is recurrent"),
        (body(tolerance=2), "tolerance is 2"),
        (body(truncated=1), "parameters.truncated is 1, but must be true or false"),
        (body(timeout=-1), "timeout is -1"),
        (body(timeout=1.5), "parameters.timeout is 1.5, but must be an integer"),
        (body(priority=-1), "priority is -1"),
        (body(expected_position=0), "expected_position is given without a sequence_id"),
        (body(sequence_start=True), "sequence_start is given without a sequence_id"),
        (body(sequence_end=True, sequence_id=0), "sequence_end is given without a sequence_id"),
        (body(outputs=["token_logprobs"], mode="window"), "mode is given, but no requested output is a prediction"),
        (body(outputs=["position"], window=3), "window is given, but no requested output is a prediction"),
        (
            body(outputs=["token_logprobs"], tolerance=0.5),
            "tolerance is given, but no requested output is a prediction",
        ),
        (body(BATCH, sequence_id=7), "tokens is a batch of 2 rows, but a batch has at most 1"),
        (body(sequence_id=-1), "sequence_id is -1"),
        (body(sequence_id=2**64), "sequence_id"),
        (body(sequence_id=True), "sequence_id"),
        (body(sequence_id="a/b"), "sequence_id is 'a/b'"),
        (body(sequence_id="a" * 130), "sequence_id"),
        (body(sequence_id=7, window=3), "window is given with a sequence_id"),
        (body(sequence_id=7, tolerance=0), "tolerance is given with a sequence_id"),
        (body(sequence_id=7, truncated=True), "truncated is given with a sequence_id"),
        (body(sequence_id=7, sequence_start=True, expected_position=3), "sequence_start starts at position 0"),
        (body(sequence_id=7, expected_position=-1), "expected_position is -1"),
        ({"inputs": []}, "give exactly one of the inputs tokens, text, events; found none of them"),
        ({}, "inputs is missing"),
        ({"inputs": [TOKENS], "id": 7}, "id is 7, but must be a string"),
        ({"inputs": [TOKENS], "other": 7}, "other: there is no such field"),
        ({"inputs": [{**TOKENS, "other": 7}]}, "inputs[0].other: there is no such field"),
        ({"inputs": [{**TOKENS, "shape": 3}]}, "inputs[0].shape is 3, but must be a list"),
        ({"inputs": [{**TOKENS, "parameters": 3}]}, "inputs[0].parameters is 3, but must be an object"),
        ({"inputs": [{"name": "tokens"}]}, "inputs[0].shape is missing"),
        ([], "the body must be a JSON object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_request_is_400_and_names_the_place(client: httpx.AsyncClient, given: Any, said: str) -> None:
    assert said in error(await client.post(INFER, json=given))


async def test_invalid_json_is_400(client: httpx.AsyncClient) -> None:
    assert "line 1" in error(await client.post(INFER, content=b"{,"), code="not_json")
    assert error(await client.post(INFER, content=b""), code="not_json")
    nan = json.dumps(body({**TOKENS, "data": [5, float("nan"), 7]}))
    assert "tokens: data holds nan" in error(await client.post(INFER, content=nan))
    nan = json.dumps(body(tolerance=float("nan")))
    assert "tolerance is nan, but must be a number from 0 to 1" in error(await client.post(INFER, content=nan))


@pytest.mark.parametrize("length", ["0", "-1", "x", "1000000", ""])
async def test_a_bad_header_length_is_400_and_names_the_header(client: httpx.AsyncClient, length: str) -> None:
    response = await client.post(INFER, json=body(), headers={"inference-header-content-length": length})
    assert "inference-header-content-length" in error(response)


async def test_a_body_over_the_limit_is_413(client: httpx.AsyncClient) -> None:
    assert error(await client.post(INFER, content=b" " * 65537), 413, "too_large")


async def test_an_unknown_model_is_404(client: httpx.AsyncClient) -> None:
    assert "'nobody'" in error(await client.post("/v2/models/nobody/infer", json=body()), 404, "unknown_model")
    for path in ("", "/config", "/stats", "/ready", "/versions/3"):
        assert error(await client.get(f"/v2/models/nobody{path}"), 404, "unknown_model")


async def test_another_method_is_405(client: httpx.AsyncClient) -> None:
    response = await client.get(INFER)
    assert error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


async def test_an_unknown_path_has_the_protocol_s_shape(client: httpx.AsyncClient) -> None:
    for path in ("/v2/", "/v2/nowhere", "/v2/models/fake/nowhere"):
        assert error(await client.get(path), 404, "not_found")


async def test_an_unknown_sequence_is_400_and_named(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.failure = UnknownSession("gone")
    assert "there is no sequence '7'" in error(await client.post(INFER, json=body(sequence_id=7)))


async def test_a_sequence_that_others_keep_starting_is_409(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.failure = SessionExists("it exists")
    given = body(sequence_id=7, sequence_start=True)
    assert error(await client.post(INFER, json=given), 409, "session_exists")


# Health


async def test_the_server_is_not_ready_while_it_drains(client: httpx.AsyncClient, registry: FakeRegistry) -> None:
    assert (await client.get("/v2/health/ready")).json() == {"ready": True}
    registry.leave()
    assert error(await client.get("/v2/health/ready"), 503, "unavailable")
    assert (await client.get("/v2/health/live")).json() == {"live": True}


async def test_every_get_route_takes_head(client: httpx.AsyncClient) -> None:
    model = "/v2/models/fake"
    paths = ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", model]
    paths += [f"{model}{of}" for of in ("/ready", "/config", "/stats")]
    paths += [f"{model}/versions/3{of}" for of in ("", "/ready", "/config", "/stats")]
    for path in paths:
        whole, head = await client.get(path), await client.head(path)
        assert (whole.status_code, head.status_code) == (200, 200), path


# Keys


async def test_keys_separate_the_sequences_of_their_owners() -> None:
    settings = Settings.read({"WANE_API_KEYS": "alice:alice-key,bob:bob-key"})
    models = FakeRegistry()
    app = create_app(settings, cast(ModelRegistry, models), Metrics(), on_load_failure=never)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://wane") as client:
        assert error(await client.post(INFER, json=body()), 401, "unauthorized")
        for name in ("alice", "bob"):
            headers = {"authorization": f"Bearer {name}-key"}
            assert (await client.post(INFER, json=body(sequence_id=7), headers=headers)).status_code == 200
        assert [cast(StepRequest, one).session for one in models.engine.asked] == ["alice/fake:7", "bob/fake:7"]


# With a real socket


def test_a_binary_request_in_one_packet(http: httpx.Client) -> None:
    name = http.get("/v1/models").json()["data"][0]["id"]
    head = json.dumps(
        {"inputs": [{"name": "tokens", "shape": [1, 2], "datatype": "INT64", "parameters": {"binary_data_size": 16}}]}
    ).encode()
    content = head + np.array([5, 6]).tobytes()
    headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
    response = http.post(f"/v2/models/{name}/infer", content=content, headers=headers)
    native = http.post("/v1/predict", json={"tokens": [5, 6], "top_k": 16}).json()
    assert response.json()["outputs"][0]["data"] == [one["token_id"] for one in native["predictions"]]


def test_a_large_request_is_read_by_the_framework(http: httpx.Client) -> None:
    name = http.get("/v1/models").json()["data"][0]["id"]
    rows = [[5 + index % 90 for index in range(200)]] * 60
    given = {"inputs": [{"name": "tokens", "shape": [60, 200], "datatype": "INT64", "data": rows}]}
    assert len(json.dumps(given)) > 1 << 15
    answered = http.post(f"/v2/models/{name}/infer", json=given).json()
    assert answered["outputs"][3]["data"] == [200] * 60
