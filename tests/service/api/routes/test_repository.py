"""Tests of the model repository over HTTP. The server describes an error in the document format of the repository
protocol."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.service.fake_engine import FakeRegistry
from tests.service.live_server import TIMEOUT_S, live_server
from tests.service.versions import MODEL, put, retokenize
from wane.service.errors import LoadFailed, Unavailable

ROUTES = ("/v2/repository/index", "/v2/repository/models/fake/load", "/v2/repository/models/fake/unload")


def assert_error(response: httpx.Response, status: int, code: str) -> str:
    """Checks all fields of an error response's document. Returns the error message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    document: dict[str, Any] = response.json()
    assert document["code"] == code
    assert document["retryable"] is (status in (429, 503, 504))
    assert document["request_id"] == response.headers["x-request-id"]
    assert ("retry-after" in response.headers) == (status in (429, 503))
    error: str = document["error"]
    return error


@pytest.mark.parametrize("body", [b"", b"{}"], ids=["empty", "object"])
async def test_the_index_lists_every_version(client: httpx.AsyncClient, body: bytes) -> None:
    answered = await client.post(ROUTES[0], content=body)
    assert answered.json() == [
        {"name": "fake", "version": "3", "state": "READY", "reason": ""},
        {"name": "fake", "version": "4", "state": "LOADING", "reason": ""},
        {"name": "other", "version": "", "state": "UNAVAILABLE", "reason": "its manifest is not JSON"},
    ]


async def test_the_index_lists_only_ready_models_on_request(client: httpx.AsyncClient) -> None:
    answered = await client.post(ROUTES[0], json={"ready": True})
    assert [entry["state"] for entry in answered.json()] == ["READY"]


async def test_a_load_and_an_unload_answer_with_the_model_s_state(client: httpx.AsyncClient) -> None:
    assert (await client.post(ROUTES[1])).json() == {"name": "fake", "version": "3", "state": "READY"}
    unload = await client.post(ROUTES[2], json={"parameters": {"unload_dependents": False}})
    assert unload.json() == {"name": "fake", "state": "UNAVAILABLE"}


@pytest.mark.parametrize("path", ROUTES)
async def test_failures_have_the_protocol_s_shape(client: httpx.AsyncClient, registry: FakeRegistry, path: str) -> None:
    assert "line 1" in assert_error(await client.post(path, content=b"{,"), 400, "not_json")
    assert "there is no such field" in assert_error(await client.post(path, json={"redy": 1}), 400, "invalid_request")
    assert_error(await client.post(path, content=b" " * 65537), 413, "too_large")
    refused = await client.get(path)
    assert_error(refused, 405, "method_not_allowed")
    assert refused.headers["allow"] == "POST"
    registry.failure = Unavailable("going away")
    assert assert_error(await client.post(path), 503, "unavailable") == "going away"
    registry.failure = RuntimeError("a secret")
    assert "secret" not in assert_error(await client.post(path), 500, "internal")


async def test_a_failed_load_has_the_reason(client: httpx.AsyncClient, registry: FakeRegistry) -> None:
    registry.failure = LoadFailed("fake", "its weights are missing")
    error = assert_error(await client.post(ROUTES[1]), 400, "load_failed")
    assert error == "model 'fake' was not loaded: its weights are missing"


async def test_unknown_models_and_paths_have_the_protocol_s_shape(client: httpx.AsyncClient) -> None:
    for action in ("load", "unload"):
        assert_error(await client.post(f"/v2/repository/models/nobody/{action}"), 404, "unknown_model")
    assert_error(await client.post("/v2/repository"), 404, "not_found")


async def test_the_probe_of_a_model_answers_whether_it_is_ready(
    client: httpx.AsyncClient, registry: FakeRegistry
) -> None:
    answered = await client.get("/v2/models/fake/ready")
    assert (answered.status_code, answered.json()) == (200, {"name": "fake", "ready": True})
    assert (await client.head("/v2/models/fake/ready")).status_code == 200
    assert_error(await client.get("/v2/models/nobody/ready"), 404, "unknown_model")
    registry.leave()
    assert_error(await client.get("/v2/models/fake/ready"), 503, "unavailable")
    registry.failure = Unavailable("the server is loading model 'fake'")
    assert "loading" in assert_error(await client.get("/v2/models/fake/ready"), 503, "unavailable")


