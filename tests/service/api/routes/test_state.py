"""Tests of the route that returns a session's state, with a real server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest


@pytest.fixture
def session(http: httpx.Client) -> Iterator[str]:
    """The path of a session that has received three tokens."""
    name = http.post("/v1/sessions", json={"model": "gated-stable"}).json()["session"]
    path = f"/v1/sessions/{name}"
    http.post(f"{path}/tokens", json={"tokens": [5, 6, 7]}).raise_for_status()
    yield path
    http.delete(path)


def test_the_state_is_exact_in_json_and_reading_it_changes_nothing(http: httpx.Client, session: str) -> None:
    step = {"tokens": [8], "expected_position": 3}
    first = http.post(f"{session}/tokens", json=step).json()
    before = http.get(session).json()
    state = http.get(f"{session}/state").json()
    hidden = np.array(state.pop("hidden"))
    assert hidden.shape == (http.get("/v1/models/gated-stable").json()["parameters"]["hidden"],)
    assert (hidden == hidden.astype(np.float32)).all()
    assert state == {
        "model": "gated-stable",
        "model_version": before["model_version"],
        "device": before["device"],
        "session": before["session"],
        "position": 4,
        "state": "resident",
        "state_error_bound": 0.0,
    }
    assert http.get(f"{session}/state").json()["hidden"] == hidden.tolist()
    after = http.get(session).json()
    assert after.pop("idle_s") >= before.pop("idle_s")
    assert after == before
    again = http.post(f"{session}/tokens", json=step).json()
    assert (again["replayed"], again["predictions"]) == (True, first["predictions"])


def test_sessions_of_the_same_tokens_have_the_same_state(http: httpx.Client, session: str) -> None:
    body = {"model": "gated-stable", "history": [5, 6, 7], "position": 3}
    rebuilt = http.post("/v1/sessions", json=body).json()["session"]
    found = [http.get(f"{path}/state").json() for path in (session, f"/v1/sessions/{rebuilt}")]
    assert [one["state"] for one in found] == ["resident", "rebuilt"]
    assert found[0]["hidden"] == found[1]["hidden"]


def test_the_state_of_an_unknown_session_is_a_problem_document(http: httpx.Client) -> None:
    refused = http.get("/v1/sessions/nowhere/state")
    assert (refused.status_code, refused.json()["code"]) == (404, "unknown_session")
