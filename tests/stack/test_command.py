"""scripts/stack: one command starts everything, one signal stops it, and what ends in between is started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from queue import Queue
from threading import Thread

import httpx
import pytest

from deploy.stack.local import ROOT
from tests.service.stores.redis_server import free_port, program
from tests.stack.conftest import BUNDLE

pytestmark = [pytest.mark.stack, pytest.mark.slow]

WAIT_S = 120
LINE = re.compile(r"  (\S+) +127\.0\.0\.1:\d+  pid (\d+)\n")


class Command:
    """The command, and what it prints."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "deploy.stack", *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.printed: Queue[str] = Queue()
        self.reader = Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.printed.put(line)
        self.printed.put("")

    def until(self, text: str) -> list[str]:
        """The lines that are printed up to one with this in it."""
        lines: list[str] = []
        while not lines or text not in lines[-1]:
            line = self.printed.get(timeout=WAIT_S)
            assert line, f"it ended before it printed {text!r}; it printed {lines}"
            lines.append(line)
        return lines


def test_one_command_starts_everything_and_one_signal_stops_it(tmp_path: Path) -> None:
    program("redis-server")
    program("haproxy")
    program("prometheus")
    port = free_port()
    command = Command(
        f"--port={port}",
        f"--operations-port={free_port()}",
        f"--prometheus-port={free_port()}",
        f"--folder={tmp_path}",
        f"--bundles={BUNDLE}",
    )
    try:
        pids = {match[1]: int(match[2]) for line in command.until("ready at") if (match := LINE.fullmatch(line))}
        assert set(pids) == {"redis", "wane-1", "wane-2", "wane-3", "haproxy", "prometheus"}
        key = (tmp_path / "secrets" / "client_key").read_text().strip()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            assert client.post("/v1/sessions", json={}).status_code == 401
            client.headers["authorization"] = f"Bearer {key}"
            assert client.get("/readyz").json()["store"]["kind"] == "redis"
            created = client.post("/v1/sessions", json={"session": "one"})
            assert created.status_code == 201
            os.kill(pids["wane-1"], signal.SIGKILL)
            command.until("wane-1 ended and was started again")
            assert client.get("/v1/sessions/one").json()["position"] == 0
        command.process.send_signal(signal.SIGINT)
        command.until("stopped")
        assert command.process.wait(WAIT_S) == 0
    finally:
        command.process.kill()
        command.process.wait(WAIT_S)
        command.reader.join(WAIT_S)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_a_service_that_does_not_start_ends_the_command_with_its_log(tmp_path: Path) -> None:
    program("redis-server")
    program("haproxy")
    program("prometheus")
    command = Command(
        f"--port={free_port()}",
        f"--prometheus-port={free_port()}",
        f"--folder={tmp_path}",
        f"--bundles={tmp_path / 'nothing'}",
    )
    try:
        command.until("bundles is")
        assert command.process.wait(WAIT_S) == 2
    finally:
        command.process.kill()
        command.reader.join(WAIT_S)
