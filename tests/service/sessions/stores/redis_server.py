"""A real redis-server that tests can kill and restart. The server has its own port and its own folder. The module also
has functions for tests that need other real programs."""

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
"""The longest time, in seconds, that a test waits for an event."""
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
"""Options that make Redis write every command to the disk before it answers."""


def program(name: str) -> str:
    """Returns the path of a program. If the program is missing, skips the test, or fails the test if
    `WANE_REQUIRE_STACK` is 1."""
    found = shutil.which(name)
    if found is None:
        say = pytest.fail if os.environ.get(REQUIRED) == "1" else pytest.skip
        say(f"{name} is not installed; scripts/install-stack installs it")
    return found


def free_port() -> int:
    """Returns the number of a free TCP port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class RedisServer:
    """A redis-server process. A call of `start` after `kill` or `stop` restarts redis-server with the same port, folder
    and options."""

    def __init__(self, folder: Path, options: Sequence[str] = DURABLE, port: int | None = None) -> None:
        """The constructor does not start the server. `options` has the command-line options that follow the options for
        the port and the folder."""
        self.program = program("redis-server")
        self.folder = folder
        self.options = tuple(options)
        self.port = free_port() if port is None else port
        self._process: subprocess.Popen[str] | None = None
        self._reader: Thread | None = None
        self._said: deque[str] = deque(maxlen=20)

    @property
    def url(self) -> str:
        """The address of database 0, in redis-py's format."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def process(self) -> subprocess.Popen[str]:
        """The running process."""
        assert self._process is not None, "the server was not started"
        return self._process

    def start(self) -> None:
        """Starts the server, and waits until it accepts commands."""
        assert self._process is None, "the server runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        # Without a process title of its own, Redis keeps its environment readable, by which scripts/test finds it.
        command += ["--save", "", "--daemonize", "no", "--set-proc-title", "no", *self.options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._process = process
        assert process.stdout is not None
        for line in process.stdout:
            self._said.append(line)
            if READY in line:
                break
        else:
            self.kill()
            raise AssertionError(
                f"redis-server exited before it accepted commands; its output is {''.join(self._said)}"
            )
        self._reader = Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Reads the server's output, because a full pipe would block the server."""
        assert process.stdout is not None
        with process.stdout:
            self._said.extend(process.stdout)

    def kill(self) -> None:
        """Sends SIGKILL. The server loses all data that is not on the disk."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Sends SIGTERM."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Sends SIGSTOP. Connections stay open, but the server answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Sends SIGCONT, so the server continues after `pause`."""
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
    """Runs a redis-server process during the block."""
    server = RedisServer(folder, options, port)
    server.start()
    try:
        yield server
    finally:
        server.kill()
