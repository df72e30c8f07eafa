"""Tests of the list of tested releases of uvicorn and websockets, and of a server on an untested release."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from importlib.metadata import version

import httpx
import pytest
from websockets.sync.client import connect

from tests.service.live_server import BUNDLE, ROOT, TIMEOUT_S, LiveServer, live_server
from wane.service.net.releases import NOT_IN_FORCE, TESTED, untested_releases
from wane.service.settings import Settings


def test_the_tested_releases_are_installed_and_the_only_allowed_releases() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, release in TESTED.items():
        assert version(name) == release
        assert [one for one in project["dependencies"] if one.startswith(name)] == [f"{name}=={release}"]
    assert untested_releases() == []


def test_the_warning_names_an_untested_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wane.service.net.releases.version", lambda name: "0.0.1")
    assert untested_releases() == ["uvicorn 0.0.1", "websockets 0.0.1"]


def test_the_limits_that_uvicorn_lacks_are_documented() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    section = text.partition("### Untested releases")[2].partition("\n#")[0]
    for name in (*NOT_IN_FORCE, "body_timeout_s"):
        assert name in Settings.model_fields and f"`WANE_{name.upper()}`" in section


@pytest.fixture(scope="module")
def untested() -> Iterator[LiveServer]:
    """The real server in a process that reports an untested version of uvicorn."""
    with live_server(plain_uvicorn=True, WANE_BUNDLES=BUNDLE, WANE_MAX_HEADER_BYTES="1024") as server:
        yield server


@pytest.fixture(scope="module")
def client(untested: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=untested.url, timeout=TIMEOUT_S) as client:
        yield client


def test_one_warning_names_the_release_and_the_limits_that_it_does_not_enforce(untested: LiveServer) -> None:
    lines = [json.loads(line) for line in untested.said]
    (warning,) = [line["message"] for line in lines if line["level"] == "warning"]
    assert "not tested with uvicorn 0.0.1, " in warning
    assert all(name in warning for name in (*NOT_IN_FORCE, "body_timeout_s"))


def test_a_limit_that_uvicorn_lacks_is_not_enforced(client: httpx.Client) -> None:
    assert client.get("/healthz", headers={"x-long": "y" * 3000}).status_code == 200


def test_predictions_steps_and_events_are_served(client: httpx.Client) -> None:
    assert client.post("/v1/predict", json={"tokens": [5]}).json()["predictions"]
    for session in "ab":
        client.post("/v1/sessions", json={"session": session}).raise_for_status()
    assert client.post("/v1/sessions/a/tokens", json={"tokens": [5]}).json()["position"] == 1
    conflict = client.post("/v1/sessions/a/tokens", json={"tokens": [5], "expected_position": 7})
    assert (conflict.status_code, conflict.json()["code"]) == (409, "position_conflict")
    steps = [{"session": session, "tokens": [5]} for session in "ab"]
    results = client.post("/v1/sessions/tokens", json={"steps": steps}).json()["results"]
    assert [result["position"] for result in results] == [2, 1]
    events = client.post("/v1/generate", json={"tokens": [5], "max_tokens": 3, "stream": True}).text
    assert (events.count("event: token"), events.count("event: finish")) == (3, 1)


def test_a_websocket_is_served(untested: LiveServer, client: httpx.Client) -> None:
    client.post("/v1/sessions", json={"session": "w"}).raise_for_status()
    with connect(untested.url.replace("http", "ws") + "/v1/sessions/w/stream", proxy=None) as socket:
        for position in (1, 2):
            socket.send(json.dumps({"tokens": [5]}))
            assert json.loads(socket.recv(TIMEOUT_S))["position"] == position
        socket.send(json.dumps({"tokens": [5] * 200}))
        assert json.loads(socket.recv(TIMEOUT_S))["position"] == 202
