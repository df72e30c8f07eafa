"""Tests of requests with steps of many sessions, over the fake engine and over the real models."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service.fake_engine import FakeEngine, FakeRegistry
from tests.service.problems import assert_members, assert_problem
from wane.service.errors import PositionConflict, Unavailable
from wane.service.types.common import Mode
from wane.service.types.request import StepRequest

PATH = "/v1/sessions/tokens"


async def test_each_step_of_a_call_is_answered_like_a_single_step(client: httpx.AsyncClient) -> None:
    steps: list[dict[str, Any]] = [{"session": "a", "tokens": [1]}, {"session": "b", "input": "xyz"}]
    results = (await client.post(PATH, json={"steps": steps})).json()["results"]
    for step, result in zip(steps, results, strict=True):
        session = step.pop("session")
        assert result == (await client.post(f"/v1/sessions/{session}/tokens", json=step)).json()


async def test_the_options_of_a_step_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    step = {"session": "s", "tokens": [1], "top_k": 2, "mode": "both", "expected_position": 4, "idempotency_key": "k"}
    await client.post(PATH, json={"steps": [step]}, headers={"x-request-timeout-ms": "5000"})
    (asked,) = engine.asked
    assert isinstance(asked, StepRequest) and asked.deadline is not None
    assert asked == StepRequest("s", (1,), Mode.BOTH, 4, "k", 2, asked.deadline)


async def test_a_failed_step_fails_only_its_session_s_later_steps(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    steps = [
        {"session": "a", "tokens": [1]},
        {"session": "a", "tokens": []},
        {"session": "unknown", "tokens": [1]},
        {"session": "a", "tokens": [2]},
        {"session": "b", "tokens": [3]},
    ]
    first, empty, unknown, later, last = (await client.post(PATH, json={"steps": steps})).json()["results"]
    assert first["session"] == "a" and last["session"] == "b"
    assert_members(empty["error"], 422, "invalid_request")
    assert_members(unknown["error"], 404, "unknown_session")
    assert_members(later["error"], 409, "earlier_step_failed")
    assert [request.tokens for request in engine.asked if isinstance(request, StepRequest)] == [(1,), (3,)]


async def test_a_session_s_steps_run_on_one_engine_while_its_model_is_replaced(
    client: httpx.AsyncClient, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = FakeEngine(), FakeEngine()
    engines = iter((old, new))

    async def engine_for(session: str, model: str | None = None, deadline: float | None = None) -> FakeEngine:
        return next(engines)

    monkeypatch.setattr(registry, "engine_for", engine_for)
    await client.post(PATH, json={"steps": [{"session": "a", "tokens": [token]} for token in (1, 2)]})
    assert [request.tokens for request in old.asked if isinstance(request, StepRequest)] == [(1,), (2,)]
    assert not new.asked


async def test_an_error_of_the_engine_is_answered_in_the_step_s_place(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.failure = PositionConflict("elsewhere", 12)
    response = await client.post(PATH, json={"steps": [{"session": "a", "tokens": [1]}]})
    assert response.status_code == 200
    (result,) = response.json()["results"]
    assert_members(result["error"], 409, "position_conflict")
    assert result["error"]["position"] == 12


async def test_a_server_without_models_refuses_the_whole_call(
    client: httpx.AsyncClient, registry: FakeRegistry
) -> None:
    registry.failure = Unavailable("loading")
    response = await client.post(PATH, json={"steps": [{"session": "a", "tokens": [1]}]})
    assert_problem(response, 503, "unavailable")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"steps": []}, "steps"),
        ({"steps": [{"session": "a", "tokens": [1]}, {"tokens": [1]}]}, "steps[1].session"),
        ({"steps": [{"session": "a"}]}, "steps[0]"),
        ({"steps": [{"session": "a", "tokens": [1], "temprature": 1}]}, "steps[0].temprature"),
        ({"steps": [{"session": "a", "tokens": [1, "x"]}]}, "steps[0].tokens[1]"),
        ({"steps": [{"session": "a", "tokens": [1]}] * 257}, "steps"),
    ],
    ids=["none", "no session", "no tokens", "an unknown field", "not a token id", "too many"],
)
async def test_an_invalid_call_is_refused_as_a_whole(
    client: httpx.AsyncClient, engine: FakeEngine, body: object, field: str
) -> None:
    document = assert_problem(await client.post(PATH, json=body), 422, "invalid_request")
    assert document["field"] == field
    assert engine.asked == []


@pytest.mark.parametrize("name", ["x-wane-position", "idempotency-key"])
async def test_a_header_for_a_single_step_is_refused_for_many_steps(client: httpx.AsyncClient, name: str) -> None:
    response = await client.post(PATH, json={"steps": [{"session": "a", "tokens": [1]}]}, headers={name: "1"})
    assert assert_problem(response, 422, "invalid_request")["field"] == name


def test_real_sessions_stepped_together_answer_like_single_steps(http: httpx.Client) -> None:
    def new() -> str:
        session: str = http.post("/v1/sessions", json={}).json()["session"]
        return session

    def comparable(document: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in document.items() if name not in ("latency", "session", "predictions")}

    together, alone = [new() for _ in range(5)], [new() for _ in range(5)]
    steps = [(0, 5), (1, 6), (2, 7), (0, 8), (3, 9), (4, 5), (0, 6)]
    body = {"steps": [{"session": together[session], "tokens": [token]} for session, token in steps]}
    results = http.post(PATH, json=body).json()["results"]
    for (session, token), result in zip(steps, results, strict=True):
        single = http.post(f"/v1/sessions/{alone[session]}/tokens", json={"tokens": [token]}).json()
        assert comparable(result) == comparable(single)
        for one, other in zip(result["predictions"], single["predictions"], strict=True):
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
    assert http.get(f"/v1/sessions/{together[0]}").json()["position"] == 3
