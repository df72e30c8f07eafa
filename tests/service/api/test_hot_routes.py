"""Tests of the routes that are called before the framework's routing, over a real socket. A request gets the same
response whether it arrives in one packet or in several."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from tests.service.engine_harness import EngineHarness
from tests.service.fake_engine import FakeEngine
from tests.service.problems import assert_problem
from tests.service.server_harness import (
    PREDICT,
    STEP,
    STEP_ROUTE,
    Client,
    ServerHarness,
    in_two,
    post,
    repeatable,
    served,
)
from tests.service.slow_client import until
from wane.service.api import encode
from wane.service.app import HOT, ROUTES, Application
from wane.service.auth.keyring import Principal
from wane.service.engine.engine import Engine

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: wane\r\n\r\n"
KEY = "alice-0123456789abcdefgh"


def hold(server: ServerHarness) -> None:
    """Makes every later run of the engine wait until the test sets the runner's `gate`."""
    server.harness.runner.busy.clear()
    server.harness.runner.gate.clear()


async def position(server: ServerHarness, session: str = "a") -> int:
    return (await server.harness.engine.get_session(session)).position


# Hot routes.


async def test_every_route_is_described(app: Application) -> None:
    described = {(path, method) for path, operations in app.openapi()["paths"].items() for method in operations}
    routes = [route for route in ROUTES if isinstance(route, Route) and route.include_in_schema]
    assert {(route.path_format, method.lower()) for route in routes for method in route.methods or ()} == described
    hot = {route.path for route in routes if route.endpoint in HOT}
    assert len(hot) == len(HOT) and {(path, "post") for path in hot} <= described


