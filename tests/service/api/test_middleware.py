"""Tests of the middleware: request ids, deadlines, body limits, the access log, and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.service.conftest import LIMIT
from tests.service.fake_engine import FakeEngine, FakeRegistry
from tests.service.problems import assert_problem
from wane.service.types.request import PredictRequest

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.name == "wane.access"]


@pytest.mark.parametrize("path", ["/healthz", "/", "/v1/models", "/nowhere", "/docs", "/v1/sessions/unknown"])
async def test_every_response_has_the_client_s_request_id(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"


async def test_a_request_without_an_id_receives_a_new_one(client: httpx.AsyncClient) -> None:
    ids = {(await client.get("/healthz")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize("wrong", ["", "two words", "x" * 129, "é"], ids=ascii)
async def test_an_invalid_request_id_is_replaced(client: httpx.AsyncClient, wrong: str) -> None:
    response = await client.get("/healthz", headers={b"x-request-id": wrong.encode()})
    assert response.headers["x-request-id"] != wrong


async def test_a_trace_id_is_logged_and_is_the_default_request_id(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    response = await client.get("/healthz", headers={"traceparent": TRACEPARENT})
    assert response.headers["x-request-id"] == TRACE
    (line,) = access_lines(caplog)
    assert line["trace_id"] == TRACE


async def test_each_request_is_one_line_in_the_access_log(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    response = await client.post("/v1/predict", json={"tokens": [1]}, headers={"x-request-id": "a"})
    (line,) = access_lines(caplog)
    assert line.pop("duration_ms") > 0
    assert line == {
        "request_id": "a",
        "trace_id": None,
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/predict",
        "status": 200,
        "bytes": len(response.content),
        "model": "fake",
        "mode": "auto",
        "state": "full",
        "batch_items": 0,
        "queue_ms": 0.25,
        "compute_ms": 0.5,
    }


async def test_requests_are_counted_for_each_route_and_not_for_each_path(client: httpx.AsyncClient) -> None:
    for session in ("a", "b"):
        await client.get(f"/v1/sessions/{session}")
    for path in ("/a", "/b"):
        await client.request("BREW", path)
    metrics = (await client.get("/metrics")).text
    assert 'route="/v1/sessions/{session}",status="200"' in metrics
    assert 'wane_http_requests_total{method="other",route="unmatched",status="404"} 2.0' in metrics
    assert "/v1/sessions/a" not in metrics


async def test_a_body_at_the_limit_is_read_and_a_longer_body_is_refused(client: httpx.AsyncClient) -> None:
    body = b'{"tokens": [1]}'
    assert (await client.post("/v1/predict", content=body.ljust(LIMIT))).status_code == 200
    response = await client.post("/v1/predict", content=body.ljust(LIMIT + 1))
    assert str(LIMIT) in assert_problem(response, 413, "too_large")["detail"]
    assert response.headers["connection"] == "close"


async def test_a_body_of_unknown_length_is_counted_as_it_arrives(client: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1024
            yield b" " * 1024

    assert_problem(await client.post("/v1/predict", content=endless()), 413, "too_large")
    assert sent == LIMIT + 1024


async def test_a_deadline_may_be_shortened_but_not_lengthened(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    now = asyncio.get_running_loop().time()
    for timeout in ("10000", "999999999"):
        await client.post("/v1/predict", json={"tokens": [1]}, headers={"x-request-timeout-ms": timeout})
    await client.post("/v1/predict", json={"tokens": [1]})
    deadlines = [request.deadline for request in engine.asked if isinstance(request, PredictRequest)]
    shortened, lengthened, default = (0 if deadline is None else deadline - now for deadline in deadlines)
    assert 10 <= shortened < 30 <= lengthened <= default


@pytest.mark.parametrize("wrong", ["0", "-5", "1.5", "1e3", "soon", "", "9" * 10])
async def test_an_invalid_timeout_is_refused(client: httpx.AsyncClient, wrong: str) -> None:
    response = await client.get("/healthz", headers={"x-request-timeout-ms": wrong})
    document = assert_problem(response, 422, "invalid_request")
    assert document["field"] == "x-request-timeout-ms" and repr(wrong) in document["detail"]


async def test_readiness_follows_the_registry(client: httpx.AsyncClient, registry: FakeRegistry) -> None:
    for status, code in (("loading", 503), ("ready", 200), ("draining", 503)):
        registry.status = status
        response = await client.get("/readyz")
        assert response.status_code == code
        device = None if status == "loading" else "cpu"
        answer = response.json()
        assert [model["model"] for model in answer.pop("models")] == (["fake"] if code == 200 else [])
        assert answer.pop("store") == {"kind": "memory", "reachable": True}
        loading = ["fake"] if status == "loading" else []
        assert answer == {"ready": code == 200, "status": status, "device": device, "loading": loading, "failed": []}
        assert (await client.get("/healthz")).json() == {"live": True}
