"""Tests that errors have the same document format on every route, whether the engine, the registry, the body's decoder
or the framework raises them."""

from __future__ import annotations

import json

import httpx
import pytest
from fastapi import FastAPI

from tests.service.fake_engine import FakeRegistry
from tests.service.problems import assert_problem, is_inference_protocol
from wane.service.errors import (
    REPR_MAX_CHARACTERS,
    Abandoned,
    DeadlineExceeded,
    EarlierStepFailed,
    IdempotencyKeyReused,
    InvalidRequest,
    LoadFailed,
    NotJson,
    Overloaded,
    PositionConflict,
    SessionExists,
    TokenizerChanged,
    TooLarge,
    Unavailable,
    UnknownModel,
    UnknownSession,
    truncate_repr,
)

# A valid request to every route on which the engine can fail. A test below fails if a route is missing from this list.
ENGINE_ROUTES: list[tuple[str, str, object]] = [
    ("POST", "/v1/predict", {"tokens": [1]}),
    ("POST", "/v1/predict", {"session": "s"}),
    ("POST", "/v1/compare", {"tokens": [1]}),
    ("POST", "/v1/score", {"tokens": [1]}),
    ("POST", "/v1/score", {"tokens": [1], "stream": True}),
    ("POST", "/v1/generate", {"tokens": [1]}),
    ("POST", "/v1/generate", {"tokens": [1], "stream": True}),
    ("POST", "/v1/sessions", {}),
    ("GET", "/v1/sessions/s", None),
    ("DELETE", "/v1/sessions/s", None),
    ("GET", "/v1/sessions/s/state", None),
    ("POST", "/v1/sessions/s/tokens", {"tokens": [1]}),
    ("POST", "/v1/sessions/s/rewind", {"position": 0}),
    ("POST", "/v1/sessions/s/fork", {"position": 0}),
    ("POST", "/v1/sessions/s/continuations", {"continuations": [[5]]}),
]
CATALOG_ROUTES: list[tuple[str, str, object]] = [
    *ENGINE_ROUTES,
    ("POST", "/v1/sessions/tokens", {"steps": [{"session": "s", "tokens": [1]}]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/fake", None),
    ("GET", "/v1/models/fake/vocabulary", None),
    ("GET", "/v1/report", None),
]
OPENAI = {"/v1/completions", "/tokenize", "/detokenize", "/tokenizer_info"}
INFALLIBLE = {"/healthz", "/readyz", "/metrics"}
BODIES = [path for method, path, _ in dict.fromkeys((m, p, None) for m, p, _ in CATALOG_ROUTES) if method == "POST"]
FAILURES = [
    (InvalidRequest("no", "tokens"), 422, "invalid_request"),
    (UnknownModel("no"), 404, "unknown_model"),
    (UnknownSession("no"), 404, "unknown_session"),
    (SessionExists("no"), 409, "session_exists"),
    (PositionConflict("no", 7), 409, "position_conflict"),
    (IdempotencyKeyReused("no", 7), 409, "idempotency_key_reused"),
    (EarlierStepFailed("s"), 409, "earlier_step_failed"),
    (TokenizerChanged("s", "m", "2"), 409, "tokenizer_changed"),
    (LoadFailed("m", "no"), 422, "load_failed"),
    (TooLarge("no"), 413, "too_large"),
    (Overloaded("no", 2.5), 429, "overloaded"),
    (Unavailable("no"), 503, "unavailable"),
    (DeadlineExceeded("no"), 504, "deadline_exceeded"),
    (Abandoned("no"), 499, "abandoned"),
    (NotJson("no"), 400, "not_json"),
    (RuntimeError("a secret"), 500, "internal"),
]


def named(case: tuple[str, str, object]) -> str:
    method, path, body = case
    return f"{method} {path} {json.dumps(body)}"


@pytest.mark.parametrize(
    ("route", "of", "failure"),
    [(route, "engine", failure) for route in ENGINE_ROUTES for failure in FAILURES]
    + [(route, "registry", failure) for route in CATALOG_ROUTES for failure in (FAILURES[11], FAILURES[15])],
    ids=lambda case: case if isinstance(case, str) else case[2] if isinstance(case[0], Exception) else named(case),
)
async def test_errors_of_the_engine_and_of_the_registry_have_one_shape(
    client: httpx.AsyncClient,
    registry: FakeRegistry,
    route: tuple[str, str, object],
    of: str,
    failure: tuple[Exception, int, str],
) -> None:
    method, path, body = route
    error, status, code = failure
    (registry.engine if of == "engine" else registry).failure = error
    document = assert_problem(await client.request(method, path, json=body), status, code)
    assert "secret" not in str(document)


def test_these_tests_cover_every_route(app: FastAPI) -> None:
    tested = {(method, path.replace("/s/", "/{session}/")) for method, path, _ in CATALOG_ROUTES}
    tested = {(m, "/v1/sessions/{session}" if p == "/v1/sessions/s" else p) for m, p in tested}
    tested = {(m, p.replace("/v1/models/fake", "/v1/models/{name}")) for m, p in tested}
    described = {
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        # The routes in INFALLIBLE raise no error. The other paths that are left out here are tested in
        # test_repository.py, test_inference.py and test_completions.py.
        if path not in INFALLIBLE and not is_inference_protocol(path) and path not in OPENAI
    }
    assert described == tested


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_that_is_not_json_is_a_problem_with_the_place(client: httpx.AsyncClient, path: str) -> None:
    document = assert_problem(await client.post(path, content=b'{"input": "a",,}'), 400, "not_json")
    assert "line 1 column 15" in document["detail"]


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_field_is_a_problem_with_its_name(client: httpx.AsyncClient, path: str) -> None:
    document = assert_problem(await client.post(path, json={"temprature": 1}), 422, "invalid_request")
    assert document["field"] == "temprature"


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_over_the_limit_is_a_problem(client: httpx.AsyncClient, path: str) -> None:
    assert_problem(await client.post(path, content=b" " * 65537), 413, "too_large")


@pytest.mark.parametrize("path", ["/v1", "/v1/predict/", "/v3", "/favicon.ico", "/v1/sessions/s/t/u"])
async def test_an_unknown_path_is_a_problem(client: httpx.AsyncClient, path: str) -> None:
    assert_problem(await client.get(path), 404, "not_found")


@pytest.mark.parametrize("path", sorted({path for _, path, _ in CATALOG_ROUTES} | {"/", "/healthz", "/metrics"}))
async def test_an_unsupported_method_is_a_problem(client: httpx.AsyncClient, path: str) -> None:
    response = await client.patch(path)
    assert_problem(response, 405, "method_not_allowed")
    assert response.headers["allow"]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/sessions/s", "DELETE, GET, HEAD"),
        ("/v1/sessions", "POST"),
        ("/readyz", "GET, HEAD"),
        ("/v1/models/m", "GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
    ],
)
async def test_an_unsupported_method_is_answered_with_the_supported_ones(
    client: httpx.AsyncClient, path: str, allowed: str
) -> None:
    assert (await client.put(path)).headers["allow"] == allowed


@pytest.mark.parametrize(
    "value", ["first", "1.5", "-1", "", "9" * 5000], ids=["word", "fraction", "negative", "empty", "huge"]
)
async def test_an_invalid_position_header_is_a_problem(client: httpx.AsyncClient, value: str) -> None:
    response = await client.post("/v1/sessions/s/tokens", json={"tokens": [1]}, headers={"x-wane-position": value})
    assert assert_problem(response, 422, "invalid_request")["field"] == "x-wane-position"


def test_long_values_in_messages_are_truncated() -> None:
    assert truncate_repr("a b") == "'a b'"
    assert truncate_repr("x" * REPR_MAX_CHARACTERS) == repr("x" * REPR_MAX_CHARACTERS)
    assert truncate_repr("x" * (REPR_MAX_CHARACTERS + 1)) == "'" + "x" * (REPR_MAX_CHARACTERS - 1) + "..."
    assert truncate_repr(10**4000) == "1" + "0" * (REPR_MAX_CHARACTERS - 1) + "..."


async def test_a_position_conflict_has_the_session_s_position(
    client: httpx.AsyncClient, registry: FakeRegistry
) -> None:
    registry.engine.failure = PositionConflict("elsewhere", 12)
    response = await client.post("/v1/sessions/s/tokens", json={"tokens": [1]})
    assert assert_problem(response, 409, "position_conflict")["position"] == 12


async def test_retry_after_is_whole_seconds_rounded_up(client: httpx.AsyncClient, registry: FakeRegistry) -> None:
    registry.engine.failure = Overloaded("full", retry_after_s=2.1)
    response = await client.post("/v1/predict", json={"tokens": [1]})
    assert response.headers["retry-after"] == "3"


async def test_an_unexpected_failure_is_logged_with_its_traceback_and_request_id(
    client: httpx.AsyncClient, registry: FakeRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.engine.failure = RuntimeError("a secret")
    await client.post("/v1/predict", json={"tokens": [1]}, headers={"x-request-id": "abc"})
    (record,) = [record for record in caplog.records if record.getMessage() == "unexpected failure"]
    assert record.exc_info is not None and record.exc_info[1] is registry.engine.failure
    assert vars(record)["fields"] == {"request_id": "abc"}


async def test_a_failed_item_is_not_logged_as_the_request_s_failure(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    response = await client.post("/v1/predict", json={"inputs": ["a", [], ""]})
    assert response.status_code == 200 and "error" in response.json()["results"][2]
    (fields,) = [vars(record)["fields"] for record in caplog.records if record.name == "wane.access"]
    assert "error" not in fields


async def test_a_failure_after_the_first_byte_is_an_event(
    client: httpx.AsyncClient, registry: FakeRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    registry.engine.failure_after_first_token = Unavailable("going away")
    response = await client.post("/v1/generate", json={"tokens": [1], "stream": True})
    assert response.status_code == 200
    *_, last = response.text.strip().split("\n\n")
    name, data = last.split("\n")
    document = json.loads(data.removeprefix("data: "))
    assert name == "event: error"
    assert (document["code"], document["status"]) == ("unavailable", 503)
    assert document["request_id"] == response.headers["x-request-id"]
    (fields,) = [vars(record)["fields"] for record in caplog.records if record.name == "wane.access"]
    assert (fields["status"], fields["error"]) == (200, "unavailable")
