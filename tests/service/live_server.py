"""The real server in its own process. The tests start the server with the command that an operator uses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
BUNDLE = str(ROOT / "models" / "bundles" / "rnn-stable")
"""The shipped model that loads fastest."""
TIMEOUT_S = 300
# The environment variable for the folder of bundles, so that the tests can use other bundles than the shipped ones.
BUNDLES = "WANE_BUNDLES"


def environment(**settings: str) -> dict[str, str]:
    """Returns the environment variables of this process, without Wane's settings except the folder of bundles. Adds the
    test's settings."""
    inherited = {name: value for name, value in os.environ.items() if name == BUNDLES or not name.startswith("WANE_")}
    return {**inherited, **settings}


class LiveServer:
    """A server process, its URL, and its log. A thread reads the log."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: Queue[dict[str, Any] | None] = Queue()
        self.said: list[str] = []  # all lines of the log so far
        self._reader = Thread(target=self._read)
        self._reader.start()
        self.url = ""

    def wait_until_ready(self) -> None:
        """Waits until the log has the server's URL and the message `ready` of the server itself, not of a worker."""
        self.url = self.read_until("listening")["url"]
        while "worker" in self.read_until("ready"):
            pass

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for text in stderr:
                self.said.append(text)
                self._lines.put(json.loads(text) if text.startswith("{") else {"message": text.strip()})
        self._lines.put(None)

    def read_until(self, message: str, **fields: object) -> dict[str, Any]:
        """Waits for a line of the log with this message and these fields."""
        seen: list[str] = []
        while (line := self._lines.get(timeout=TIMEOUT_S)) is not None:
            if line["message"] == message and fields.items() <= line.items():
                return line
            seen.append(line["message"])
        raise AssertionError(f"the server ended before it logged {message!r}; it logged {seen}")

    def stop(self) -> int:
        """Sends SIGTERM, and returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)

    def kill(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self._reader.join()


@contextmanager
def starting_server(*arguments: str, stdout: Any = None, **settings: str) -> Iterator[LiveServer]:
    """Starts a server on a free port, and kills it after the block. Does not wait until the server is ready."""
    command = [sys.executable, "-m", "wane", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(**settings), stdout=stdout, stderr=subprocess.PIPE, text=True
    )
    server = LiveServer(process)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def live_server(*arguments: str, **settings: str) -> Iterator[LiveServer]:
    """Like `starting_server`, but waits until the server is ready."""
    with starting_server(*arguments, **settings) as server:
        server.wait_until_ready()
        yield server


def post(http: httpx.Client, path: str, **body: object) -> dict[str, Any]:
    """Sends a request that must succeed. Returns the document of its answer."""
    answer = http.post(path, json=body)
    assert answer.is_success, answer.text
    document: dict[str, Any] = answer.json()
    return document


def run(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `wane` with these arguments, and waits until it exits."""
    return subprocess.run(
        [sys.executable, "-m", "wane", *arguments],
        cwd=ROOT,
        env=environment() if env is None else dict(env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
