"""Tests of requests with steps of many sessions, over the fake engine and over the real models."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service.fake_engine import FakeEngine, FakeRegistry
from tests.service.problems import assert_members, assert_problem
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


@pytest.mark.parametrize("name", ["x-wane-position", "idempotency-key"])
async def test_a_header_for_a_single_step_is_refused_for_many_steps(client: httpx.AsyncClient, name: str) -> None:
    response = await client.post(PATH, json={"steps": [{"session": "a", "tokens": [1]}]}, headers={name: "1"})
    assert assert_problem(response, 422, "invalid_request")["field"] == name
