"""Tests of requests from pages of other origins (CORS). They use real sockets, and both Wane's and uvicorn's protocol
classes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.service.engine_harness import EngineHarness
from tests.service.server_harness import STEP, ServerHarness, served
from wane.service.settings import Settings, SettingsError

SHOP, BLOG, OTHER = "https://shop.example", "http://blog.example:8080", "https://shop.example.attacker.example"
KEY = "alice-0123456789abcdefgh"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,idempotency-key,x-wane-position",
}


@pytest.fixture
async def server(harness: EngineHarness) -> AsyncIterator[ServerHarness]:
    """A server that allows requests from the pages of two other origins."""
    async with served(harness, cors_origins=f"{SHOP},{BLOG}") as server:
        yield server


@pytest.fixture
async def http(server: ServerHarness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url) as client:
        yield client


def of_cors(response: httpx.Response) -> dict[str, list[str]]:
    """Returns the values of each CORS header of a response, by header name."""
    named = {name for name in response.headers if name.startswith("access-control-")}
    return {name: response.headers.get_list(name) for name in sorted(named)}


@pytest.mark.parametrize("origin", [SHOP, BLOG])
async def test_a_page_of_an_allowed_origin_may_step_a_session(http: httpx.AsyncClient, origin: str) -> None:
    asked = await http.options(STEP, headers={"origin": origin, **PREFLIGHT})
    assert asked.status_code == 200
    found = of_cors(asked)
    assert found["access-control-allow-origin"] == [origin]
    assert "POST" in found["access-control-allow-methods"][0].split(", ")
    assert found["access-control-allow-headers"] == [PREFLIGHT["access-control-request-headers"]]
    assert "access-control-allow-credentials" not in found
    answer = await http.post(STEP, json={"tokens": [6]}, headers={"origin": origin})
    assert (answer.status_code, answer.json()["position"]) == (200, 2)
    assert of_cors(answer) == {
        "access-control-allow-origin": [origin],
        "access-control-expose-headers": ["x-request-id, retry-after, location"],
    }
    assert answer.headers["vary"] == "origin"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/sessions/a/state", "/v1/sessions/nowhere", "/nowhere"])
async def test_a_page_may_read_every_answer_and_every_error(http: httpx.AsyncClient, path: str) -> None:
    assert of_cors(await http.get(path, headers={"origin": SHOP}))["access-control-allow-origin"] == [SHOP]
    refused = await http.post(STEP, json={"tokens": []}, headers={"origin": SHOP})
    assert (refused.status_code, of_cors(refused)["access-control-allow-origin"]) == (422, [SHOP])


async def test_a_page_of_another_origin_may_not_read_answers(http: httpx.AsyncClient) -> None:
    asked = await http.options(STEP, headers={"origin": OTHER, **PREFLIGHT})
    assert (asked.status_code, asked.text) == (400, "Disallowed CORS origin")
    assert "access-control-allow-origin" not in of_cors(asked)
    for headers in ({"origin": OTHER}, {}):
        answer = await http.post(STEP, json={"tokens": [6]}, headers=headers)
        assert (answer.status_code, of_cors(answer), answer.headers["vary"]) == (200, {}, "origin")


async def test_a_browser_asks_without_the_page_s_key(harness: EngineHarness) -> None:
    async with (
        served(harness, cors_origins=SHOP, api_keys=f"alice:{KEY}") as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        asked = await http.options("/v1/predict", headers={"origin": SHOP, **PREFLIGHT})
        assert (asked.status_code, of_cors(asked)["access-control-allow-origin"]) == (200, [SHOP])
        refused = await http.post("/v1/predict", json={"tokens": [6]}, headers={"origin": SHOP})
        assert (refused.status_code, of_cors(refused)["access-control-allow-origin"]) == (401, [SHOP])
        key = {"authorization": f"Bearer {KEY}"}
        answer = await http.post("/v1/predict", json={"tokens": [6]}, headers={"origin": SHOP, **key})
        assert answer.status_code == 200


async def test_every_origin_may_be_allowed(harness: EngineHarness) -> None:
    async with served(harness, cors_origins="*") as server, httpx.AsyncClient(base_url=server.url) as http:
        asked = await http.options(STEP, headers={"origin": OTHER, **PREFLIGHT})
        answer = await http.post(STEP, json={"tokens": [6]}, headers={"origin": OTHER})
        for response in (asked, answer):
            assert (response.status_code, of_cors(response)["access-control-allow-origin"]) == (200, ["*"])
        assert (await message(server, OTHER))["position"] == 3


async def test_no_origin_is_allowed_by_default(harness: EngineHarness) -> None:
    async with served(harness) as server, httpx.AsyncClient(base_url=server.url) as http:
        asked = await http.options(STEP, headers={"origin": SHOP, **PREFLIGHT})
        answer = await http.post(STEP, json={"tokens": [6]}, headers={"origin": SHOP})
        assert (asked.status_code, answer.status_code) == (405, 200)
        assert (of_cors(asked), of_cors(answer), "vary" in answer.headers) == ({}, {}, False)


async def message(server: ServerHarness, origin: str | None) -> Any:
    """Opens a WebSocket of session a from a page of `origin`, and sends a step. Returns the server's first message."""
    url = server.url.replace("http://", "ws://") + "/v1/sessions/a/stream"
    async with connect(url, proxy=None, origin=origin) as socket:  # type: ignore[arg-type]
        try:
            await socket.send('{"tokens": [6]}')
        except ConnectionClosed:  # the server may have closed the socket before the message was sent
            assert origin is not None
        return json.loads(await socket.recv())


async def test_only_pages_of_allowed_origins_may_open_a_websocket(server: ServerHarness) -> None:
    own = server.url
    for position, origin in enumerate((SHOP, BLOG, own, None), 2):
        assert (await message(server, origin))["position"] == position
    refused = (await message(server, OTHER))["error"]
    assert (refused["status"], refused["code"]) == (403, "forbidden")
    assert refused["detail"] == f"pages of origin {OTHER!r} may not open a WebSocket of this server"


@pytest.mark.parametrize("wrong", ["shop.example", "https://shop.example/", "https://shop.example, *", "", "null"])
def test_an_origin_must_be_written_as_browsers_send_it(wrong: str) -> None:
    with pytest.raises(SettingsError, match="WANE_CORS_ORIGINS is"):
        Settings.read({"WANE_CORS_ORIGINS": wrong})
