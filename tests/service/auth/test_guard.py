"""Tests of the authentication on every route, the permissions and quotas of keys, and the ownership of sessions."""

from __future__ import annotations

import json
from base64 import b64encode, urlsafe_b64encode
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from tests.service.conftest import never
from tests.service.fake_engine import FakeRegistry
from tests.service.live_server import BUNDLE, live_server
from tests.service.problems import assert_members
from tests.service.table import every_route, every_socket
from wane.service.app import create_app
from wane.service.auth.keys import Permission
from wane.service.errors import InvalidRequest, UnknownSession
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings

ALICE, BOB, OPS, SCRAPER = (f"{name}-0123456789abcdefgh" for name in ("alice", "bob", "ops", "scraper"))
KEYS = f"alice:{ALICE},bob:{BOB},ops:{OPS}:admin,scraper:{SCRAPER}:metrics"
OPEN = {"/", "/console/app.js", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"}
OPENAI = {"/v1/completions", "/tokenize", "/detokenize", "/tokenizer_info"}
STEP = {"tokens": [1]}
STREAM = "/v1/sessions/s/stream"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded() -> FastAPI:
    settings = Settings.read({"WANE_API_KEYS": KEYS})
    return create_app(settings, cast(ModelRegistry, FakeRegistry()), Metrics(), on_load_failure=never)


@pytest.fixture
def models(guarded: FastAPI) -> FakeRegistry:
    guarded.state.registry = registry = FakeRegistry()
    return registry


@pytest.fixture
async def client(guarded: FastAPI, models: FakeRegistry) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://wane") as client:
        yield client


@pytest.fixture
def sockets(guarded: FastAPI, models: FakeRegistry) -> Iterator[TestClient]:
    with TestClient(guarded) as client:
        yield client


async def test_every_route_but_the_probes_and_the_console_requires_a_key(
    guarded: FastAPI, client: httpx.AsyncClient
) -> None:
    routes = every_route(guarded)
    assert len(routes) >= 22
    assert {("HEAD", "/v1/models"), ("HEAD", "/v1/sessions/s")} <= set(routes)
    assert {path for _, path in routes} >= OPEN | {"/docs", "/openapi.json", "/metrics"}
    for method, path in routes:
        for headers in ({}, bearer("wrong"), bearer(""), {"authorization": ALICE}, {"authorization": "Bearer"}):
            response = await client.request(method, path, headers=headers)
            if path in OPEN:
                assert response.status_code == 200, (method, path)
            else:
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == 'Bearer realm="wane"'
                if method != "HEAD":
                    document = response.json()
                    in_openai_format = isinstance(document.get("error"), dict) and "code" not in document
                    code = document["error"]["code"] if in_openai_format else document["code"]
                    assert code == ("invalid_api_key" if in_openai_format else "unauthorized"), (method, path)
                    assert in_openai_format == (path in OPENAI), (method, path)


@pytest.mark.parametrize(
    "path",
    ["/nowhere", "/healthz/", "/HEALTHZ", "/%2fhealthz", "/healthz%2f", "/%2e%2e/healthz", "/readyz;x", "/v1/a%00b"],
)
async def test_an_unknown_path_is_answered_404_only_with_a_key(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 401
    assert (await client.get(path, headers=bearer(ALICE))).status_code == 404


@pytest.mark.parametrize("key", [None, ALICE, SCRAPER, OPS])
async def test_a_path_with_a_control_character_is_checked_like_an_unknown_path(
    guarded: FastAPI, client: httpx.AsyncClient, key: str | None
) -> None:
    headers = {} if key is None else bearer(key)
    for method, path in every_route(guarded):
        lacks_scope = key == SCRAPER or (key == ALICE and path.startswith("/v2/repository/models/"))
        expected = 401 if key is None else 403 if lacks_scope else 404
        if path.startswith("/console/"):
            expected = 404  # every path in this folder is open, and this one names no file
        for character in ("%0a", "%0A%0a", "%0d", "%00", "%7f", "%C2%85"):
            response = await client.request(method, path + character, headers=headers)
            assert response.status_code == expected, (method, path, character)


async def test_permissions_ignore_the_path_of_the_mount(guarded: FastAPI, models: FakeRegistry) -> None:
    transport = httpx.ASGITransport(guarded, root_path="/wane")
    async with httpx.AsyncClient(transport=transport, base_url="http://host/wane") as client:
        assert (await client.get("/healthz")).status_code == 200
        for path, method in (("/metrics", "GET"), ("/v2/repository/models/fake/load", "POST")):
            statuses = [(await client.request(method, path, headers=bearer(key))).status_code for key in (ALICE, OPS)]
            assert statuses == [403, 200], path


@pytest.mark.parametrize("path", [STREAM + "%0a", "/v1/nowhere", "/v1/models", STREAM + "/"])
def test_a_websocket_at_an_unknown_path_receives_an_error(sockets: TestClient, path: str) -> None:
    with sockets.websocket_connect(path, ["wane", f"bearer.{ALICE}"]) as socket:
        assert socket.accepted_subprotocol == "wane"
        assert_members(socket.receive_json()["error"], 404, "not_found")
        with pytest.raises(WebSocketDisconnect) as caught:
            socket.receive_json()
    assert caught.value.code == 1008


async def test_a_probe_with_another_method_is_refused(client: httpx.AsyncClient) -> None:
    assert (await client.post("/healthz")).status_code == 405


async def test_every_route_admits_the_keys_with_its_permission(guarded: FastAPI, client: httpx.AsyncClient) -> None:
    for method, path in every_route(guarded):
        statuses = [
            (await client.request(method, path, headers=bearer(key))).status_code for key in (ALICE, OPS, SCRAPER)
        ]
        may = [status not in (401, 403) for status in statuses]
        if path in OPEN:
            assert may == [True, True, True], (method, path)
        elif path == "/metrics":
            assert may == [False, True, True]
        elif path.startswith("/v2/repository/models/"):
            assert may == [False, True, False]
        else:
            assert may == [True, True, False], (method, path)


async def test_a_forbidden_load_is_refused_in_the_protocol_s_format(client: httpx.AsyncClient) -> None:
    response = await client.post("/v2/repository/models/fake/load", headers=bearer(ALICE))
    assert response.status_code == 403
    assert response.json()["error"] == "key alice does not have the scope admin"


def test_every_websocket_requires_a_key(guarded: FastAPI, sockets: TestClient) -> None:
    paths = every_socket(guarded)
    assert paths == [STREAM]
    for path in [*paths, "/v1/nowhere"]:
        for headers, subprotocols in (({}, None), (bearer("wrong"), None), ({}, ["wane", "bearer.wrong"])):
            with sockets.websocket_connect(path, subprotocols, headers=headers) as socket:
                assert socket.accepted_subprotocol == (None if subprotocols is None else "wane")
                assert_members(socket.receive_json()["error"], 401, "unauthorized")
                with pytest.raises(WebSocketDisconnect) as caught:
                    socket.receive_json()
                assert caught.value.code == 1008


def test_a_websocket_takes_its_key_from_a_header_or_a_subprotocol(sockets: TestClient) -> None:
    for headers, subprotocols, chosen in ((bearer(ALICE), None, None), ({}, ["wane", f"bearer.{ALICE}"], "wane")):
        with sockets.websocket_connect(STREAM, subprotocols, headers=headers) as socket:
            assert socket.accepted_subprotocol == chosen
            socket.send_json(STEP)
            assert socket.receive_json()["session"] == "s"


@pytest.mark.parametrize(
    "encoded", ["", "!", "QQ==", "Q", "YWxpY2U", b64encode(f"{ALICE}\0".encode()).decode().rstrip("=")]
)
def test_an_invalid_encoded_key_is_refused(sockets: TestClient, encoded: str) -> None:
    offered = ["wane", f"base64url.bearer.authorization.k8s.io.{encoded}"]
    with sockets.websocket_connect(STREAM, offered) as socket:
        error = socket.receive_json()["error"]
        assert_members(error, 401, "unauthorized")
        assert "not valid" in error["detail"]


async def test_a_key_as_a_password_may_only_read(client: httpx.AsyncClient) -> None:
    html = {"accept": "text/html,*/*"}
    asked = await client.get("/docs", headers=html)
    assert asked.status_code == 401 and asked.headers["www-authenticate"].startswith("Basic ")
    page = await client.get("/docs", headers=html)
    assert page.status_code == 401 and page.headers["content-type"].startswith("text/html")
    assert "This page needs an API key" in page.text and "the key as the password" in page.text
    assert (await client.get("/docs")).headers["content-type"] == "application/problem+json"
    basic = {"authorization": f"Basic {b64encode(f'me:{ALICE}'.encode()).decode()}"}
    for path in ("/docs", "/openapi.json", "/v1/models"):
        assert (await client.get(path, headers=basic | html)).status_code == 200
    for method, path in (("POST", "/v1/sessions"), ("DELETE", "/v1/sessions/s")):
        refused = await client.request(method, path, headers=basic | html)
        assert refused.headers["www-authenticate"].startswith("Bearer ")
    for wrong in ("Basic", "Basic !", f"Basic {b64encode(ALICE.encode()).decode()}"):
        assert (await client.get("/docs", headers={"authorization": wrong})).status_code == 401


async def test_only_reading_the_console_needs_no_key(client: httpx.AsyncClient) -> None:
    for path in ("/", "/console/app.js", "/console/nothing"):
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert (await client.request(method, path)).status_code == 401, (method, path)
    for path in ("/console", "/%2fconsole/app.js", "/Console/app.js", "/v1/models"):
        assert (await client.get(path)).status_code == 401, path


async def test_a_refusal_does_not_contain_the_key(client: httpx.AsyncClient) -> None:
    refused = await client.get("/v1/models", headers=bearer("hush-hush"))
    assert "hush" not in refused.text + str(refused.headers)


async def test_a_session_belongs_to_its_owner_and_has_the_owner_s_name(
    client: httpx.AsyncClient, models: FakeRegistry
) -> None:
    created = await client.post("/v1/sessions", json={"session": "demo"}, headers=bearer(ALICE))
    assert created.json()["session"] == "demo" and created.headers["location"] == "/v1/sessions/demo"
    asked = [
        await client.get("/v1/sessions/demo", headers=bearer(ALICE)),
        await client.post("/v1/sessions/demo/tokens", json=STEP, headers=bearer(ALICE)),
        await client.post("/v1/sessions/demo/rewind", json={"position": 0}, headers=bearer(ALICE)),
        await client.delete("/v1/sessions/demo", headers=bearer(ALICE)),
        await client.post("/v1/sessions/tokens", json={"steps": [{"session": "demo", **STEP}]}, headers=bearer(BOB)),
        await client.post("/v1/predict", json={"session": "demo"}, headers=bearer(BOB)),
    ]
    assert [one.status_code for one in asked] == [200, 200, 200, 204, 200, 200]
    for one in asked:
        assert "alice/" not in one.text and "bob/" not in one.text
    assert models.engine.asked[1] == "alice/demo"
    assert [getattr(one, "session", one) for one in models.engine.asked[2:]] == [
        "alice/demo", ("alice/demo", 0), "alice/demo", "bob/demo", "bob/demo",
    ]  # fmt: skip


async def test_the_error_for_a_step_after_a_failed_step_has_the_owner_s_name(
    client: httpx.AsyncClient, models: FakeRegistry
) -> None:
    models.engine.failure = InvalidRequest("no")
    body = {"steps": [{"session": "demo", **STEP}] * 2}
    refused = await client.post("/v1/sessions/tokens", json=body, headers=bearer(ALICE))
    first, second = (result["error"] for result in refused.json()["results"])
    assert (first["code"], second["code"]) == ("invalid_request", "earlier_step_failed")
    assert "'demo'" in second["detail"] and "alice/" not in refused.text


@pytest.mark.parametrize("id_", ["alice/demo", "/demo", "../alice/demo", "a\\b", "", "x" * 129, ".", ".."])
async def test_an_id_with_another_owner_s_name_is_invalid(client: httpx.AsyncClient, id_: str) -> None:
    for path, body in (
        ("/v1/sessions", {"session": id_}),
        ("/v1/predict", {"session": id_}),
    ):
        assert (await client.post(path, json=body, headers=bearer(BOB))).json()["code"] == "invalid_request"
    many = await client.post("/v1/sessions/tokens", json={"steps": [{"session": id_, **STEP}]}, headers=bearer(BOB))
    assert many.json()["results"][0]["error"]["code"] == "invalid_request"


async def test_every_owner_gets_the_same_answer_for_an_unknown_session(
    client: httpx.AsyncClient, models: FakeRegistry
) -> None:
    models.engine.failure = UnknownSession("there is no session 'demo'")
    texts = set()
    for key in (ALICE, BOB):
        response = await client.get("/v1/sessions/unknown", headers={**bearer(key), "x-request-id": "r"})
        assert response.status_code == 404
        texts.add(response.text)
    assert len(texts) == 1


def limited(burst: float) -> FastAPI:
    """An application in which the key alice may send `burst` requests at once, and then one every 1000 seconds."""
    app = create_app(
        Settings.read({"WANE_API_KEYS": KEYS}), cast(ModelRegistry, FakeRegistry()), Metrics(), on_load_failure=never
    )
    keyring = app.state.keys.keyring
    keyring.replace([replace(keyring.find(ALICE.encode()).key, rate=0.001, burst=burst)])
    return app


async def answers(burst: float, *calls: tuple[str, object]) -> list[httpx.Response]:
    """Sends the calls, which are pairs of a path and a body, with the key alice. Returns the responses."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(limited(burst)), base_url="http://wane") as client:
        return [await client.post(path, json=body, headers=bearer(ALICE)) for path, body in calls]


async def test_a_request_over_the_rate_is_429_with_retry_after() -> None:
    call = ("/v1/predict", STEP)
    one, two, three = await answers(2, call, call, call)
    assert [one.status_code, two.status_code, three.status_code] == [200, 200, 429]
    assert three.json()["code"] == "rate_limited" and int(three.headers["retry-after"]) > 900


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/predict", {"inputs": [[1], [2], [3]]}),
        ("/v1/sessions/tokens", {"steps": [{"session": name, **STEP} for name in "abc"]}),
        ("/v1/compare", {"tokens": [1], "windows": [1, 2], "repeat": 1}),
    ],
)
async def test_a_batch_counts_each_of_its_items(path: str, body: object) -> None:
    (first, second) = await answers(3, (path, body), ("/v1/predict", STEP))
    assert [first.status_code, second.status_code] == [200, 429]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/predict", {"inputs": [[1]] * 4}),
        ("/v1/predict", {"inputs": [[1]] * 9}),
        ("/v1/sessions/tokens", {"steps": [{"session": name, **STEP} for name in "abcde"]}),
    ],
)
async def test_a_batch_larger_than_the_burst_is_answered_if_the_bucket_is_full(path: str, body: object) -> None:
    large, next_ = await answers(3, (path, body), ("/v1/predict", STEP))
    assert [large.status_code, next_.status_code] == [200, 429]


async def test_a_refused_batch_is_not_charged() -> None:
    step, large = ("/v1/predict", STEP), ("/v1/predict", {"inputs": [[1]] * 3})
    given = await answers(3, step, large, large, large, step, step, step)
    assert [one.status_code for one in given] == [200, 429, 429, 429, 200, 200, 429]


def test_a_message_over_the_rate_leaves_the_websocket_open() -> None:
    with TestClient(limited(3)) as client, client.websocket_connect(STREAM, headers=bearer(ALICE)) as socket:
        for code in (None, None, "rate_limited", "rate_limited"):
            socket.send_json(STEP)
            assert socket.receive_json().get("error", {}).get("code") == code


def test_messages_that_fail_count_towards_the_rate() -> None:
    with TestClient(limited(3)) as client, client.websocket_connect(STREAM, headers=bearer(ALICE)) as socket:
        codes = list[str]()
        for _ in range(4):
            socket.send_text("{}}")
            codes.append(socket.receive_json()["error"]["code"])
    assert codes[2:] == ["rate_limited"] * 2 and "rate_limited" not in codes[:2]


def test_a_websocket_over_the_rate_is_closed_with_1013() -> None:
    with TestClient(limited(1)) as client:
        with client.websocket_connect(STREAM, headers=bearer(ALICE)):
            pass
        with client.websocket_connect(STREAM, headers=bearer(ALICE)) as socket:
            assert_members(socket.receive_json()["error"], 429, "rate_limited")
            with pytest.raises(WebSocketDisconnect) as caught:
                socket.receive_json()
        assert caught.value.code == 1013


@pytest.mark.parametrize(
    "change",
    [None, {"permissions": frozenset({Permission.METRICS})}, {"name": "zoe"}],
    ids=["revoked", "scope", "name"],
)
def test_a_websocket_with_a_revoked_or_changed_key_is_closed_at_its_next_message(
    guarded: FastAPI, sockets: TestClient, change: dict[str, Any] | None
) -> None:
    keyring = guarded.state.keys.keyring
    before = [keyring.find(key.encode()).key for key in (ALICE, BOB, OPS, SCRAPER)]
    with sockets.websocket_connect(STREAM, headers=bearer(ALICE)) as socket:
        socket.send_json(STEP)
        assert "predictions" in socket.receive_json()
        keyring.replace([*([] if change is None else [replace(before[0], **change)]), *before[1:]])
        try:
            socket.send_json(STEP)
            assert_members(socket.receive_json()["error"], 401, "unauthorized")
            assert socket.receive()["code"] == 1008
        finally:
            keyring.replace(before)


async def test_responses_have_security_headers(client: httpx.AsyncClient) -> None:
    read = await client.get("/v1/models", headers=bearer(ALICE))
    assert read.headers["x-content-type-options"] == "nosniff"
    assert read.headers["cache-control"] == "no-store"
    page = await client.get("/docs", headers=bearer(ALICE))
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert page.headers["referrer-policy"] == "no-referrer"
    assert "http://" not in page.text and "https://" not in page.text
    assert "server" not in read.headers


async def test_the_log_has_the_key_s_name_and_not_the_key(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    await client.get("/v1/models", headers=bearer(ALICE))
    await client.get("/metrics", headers=bearer(ALICE))
    lines: list[dict[str, Any]] = [vars(one)["fields"] for one in caplog.records if one.name == "wane.access"]
    assert [(one["key"], one["status"]) for one in lines] == [("alice", 200), ("alice", 403)]
    assert ALICE not in json.dumps(lines)


ODD = ["a/b+c~d.e_f-0123456789==", "////////////////////", "++++++++++++++++++++=", "tokens.of-0123456789_~+"]


async def test_every_valid_key_works_as_a_subprotocol() -> None:
    keys = ",".join(f"odd{number}:{key}" for number, key in enumerate(ODD))
    with live_server(WANE_BUNDLES=BUNDLE, WANE_API_KEYS=keys) as server:
        for number, key in enumerate(ODD):
            session = f"s{number}"
            async with httpx.AsyncClient(base_url=server.url, headers=bearer(key)) as client:
                assert (await client.post("/v1/sessions", json={"session": session})).status_code == 201
            encoded = urlsafe_b64encode(key.encode()).decode().rstrip("=")
            forms = [f"base64url.bearer.authorization.k8s.io.{encoded}"] + [f"bearer.{key}"] * (
                not set("/=") & set(key)
            )
            for form in forms:
                url = server.url.replace("http", "ws", 1) + f"/v1/sessions/{session}/stream"
                async with connect(url, subprotocols=[Subprotocol("wane"), Subprotocol(form)]) as socket:
                    assert socket.subprotocol == "wane"
                    await socket.send(json.dumps(STEP))
                    assert json.loads(await socket.recv())["session"] == session
        assert not [line for line in server.said for key in ODD if key in line]
