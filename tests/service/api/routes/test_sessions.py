"""Tests of the creation of sessions over HTTP: with a history, without one, and with a repeated request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.service.fake_engine import FakeEngine
from tests.service.live_server import LiveServer
from tests.service.problems import assert_problem
from wane.service.types.common import Mode
from wane.service.types.request import History

MODEL = "rnn-stable"


async def test_the_history_and_the_position_of_a_new_session_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for body in ({"history": [7, 8]}, {"input": "ab"}):
        answer = await client.post("/v1/sessions", json={**body, "session": "s", "mode": "both", "position": 5})
        assert (answer.status_code, answer.headers["location"]) == (201, "/v1/sessions/s")
    assert engine.asked == [("s", Mode.BOTH, History((7, 8), 5)), ("s", Mode.BOTH, History((97, 98), 5))]


# The real server and the real models.


@pytest.fixture
def session(http: httpx.Client) -> Iterator[str]:
    """The name of a session that the test may create. The fixture deletes the session after the test, if it exists."""
    yield "brought-back"
    http.delete("/v1/sessions/brought-back")


@pytest.fixture
def curve(http: httpx.Client) -> list[float]:
    """The certificate's error bound for every window length. Item 0 is the bound for a window of one token."""
    bounds: list[float] = http.get(f"/v1/models/{MODEL}").json()["certificate"]["error_bound"]
    return bounds


def predicted(answer: dict[str, Any]) -> dict[int, object]:
    return {one["token_id"]: pytest.approx(one["logprob"], abs=1e-4) for one in answer["predictions"]}


def test_a_session_with_a_history_continues_a_truncated_sequence(
    live: LiveServer, http: httpx.Client, session: str, curve: list[float]
) -> None:
    body = {"model": MODEL, "session": session, "history": [5, 6, 7], "position": 20}
    created = http.post("/v1/sessions", json=body)
    document = created.json()
    assert (created.status_code, document["position"]) == (201, 20)
    assert (document["state"], document["error_bound"]) == ("rebuilt", curve[2])
    again = http.post("/v1/sessions", json=body)
    assert (again.status_code, again.json() | {"idle_s": 0.0}) == (200, document | {"idle_s": 0.0})

    def truncated(*tokens: int) -> dict[str, Any]:
        asked = {"model": MODEL, "tokens": tokens, "mode": "recurrent", "truncated": True}
        answer: dict[str, Any] = http.post("/v1/predict", json=asked).json()
        return answer

    path = f"/v1/sessions/{session}"
    answers = [http.post(f"{path}/tokens", json={"tokens": [8], "expected_position": 20}).json()]
    step = {"session": session, "tokens": [9], "expected_position": 21}
    answers.append(http.post("/v1/sessions/tokens", json={"steps": [step]}).json()["results"][0])
    url = live.url.replace("http", "ws", 1)
    with connect(f"{url}{path}/stream", proxy=None) as socket:
        socket.send(json.dumps({"tokens": [10], "expected_position": 22}))
        answers.append(json.loads(socket.recv()))
        socket.send(json.dumps({"rewind": 19}))
        rewound = json.loads(socket.recv())
    for known, answer in enumerate(answers, 4):
        assert (answer["position"], answer["error_bound"]) == (17 + known, curve[known - 1])
        assert predicted(answer) == predicted(truncated(*range(5, 5 + known)))
    assert (rewound["position"], rewound["error_bound"]) == (19, curve[1])
    assert predicted(rewound) == predicted(truncated(5, 6))
    assert http.get(path).json()["error_bound"] == curve[1]


def test_a_history_of_all_tokens_is_the_whole_sequence(http: httpx.Client, session: str) -> None:
    text = "The history of the"
    whole = http.post("/v1/predict", json={"model": MODEL, "input": text, "mode": "recurrent"}).json()
    scored = http.post("/v1/score", json={"model": MODEL, "input": text}).json()
    body = {"model": MODEL, "session": session, "input": text, "position": len(scored["tokens"])}
    assert http.post("/v1/sessions", json=body).json()["error_bound"] == 0.0
    answer = http.post("/v1/predict", json={"session": session}).json()
    assert (answer["error_bound"], predicted(answer)) == (0.0, predicted(whole))


def test_a_repeated_creation_with_other_options_is_refused(http: httpx.Client, session: str) -> None:
    body = {"model": MODEL, "session": session, "history": [5, 6, 7], "position": 20}
    http.post("/v1/sessions", json=body).raise_for_status()
    for change in (
        {"position": 21},
        {"history": [5, 6, 8]},
        {"history": [6, 7]},
        {"mode": "window"},
        {"model": "lstm"},
        {"history": None, "position": None},
    ):
        assert_problem(http.post("/v1/sessions", json={**body, **change}), 409, "session_exists")
    assert http.post("/v1/sessions", json={**body, "mode": "auto"}).status_code == 200
    http.post(f"/v1/sessions/{session}/tokens", json={"tokens": [8]}).raise_for_status()
    assert_problem(http.post("/v1/sessions", json=body), 409, "session_exists")
