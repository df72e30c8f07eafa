"""A real redis-server on a port and in a folder of its own, to be killed and started again; and what the tests that
need real programs have in common."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

REQUIRED = "WANE_REQUIRE_STACK"
READY = "Ready to accept connections"
TIMEOUT_S = 120
"""After which a test that waits has failed."""
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
"""Every command is on the disk before it is answered."""


def program(name: str) -> str:
    """Where a program is. Without it the test is skipped, or fails where `WANE_REQUIRE_STACK` is 1."""
    found = shutil.which(name)
    if found is None:
        say = pytest.fail if os.environ.get(REQUIRED) == "1" else pytest.skip
        say(f"{name} is not installed; scripts/install-stack does that")
    return found


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class RedisServer:
    """A redis-server process. `start` after `kill` or `stop` is the same server again: port, folder, options."""

    def __init__(self, folder: Path, options: Sequence[str] = DURABLE, port: int | None = None) -> None:
        """Nothing is started yet. `options`: of the command line, after those for port and folder."""
        self.program = program("redis-server")
        self.folder = folder
        self.options = tuple(options)
        self.port = free_port() if port is None else port
        self._process: subprocess.Popen[str] | None = None
        self._reader: Thread | None = None
        self._said: deque[str] = deque(maxlen=20)

    @property
    def url(self) -> str:
        """The address as redis-py takes it, database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def process(self) -> subprocess.Popen[str]:
        """The process that runs."""
        assert self._process is not None, "the server was not started"
        return self._process

    def start(self) -> None:
        """Starts the server, and waits until it takes commands."""
        assert self._process is None, "the server runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--daemonize", "no", *self.options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._process = process
        assert process.stdout is not None
        for line in process.stdout:
            self._said.append(line)
            if READY in line:
                break
        else:
            self.kill()
            raise AssertionError(f"redis-server ended before it took commands; it said {''.join(self._said)}")
        self._reader = Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Takes what the server says, which would stop when nobody read it."""
        assert process.stdout is not None
        with process.stdout:
            self._said.extend(process.stdout)

    def kill(self) -> None:
        """SIGKILL: nothing that is not on the disk is written any more."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Goes on after `pause`."""
        self.process.send_signal(signal.SIGCONT)

    def _end(self, sign: signal.Signals) -> None:
        process, reader = self._process, self._reader
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(sign)
        process.wait(TIMEOUT_S)
        if reader is not None:
            reader.join(TIMEOUT_S)
        elif process.stdout is not None:
            process.stdout.close()
        self._process = self._reader = None


@contextmanager
def redis_server(folder: Path, options: Sequence[str] = DURABLE, port: int | None = None) -> Iterator[RedisServer]:
    """A server that takes commands, and is gone with the block."""
    server = RedisServer(folder, options, port)
    server.start()
    try:
        yield server
    finally:
        server.kill()
