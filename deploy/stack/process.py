"""Runs a service as a process. Starts it, waits until it is ready, stops or kills it, and restarts it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from deploy.stack.compose import Service
from deploy.stack.local import Command, probe

READY_WITHIN_S = 120.0
ASK_EVERY_S = 0.05
KILLED_WITHIN_S = 10.0
LOG_TAIL_CHARACTERS = 2000


class ProcessFailed(Exception):
    """A process ended, or was not ready before the timeout. The message has the last lines of its log."""


class Process:
    """The process of one service. `port` is the port of the readiness probe. The output of the process is appended to
    `log`."""

    def __init__(self, service: Service, command: Command, port: int, log: Path) -> None:
        self.service = service
        self.command = command
        self.port = port
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """The service's name."""
        return self.service.name

    @property
    def url(self) -> str:
        """The service's address for HTTP."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        """True if the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None, "the process was not started"
        return self._process.pid

    def start(self) -> None:
        """Starts the process in its own process session, so that the terminal's signals reach only the parent process.

        Raises ProcessFailed if the program is not installed.
        """
        assert not self.running, "the process is already running"
        self.command.folder.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    self.command.arguments,
                    cwd=self.command.folder,
                    env={**inherited, **self.command.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                program = self.command.arguments[0]
                raise ProcessFailed(f"{program} is not installed; scripts/install-stack installs it") from error

    def wait_ready(self) -> None:
        """Waits until the service is ready. Raises ProcessFailed if the service ends or exceeds the timeout."""
        deadline = time.monotonic() + READY_WITHIN_S
        while not self.ready():
            if not self.running:
                raise ProcessFailed(
                    f"{self.name} ended before it was ready; its log, {self.log}, ends in\n{self._tail()}"
                )
            if time.monotonic() > deadline:
                raise ProcessFailed(
                    f"{self.name} was not ready in {READY_WITHIN_S:.0f} s; its log ends in\n{self._tail()}"
                )
            time.sleep(ASK_EVERY_S)

    def ready(self) -> bool:
        """Returns whether the service accepts requests."""
        path = probe(self.service)
        try:
            if path is None:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    connection.sendall(b"PING\r\n")
                    return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            with urllib.request.urlopen(self.url + path, timeout=1) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def terminate(self) -> None:
        """Sends SIGTERM if the process is running."""
        if self.running:
            os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Waits until the process ends. Kills the process after the service's grace period. Returns the exit code."""
        assert self._process is not None, "the process was not started"
        try:
            return self._process.wait(self.service.grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode

    def kill(self) -> None:
        """Sends SIGKILL to the process and its children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(KILLED_WITHIN_S)

    def _tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:]
