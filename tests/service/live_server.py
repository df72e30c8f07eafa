"""The real server as a process of its own, as an operator starts it."""

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

ROOT = Path(__file__).parents[2]
BUNDLE = str(ROOT / "models" / "bundles" / "rnn-stable")
"""The model that is loaded soonest."""
TIMEOUT_S = 300
BUNDLES = "WANE_BUNDLES"  # may be given from outside, to run these tests on other bundles than the shipped ones


UNTESTED = """
import sys
from importlib import metadata

version = metadata.version
metadata.version = lambda name: "0.0.1" if name == "uvicorn" else version(name)
from wane.cli import main

sys.exit(main())
"""
"""`wane` where uvicorn is installed in a release that was not tested."""


def environment(**settings: str) -> dict[str, str]:
    """This process's environment, with the settings of a test and no others but where the bundles are."""
    inherited = {name: value for name, value in os.environ.items() if name == BUNDLES or not name.startswith("WANE_")}
    return {**inherited, **settings}


class LiveServer:
    """A server process, its address, and its log, which a thread reads as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: Queue[dict[str, Any] | None] = Queue()
        self.said: list[str] = []  # all of the log, as it came
        self._reader = Thread(target=self._read)
        self._reader.start()
        self.url = ""

    def wait_until_ready(self) -> None:
        """Reads the address from the log."""
        self.url = self.read_until("listening")["url"]
        self.read_until("ready")

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
        raise AssertionError(f"the server ended before it said {message!r}; it said {seen}")

    def stop(self) -> int:
        """Sends SIGTERM, and returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)

    def kill(self) -> None:
        """Ends the process, however it is."""
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self._reader.join()


@contextmanager
def starting_server(
    *arguments: str, stdout: Any = None, plain_uvicorn: Any = False, **settings: str
) -> Iterator[LiveServer]:
    """A server on a free port that has only been started, and is ended with the block. `plain_uvicorn`: it takes the
    installed uvicorn for an untested release."""
    program = ["-c", UNTESTED] if plain_uvicorn else ["-m", "wane"]
    command = [sys.executable, *program, "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(**settings), stdout=stdout, stderr=subprocess.PIPE, text=True
    )
    server = LiveServer(process)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def live_server(*arguments: str, plain_uvicorn: Any = False, **settings: str) -> Iterator[LiveServer]:
    """As `starting_server`, ready for requests."""
    with starting_server(*arguments, plain_uvicorn=plain_uvicorn, **settings) as server:
        server.wait_until_ready()
        yield server


def run(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`wane` with these arguments, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "wane", *arguments],
        cwd=ROOT,
        env=environment() if env is None else dict(env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
