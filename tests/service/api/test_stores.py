"""Tests of the session store over HTTP, and of sessions that continue in the next server process."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.service.fake_engine import FakeRegistry
from tests.service.live_server import BUNDLE, TIMEOUT_S, environment, live_server, run
from tests.service.sessions.stores.redis_server import redis_server
from wane.service.sessions.stores.store import StoreHealth

MEMORY = {"kind": "memory", "reachable": True, "not_durable": 0}


async def test_a_server_is_ready_while_its_store_is_reachable(
    client: httpx.AsyncClient, registry: FakeRegistry
) -> None:
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()["store"]) == (200, MEMORY)
    registry.standing = StoreHealth("redis", reachable=False, ready=False)
    away = await client.get("/readyz")
    assert (away.status_code, away.json()["ready"], away.json()["status"]) == (503, False, "store_unavailable")
    assert away.json()["store"] == {"kind": "redis", "reachable": False, "not_durable": 0}
    assert len(away.json()["models"]) == 1  # without a reachable store the server still lists its models


async def test_a_server_in_fallback_is_ready_and_counts_sessions_that_are_not_durable(
    client: httpx.AsyncClient, registry: FakeRegistry
) -> None:
    registry.standing = StoreHealth("redis", reachable=False, not_durable=3)
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    assert ready.json()["store"] == {"kind": "redis", "reachable": False, "not_durable": 3}


async def test_the_store_is_null_before_models_are_loaded(loading: httpx.AsyncClient) -> None:
    assert (await loading.get("/readyz")).json()["store"] is None


@pytest.mark.slow
def test_sessions_in_memory_continue_in_the_next_process(tmp_path: Path) -> None:
    file = tmp_path / "sessions"
    settings = {"WANE_BUNDLES": BUNDLE, "WANE_SESSION_FILE": str(file)}
    with live_server(**settings) as server:
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
            http.post("/v1/sessions", json={"session": "s"})
            http.post("/v1/sessions/s/tokens", json={"tokens": [5, 6]})
        assert server.stop() == 0
    assert file.is_file()
    with live_server(**settings) as server, httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        again = http.post("/v1/sessions/s/tokens", json={"tokens": [5, 6], "expected_position": 0}).json()
        assert (again["replayed"], again["position"], again["state"]) == (True, 2, "rebuilt")
        assert http.post("/v1/sessions/s/tokens", json={"tokens": [7]}).json()["error_bound"] == 0.0
        assert not file.exists()


@pytest.mark.slow
def test_an_invalid_session_file_ends_the_process_with_a_message(tmp_path: Path) -> None:
    file = tmp_path / "sessions"
    file.write_bytes(b"no sessions")
    ended = run("serve", "--port", "0", env=environment(WANE_SESSION_FILE=str(file)))
    assert ended.returncode == 2
    assert f"error: session_file {file} is not a file of sessions" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert file.read_bytes() == b"no sessions"


@pytest.mark.slow
@pytest.mark.stack
def test_a_server_without_redis_refuses_only_sessions(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path) as redis,
        live_server(WANE_BUNDLES=BUNDLE, WANE_STORE=redis.url) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http,
    ):
        made = http.post("/v1/sessions", json={"session": "s"})
        assert (made.status_code, made.json()["durable"]) == (201, True)
        assert http.post("/v1/sessions/s/tokens", json={"tokens": [5]}).json()["durable"] is True
        redis.kill()
        away = http.post("/v1/sessions/s/tokens", json={"tokens": [6]})
        assert (away.status_code, away.json()["code"], away.json()["retryable"]) == (503, "unavailable", True)
        assert int(away.headers["retry-after"]) >= 1
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["store"]["reachable"]) == (503, False)
        assert http.post("/v1/predict", json={"tokens": [5]}).status_code == 200
        assert json.loads(http.get("/v1/report").text)["models"][0]["sessions"]["resident"] == 1
        redis.start()
        server.read_until("the session store is reachable")
        again = http.post("/v1/sessions/s/tokens", json={"tokens": [6], "expected_position": 1}).json()
        assert (again["position"], again["durable"], again["state"]) == (2, True, "resident")
