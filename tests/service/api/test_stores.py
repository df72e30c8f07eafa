"""Tests of the session store over HTTP, and of sessions that continue in the next server process."""

from __future__ import annotations

import resource
from pathlib import Path

import httpx
import pytest

from tests.service.fake_engine import FakeRegistry
from tests.service.live_server import BUNDLE, TIMEOUT_S, environment, live_server, run
from wane.service.sessions.stores.store import StoreHealth

MEMORY = {"kind": "memory", "reachable": True}


async def test_a_server_is_ready_while_its_store_is_reachable(
    client: httpx.AsyncClient, registry: FakeRegistry
) -> None:
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()["store"]) == (200, MEMORY)
    registry.standing = StoreHealth("redis", reachable=False)
    away = await client.get("/readyz")
    assert (away.status_code, away.json()["ready"], away.json()["status"]) == (503, False, "store_unavailable")
    assert away.json()["store"] == {"kind": "redis", "reachable": False}
    assert len(away.json()["models"]) == 1  # without a reachable store the server still lists its models


@pytest.mark.slow
def test_sessions_that_cannot_be_saved_end_the_process_with_status_1(tmp_path: Path) -> None:
    file = tmp_path / "sessions"
    with live_server(WANE_BUNDLES=BUNDLE, WANE_SESSION_FILE=str(file)) as server:
        for session in ("a", "b"):
            httpx.post(f"{server.url}/v1/sessions", json={"session": session}, timeout=TIMEOUT_S)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, 0))  # from now on every file is full
        assert server.stop() == 1
        lost = server.read_until(
            f"error: the 2 sessions in memory are lost: they could not be written to {file}: File too large"
        )
        assert lost and not any("Traceback" in line for line in server.said)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_invalid_session_file_ends_the_process_with_a_message(tmp_path: Path) -> None:
    file = tmp_path / "sessions"
    file.write_bytes(b"no sessions")
    ended = run("serve", "--port", "0", env=environment(WANE_SESSION_FILE=str(file)))
    assert ended.returncode == 2
    assert f"error: session_file {file} is not a file of sessions" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert file.read_bytes() == b"no sessions"
