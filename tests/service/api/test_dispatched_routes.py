"""Routes that are called without the framework are the ones that it describes, behind the same middleware."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from tests.service.fake_engine import FakeEngine
from tests.service.problems import assert_problem
from wane.service.app import DISPATCHED, ROUTERS, Application

STEP = "/v1/sessions/s/tokens"


def test_every_dispatched_route_is_described(app: Application) -> None:
    described = {path for path, operations in app.openapi()["paths"].items() if "post" in operations}
    dispatched = [
        route
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, Route) and route.endpoint in DISPATCHED
    ]
    assert len(dispatched) == len(DISPATCHED)
    assert {route.path for route in dispatched} <= described
    for route in dispatched:
        path = route.path.replace("{session}", "a")
        assert app.dispatcher.matches({"type": "http", "method": "POST", "path": path})


@pytest.mark.parametrize("path", [STEP, "/v1/predict"])
async def test_a_dispatched_route_never_reaches_the_framework(
    app: Application, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def refuse(*_: object) -> None:
        raise AssertionError("the framework was asked")

    with monkeypatch.context() as patch:
        patch.setattr(FastAPI, "__call__", refuse)
        response = await client.post(path, json={"tokens": [1]}, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "mine"


async def test_a_dispatched_route_is_counted_by_its_template(client: httpx.AsyncClient) -> None:
    await client.post("/v1/sessions/very-special/tokens", json={"tokens": [1]})
    metrics = (await client.get("/metrics")).text
    assert 'method="POST",route="/v1/sessions/{session}/tokens",status="200"' in metrics
    assert "very-special" not in metrics


@pytest.mark.parametrize("path", [f"{STEP}/", f"{STEP}/x", "/v1/sessions/a/b/tokens", "/v1/predict/"])
async def test_a_path_that_only_resembles_a_dispatched_route_is_not_found(client: httpx.AsyncClient, path: str) -> None:
    assert_problem(await client.post(path, json={"tokens": [1]}), 404, "not_found")


async def test_a_session_s_id_is_read_from_the_path(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = (await client.post("/v1/sessions/%61~b/tokens", json={"tokens": [1]})).json()
    assert answer["session"] == "a~b"
