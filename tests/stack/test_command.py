"""Tests that the command scripts/stack starts all services, restarts services that exit, and stops all services at a
signal."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import httpx
import pytest

from tests.service.sessions.stores.redis_server import free_port, program
from tests.stack.conftest import BUNDLE
from tests.stack.harness.command import WAIT_S, Command

pytestmark = [pytest.mark.stack, pytest.mark.slow]

STACK = (sys.executable, "-m", "deploy.stack")
LINE = re.compile(r"  (\S+) +127\.0\.0\.1:\d+  pid (\d+)\n")


def test_one_command_starts_everything_and_one_signal_stops_it(tmp_path: Path) -> None:
    program("redis-server")
    program("haproxy")
    program("prometheus")
    port = free_port()
    command = Command(
        *STACK,
        f"--port={port}",
        f"--operations-port={free_port()}",
        f"--prometheus-port={free_port()}",
        f"--folder={tmp_path}",
        f"--bundles={BUNDLE}",
    )
    try:
        pids = {match[1]: int(match[2]) for line in command.until_said("ready at") if (match := LINE.fullmatch(line))}
        assert set(pids) == {"redis", "wane-1", "wane-2", "wane-3", "haproxy", "prometheus"}
        key = (tmp_path / "secrets" / "client_key").read_text().strip()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
            assert client.post("/v1/sessions", json={}).status_code == 401
            client.headers["authorization"] = f"Bearer {key}"
            assert client.get("/readyz").json()["store"]["kind"] == "redis"
            created = client.post("/v1/sessions", json={"session": "one"})
            assert created.status_code == 201
            os.kill(pids["wane-1"], signal.SIGKILL)
            command.until_said("wane-1 ended and was restarted")
            assert client.get("/v1/sessions/one").json()["position"] == 0
        command.process.send_signal(signal.SIGINT)
        command.until_said("stopped")
        assert command.process.wait(WAIT_S) == 0
    finally:
        command.end()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_a_service_that_fails_to_start_ends_the_command_with_its_log(tmp_path: Path) -> None:
    program("redis-server")
    program("haproxy")
    program("prometheus")
    command = Command(
        *STACK,
        f"--port={free_port()}",
        f"--prometheus-port={free_port()}",
        f"--folder={tmp_path}",
        f"--bundles={tmp_path / 'nothing'}",
    )
    try:
        command.until_said("bundles: ")
        assert command.process.wait(WAIT_S) == 2
    finally:
        command.end()
