"""Starts a server on free ports, waits until it answers, and stops it together with all its child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import httpx

from benchmarks.bench.contenders import Contender

MARK = "BENCH_MARK"
READY_WITHIN_S = 120.0
STOPPED_WITHIN_S = 20.0
KILLED_WITHIN_S = 5.0
TICKS = os.sysconf("SC_CLK_TCK")


class ServerFailed(Exception):
    """A server did not start or has stopped. The message contains the end of its log."""


class ServerProcess:
    """Context manager that runs a contender's server on one bundle.

    The server's processes have an environment variable with a unique value, by which they are found in /proc. Processes
    that have left the server's process group are therefore stopped, too. Linux only.
    """

    def __init__(
        self, contender: Contender, bundle: Path, log: Path, addresses: Mapping[str, str] | None = None
    ) -> None:
        """addresses: the address of each of the contender's services, by the service's name."""
        self._contender, self._log = contender, log
        self._mark = uuid.uuid4().hex
        ports = free_ports(3)
        self.port = ports[0]
        self.url = f"http://127.0.0.1:{self.port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._arguments = contender.arguments(bundle, ports)
        self._variables = {**contender.variables(bundle, ports, addresses or {}), MARK: self._mark}

    def __enter__(self) -> ServerProcess:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._arguments,
                cwd=self._contender.tree,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        if left := self._pids_after(STOPPED_WITHIN_S):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._pids_after(KILLED_WITHIN_S)
        self._process.wait()

    def wait_ready(self, path: str, body: str) -> bytes:
        """Repeats the request until the server answers it successfully, and returns the answer. Raises ServerFailed if
        the server ends or does not answer in time."""
        deadline = time.monotonic() + READY_WITHIN_S
        with httpx.Client(base_url=self.url, timeout=10, trust_env=False) as client:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise ServerFailed(
                        f"{self._contender.title} ended with exit status {self._process.returncode}: {self._tail()}"
                    )
                with contextlib.suppress(httpx.HTTPError):
                    answer = client.post(path, content=body, headers={"content-type": "application/json"})
                    if answer.is_success:
                        return answer.content
                time.sleep(0.1)
        raise ServerFailed(f"{self._contender.title} did not answer within {READY_WITHIN_S:.0f} s: {self._tail()}")

    @property
    def pid(self) -> int:
        """The id of the first process."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Returns the user and system CPU seconds of all running processes of the server."""
        spent = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                spent += int(fields[11]) + int(fields[12])
        return spent / TICKS

    def pids(self) -> Iterator[int]:
        """Yields the ids of all running processes of the server."""
        wanted = f"{MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        yield int(entry.name)

    def _pids_after(self, seconds: float) -> list[int]:
        """Waits until the server's processes have ended. Returns the ids of the processes that still run after
        `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := list(self.pids())) and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(0.05)
        return left

    def _tail(self) -> str:
        return f"{self._log} ends in\n{self._log.read_text(errors='replace')[-2000:]}"


def free_ports(count: int) -> list[int]:
    """Returns numbers of free TCP ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]