@pytest.mark.parametrize("path", [STEP, PREDICT])
async def test_a_hot_route_is_called_without_the_framework(
    app: Application, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def refuse(*_: object) -> None:
        raise AssertionError("the framework was called")

    monkeypatch.setattr(FastAPI, "__call__", refuse)
    response = await client.post(path, json={"tokens": [1]}, headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (200, "mine")


@pytest.mark.parametrize("path", [f"{STEP}/", f"{STEP}/x", "/v1/sessions/a/b/tokens", "/v1/predict/"])
async def test_a_path_like_a_hot_route_is_not_found(client: httpx.AsyncClient, path: str) -> None:
    assert_problem(await client.post(path, json={"tokens": [1]}), 404, "not_found")


async def test_a_session_id_is_read_from_the_path(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = (await client.post("/v1/sessions/%61~b/tokens", json={"tokens": [1]})).json()
    assert answer["session"] == "a~b"


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        (STEP, {"tokens": [6]}, [], 200),
        (STEP, {"tokens": [6, 7]}, [], 200),
        (STEP, {"input": "ab"}, [], 200),
        (STEP, {"tokens": [6], "mode": "window"}, [], 200),
        (STEP, {"tokens": [5], "expected_position": 0}, [], 200),
        (STEP, {"tokens": [6], "top_k": 2}, ["x-wane-position: 1", "idempotency-key: k"], 200),
        (STEP, {"tokens": [6]}, ["x-request-timeout-ms: 60000"], 200),
        (STEP, {"tokens": [6], "expected_position": 9}, [], 409),
        (STEP, {"tokens": [10_000]}, [], 422),
        (STEP, {"tokens": [6], "tokes": 1}, [], 422),
        (STEP, {"tokens": "x"}, [], 422),
        (STEP, {"tokens": [6]}, ["x-wane-position: x"], 422),
        (STEP, {"tokens": [6]}, ["x-request-timeout-ms: never"], 422),
        (STEP, b"{", [], 400),
        ("/v1/sessions/nowhere/tokens", {"tokens": [6]}, [], 404),
        ("/v1/sessions/a%0a/tokens", {"tokens": [6]}, [], 404),
        ("/v1/sessions/a%5Cb/tokens", {"tokens": [6]}, [], 422),
        ("/v1/sessions/../tokens", {"tokens": [6]}, [], 422),
        (PREDICT, {"tokens": [6, 7]}, [], 200),
        (PREDICT, {"tokens": [6], "mode": "window", "window": 4, "top_k": 2}, [], 200),
        (PREDICT, {"tokens": [6, 7, 8], "mode": "both"}, [], 200),
        (PREDICT, {"tokens": [6], "tolerance": 0}, [], 200),
        (PREDICT, {"input": "ab"}, [], 200),
        (PREDICT, {"inputs": [[5], [6]]}, [], 200),
        (PREDICT, {"session": "a"}, [], 200),
        (PREDICT, {"tokens": [6], "model": "another"}, [], 404),
        (PREDICT, {"tokens": [6], "window": 0}, [], 422),
        (PREDICT, {"tokens": [10_000]}, [], 422),
        (PREDICT, {"tokens": []}, [], 422),
        (PREDICT, {}, [], 422),
    ],
    ids=str,
)
async def test_a_request_in_one_packet_is_answered_like_a_request_in_two(
    harness: EngineHarness, path: str, body: Any, headers: list[str], status: int
) -> None:
    async with served(harness) as server:
        client = await Client.of(server)
        await client.send_packets(post(body, "x-request-id: mine", *headers, path=path))
        whole = await client.read_response()
        await client.send_packets(*in_two(post(body, "x-request-id: mine", *headers, path=path.replace("/a/", "/b/"))))
        split = await client.read_response()
        assert whole[0] == split[0] == status
        assert whole[1].keys() == split[1].keys()
        for name in ("content-type", "x-request-id"):
            assert whole[1][name] == split[1][name]
        assert repeatable(whole[2]) == repeatable(split[2])
        assert server.counted(status, PREDICT if path == PREDICT else STEP_ROUTE) == 2


@pytest.mark.parametrize("path", [STEP, PREDICT])
async def test_a_body_over_the_limit_is_refused_in_one_or_several_packets(harness: EngineHarness, path: str) -> None:
    async with served(harness, max_body_bytes=1024) as server:
        padded = post(b'{"tokens": [6]}' + b" " * 2000, path=path)
        for parts in ([padded], in_two(padded)):
            status, document = await (await Client.of(server)).ask(*parts)
            assert (status, document["code"]) == (413, "too_large")


# Framing.


async def test_a_chunked_step_is_answered(harness: EngineHarness) -> None:
    chunked = b"POST %s HTTP/1.1\r\nhost: wane\r\ntransfer-encoding: chunked\r\n\r\n" % STEP.encode()
    async with served(harness) as server:
        status, document = await (await Client.of(server)).ask(chunked + b'e\r\n{"tokens": [6]\r\n1\r\n}\r\n0\r\n\r\n')
        assert (status, document["position"]) == (200, 2)


async def test_a_client_that_expects_100_continue_receives_it(harness: EngineHarness) -> None:
    head, body = in_two(post({"tokens": [6]}, "expect: 100-continue"))
    async with served(harness) as server:
        client = await Client.of(server)
        await client.send_packets(head)
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        assert (await client.ask(body))[0] == 200


async def test_requests_in_one_packet_are_answered_in_order(harness: EngineHarness) -> None:
    async with served(harness) as server:
        client = await Client.of(server)
        await client.send_packets(post({"tokens": [6]}) + post({"tokens": [7]}) + HEALTH)
        positions = [(await client.read_response())[2]["position"] for _ in range(2)]
        assert (positions, (await client.read_response())[0]) == ([2, 3], 200)


async def test_a_request_waits_for_the_previous_request(harness: EngineHarness) -> None:
    async with served(harness) as server:
        client = await Client.of(server)
        hold(server)
        await client.send_packets(post({"tokens": [6]}))
        await harness.runner.until_busy()
        await client.send_packets(HEALTH)
        harness.runner.gate.set()
        assert (await client.read_response())[2]["position"] == 2
        assert (await client.read_response())[0] == 200


@pytest.mark.parametrize("body", [{"tokens": [6]}, {"tokens": [6], "expected_position": 9}], ids=["200", "409"])
async def test_a_closed_connection_leaves_no_reference_cycle(harness: EngineHarness, body: dict[str, Any]) -> None:
    async with served(harness) as server:
        client = await Client.of(server)
        gc.disable()
        try:
            await client.ask(post(body))
            connection = weakref.ref(next(iter(server.open)))
            client.writer.close()
            await until(lambda: connection() is None)
        finally:
            gc.enable()


# Predictions. `tests/service/test_conformance.py` has the same tests for steps.


async def test_a_prediction_that_the_server_cancels_is_answered_503(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    async with served(harness) as server:
        monkeypatch.setattr(Engine, "submit", cancelled)
        status, document = await (await Client.of(server)).ask(post({"tokens": [6]}, path=PREDICT))
        assert (status, document["code"]) == (503, "unavailable")


@pytest.mark.parametrize("path", [STEP, PREDICT])
async def test_an_unexpected_failure_is_answered_500(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def fails(*_: object) -> None:
        raise LookupError("this is a bug")

    async with served(harness) as server:
        client = await Client.of(server)
        for place, names in ((Engine, ("submit", "step_one")), (encode, ("reply",))):
            with monkeypatch.context() as patched:
                for name in names:
                    patched.setattr(place, name, fails)
                status, document = await client.ask(post({"tokens": [6]}, path=path))
                assert (status, document["code"]) == (500, "internal")
        assert (await client.ask(post({"tokens": [6]}, path=path)))[0] == 200
        assert server.counted(500, PREDICT if path == PREDICT else STEP_ROUTE) == 2
        await server.models.epochs.depart()


# Keys and the access log.


async def test_a_key_is_charged_once_for_a_request_in_one_packet_and_in_two(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[float] = []
    monkeypatch.setattr(Principal, "charge", lambda _, requests, before=0.0: charged.append(requests))
    held = f"authorization: Bearer {KEY}"
    async with served(harness, api_keys=f"alice:{KEY}") as server:
        status, document = await (await Client.of(server)).ask(post({"tokens": [6]}))
        assert (status, document["code"], charged) == (401, "unauthorized", [])
        client = await Client.of(server)
        assert (await client.ask(post({"session": "a"}, held, path="/v1/sessions")))[0] == 201
        charged.clear()
        for end, parts in enumerate(([post({"tokens": [6]}, held)], in_two(post({"tokens": [6]}, held))), 1):
            status, document = await client.ask(*parts)
            assert (status, document["session"], document["position"]) == (200, "a", end)
        assert charged == [1.0, 1.0]


async def test_requests_in_one_packet_and_in_two_have_the_same_access_log(
    harness: EngineHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "wane.access")
    conflict = post({"tokens": [6], "expected_position": 9})
    async with served(harness) as server:
        client = await Client.of(server)
        for request in ([post({"tokens": [6]})], in_two(post({"tokens": [7]}))):
            assert (await client.ask(*request))[0] == 200
        for request in ([conflict], in_two(conflict)):
            assert (await client.ask(*request))[0] == 409
    whole, split, *refused = [vars(one)["fields"] for one in caplog.records if one.name == "wane.access"]
    assert whole.keys() == split.keys()
    for name in ("client", "path", "method", "status", "model", "mode", "state", "batch_items", "trace_id"):
        assert whole[name] == split[name]
    assert whole["bytes"] > 100
    assert refused[0].keys() == refused[1].keys() >= {"model", "error"}


async def test_a_trusted_proxy_names_the_client_of_a_step(
    harness: EngineHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "wane.access")
    async with served(harness, trusted_proxies="127.0.0.1") as server:
        client = await Client.of(server)
        forwarded = post({"tokens": [6]}, "x-forwarded-for: 192.0.2.7")
        for request in ([forwarded], in_two(forwarded), [post({"tokens": [6, 7]})]):
            assert (await client.ask(*request))[0] == 200
    clients = [vars(record)["fields"]["client"] for record in caplog.records if record.name == "wane.access"]
    assert clients == ["192.0.2.7", "192.0.2.7", "127.0.0.1"]