async def test_a_load_takes_no_parameters(client: httpx.AsyncClient) -> None:
    response = await client.post(ROUTES[1], json={"parameters": {"config": "{}"}})
    assert "parameters" in assert_error(response, 400, "invalid_request")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, str, Path]]:
    """A client of a real server, the server's URL, and the server's folder of bundles."""
    folder = tmp_path_factory.mktemp("served") / "bundles"
    folder.mkdir()
    put(folder, "1")
    before = os.environ.get("WANE_BUNDLES")
    with (
        live_server(WANE_BUNDLES=str(folder)) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client,
    ):
        yield client, server.url, folder
    assert os.environ.get("WANE_BUNDLES") == before


def test_sessions_and_sockets_survive_a_load_and_answers_have_the_version(
    served: tuple[httpx.Client, str, Path],
) -> None:
    client, url, folder = served
    load, stale = f"/v2/repository/models/{MODEL}/load", "/v1/sessions/one"
    for session in ("one", "two"):
        assert client.post("/v1/sessions", json={"session": session}).json()["model_version"] == "1"
    with connect(f"{url.replace('http', 'ws')}/v1/sessions/two/stream") as socket:

        def message(*tokens: int) -> dict[str, Any]:
            socket.send(json.dumps({"tokens": tokens}))
            answer: dict[str, Any] = json.loads(socket.recv())
            return answer

        assert message(5, 6)["model_version"] == "1"
        assert client.post(f"{stale}/tokens", json={"tokens": [5, 6]}).json()["model_version"] == "1"
        put(folder, "2", "lstm")
        assert client.post(load).json() == {"name": MODEL, "version": "2", "state": "READY"}
        answers = [message(7), client.post(f"{stale}/tokens", json={"tokens": [7]}).json()]
        for answer in answers:
            assert (answer["model_version"], answer["position"], answer["state"]) == ("2", 3, "rebuilt")
        assert message(8)["state"] == "resident"
        retokenize(put(folder, "3"))
        assert client.post(load).json()["version"] == "3"
        assert (message(9)["model_version"], message(10)["model_version"]) == ("2", "2")
    assert client.get(stale).json()["model_version"] == "2"
    fresh: dict[str, object] = client.post("/v1/sessions", json={"session": "three"}).json()
    assert fresh["model_version"] == "3"
    bodies: dict[str, dict[str, object]] = {
        "/v1/predict": {"tokens": [5]},
        "/v1/score": {"tokens": [5, 6]},
        "/v1/generate": {"tokens": [5], "max_tokens": 1},
        "/v1/sessions/three/tokens": {"tokens": [5]},
        "/v1/sessions/three/rewind": {"position": 1},
    }
    for path, body in bodies.items():
        assert client.post(path, json=body).json()["model_version"] == "3", path
    many = client.post("/v1/sessions/tokens", json={"steps": [{"session": s, "tokens": [5]} for s in ("one", "three")]})
    assert [result["model_version"] for result in many.json()["results"]] == ["2", "3"]
    compared = client.post("/v1/compare", json={"tokens": [5], "windows": [1], "repeat": 1}).json()
    assert compared["models"][0]["model_version"] == "3"
    assert client.get("/v1/models").json()["data"][0]["model_version"] == "3"
    assert client.get("/readyz").json()["models"][0]["model_version"] == "3"
    index = client.post("/v2/repository/index").json()
    assert [(entry["version"], entry["state"]) for entry in index] == [("2", "READY"), ("3", "READY")]


def test_a_corrupt_bundle_is_refused_without_effect(
    served: tuple[httpx.Client, str, Path],
) -> None:
    client, _, folder = served
    before = client.get("/readyz").json()["models"]
    (put(folder, "4") / "step.onnx").write_bytes(b"no graph")
    error = assert_error(client.post(f"/v2/repository/models/{MODEL}/load"), 400, "load_failed")
    assert "step.onnx" in error and str(folder) not in error
    assert client.get("/readyz").json()["models"] == before
    assert client.post("/v1/predict", json={"tokens": [5]}).status_code == 200
