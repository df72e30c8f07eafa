"""Runs the workers of a server, and starts a worker again that has ended.

The supervisor opens one listening socket for each worker, all on the same port (SO_REUSEPORT), and keeps them, so that
the kernel queues the connections of a worker that is starting again. If the worker then cannot start, its next socket
listens only when the worker does, so that the other workers get the connections. On systems other than Linux all
workers share one socket.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import msgspec

from wane.service.observability import logs
from wane.service.observability.logs import SERVICE
from wane.service.server import say_ready
from wane.service.sessions.stores import dump_file
from wane.service.sessions.stores.memory import ASIDE
from wane.service.sessions.stores.store import UnsavedSessions
from wane.service.settings import Settings
from wane.service.types.request import MAX_POSITION, id_of
from wane.service.workers.placement import worker_of
from wane.service.workers.shared import SharedTable
from wane.service.workers.worker import FAILED_FILE, LIMITS, LOG_TURNS, Place, part_of

BACKLOG = 2048  # uvicorn's default
RESTART_S = 1.0  # the shortest time between two starts of a worker
MOST_RESTART_S = 30.0  # the same, for a worker that could not start several times
LOOK_S = 0.05


def run(settings: Settings, arguments: Sequence[str], workers: int) -> int:
    """Runs the workers until a signal stops them. `arguments` are those of `wane serve`. Returns the exit status."""
    with TemporaryDirectory(prefix="wane-") as folder:  # has mode 0700
        logs.configure(settings.log_level, None, Path(folder, LOG_TURNS))
        if settings.session_file is not None:
            spread(settings.session_file, workers)
        supervisor = Supervisor(settings, arguments, workers, folder)
        status = supervisor.run()
    if settings.session_file is not None:
        gather(settings.session_file)
    return status


@dataclass(slots=True)
class Process:
    """A worker's process. `ready` is the file descriptor that tells whether it has been ready. `restart_s` is the
    shortest time from its start to the next one. `is_first` is false if an earlier process of this worker was ready.
    `has_ended` says whether the supervisor has noticed its end."""

    started_s: float
    process: subprocess.Popen[bytes]
    ready: int
    restart_s: float
    is_first: bool
    has_been_ready: bool = False
    has_ended: bool = False

    def look(self) -> None:
        """Reads whether the worker is ready."""
        if not self.has_been_ready and not self.has_ended:
            with suppress(BlockingIOError):
                self.has_been_ready = bool(os.read(self.ready, 1))


class Supervisor:
    """The process that starts the workers."""

    def __init__(self, settings: Settings, arguments: Sequence[str], workers: int, folder: str) -> None:
        self._arguments = arguments
        self._workers = workers
        self._folder = folder
        self._has_key_file = settings.api_keys_file is not None
        self._sockets = listeners(settings, workers)
        host, port = self._sockets[0].getsockname()[:2]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        SERVICE.info("listening", extra={"fields": {"url": self._url}})
        self._processes: list[Process] = []
        self._alive, self._keeps_alive = os.pipe()
        self._table = SharedTable(Path(folder, LIMITS), workers)
        self._signals = 0
        self._has_announced = False

    def run(self) -> int:
        """Starts the workers, and waits until they have ended. Returns the exit status."""
        for stop in (signal.SIGTERM, signal.SIGINT):
            signal.signal(stop, self._stop)
        if self._has_key_file:  # without one, the hang-up of a terminal ends the server
            signal.signal(signal.SIGHUP, lambda *_: self._send(signal.SIGHUP))
        self._processes = [self._start(number, RESTART_S, is_first=True) for number in range(self._workers)]
        status = 0
        while not self._signals and not status:
            time.sleep(LOOK_S)
            for number, worker in enumerate(self._processes):
                worker.look()
                ended = worker.process.poll()
                if ended is None:
                    continue
                if worker.is_first and not worker.has_been_ready:  # it cannot start, so another one could not either
                    status = ended if ended > 0 else 1
                    break
                if not worker.has_ended:
                    self._after(number, worker, ended)
                elif time.monotonic() >= worker.started_s + worker.restart_s:
                    self._processes[number] = self._start(number, worker.restart_s, is_first=False)
            self._announce()
        for listener in self._sockets:  # so that the port is closed when the workers have closed theirs
            listener.close()
        self._send(signal.SIGTERM)
        for worker in self._processes:
            worker.look()
            end = worker.process.wait()
            if worker.has_ended:  # before the signal to stop
                end = 0
            elif end < 0:  # a signal has killed it; before it was ready, that may be the signal to stop
                end = int(worker.has_been_ready)
            status = max(status, end)
        return status

    def _start(self, number: int, restart_s: float, *, is_first: bool) -> Process:
        """Starts a worker. The arguments are those of `Process`."""
        ready, says_ready = os.pipe()
        os.set_blocking(ready, False)
        listener = self._sockets[number % len(self._sockets)].fileno()
        place = Place(number, self._workers, self._folder, listener, says_ready, self._alive)
        Path(place.sockets[number]).unlink(missing_ok=True)
        command = [sys.executable, "-m", "wane.service.workers.worker", msgspec.json.encode(place).decode()]
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a worker ignores it until it handles it
        process = subprocess.Popen(  # noqa: S603  (this Python, and this command's own arguments)
            [*command, *self._arguments], pass_fds=(listener, says_ready, self._alive), start_new_session=True
        )
        signal.signal(signal.SIGHUP, before)
        os.close(says_ready)
        return Process(time.monotonic(), process, ready, restart_s, is_first)

    def _after(self, number: int, worker: Process, ended: int) -> None:
        """Prepares the next start of a worker that has ended with the status `ended`."""
        worker.has_ended = True
        os.close(worker.ready)
        self._table.forget(number)
        Path(self._folder, FAILED_FILE).unlink(missing_ok=True)
        worker.restart_s = RESTART_S if worker.has_been_ready else min(2 * worker.restart_s, MOST_RESTART_S)
        if not worker.has_been_ready and len(self._sockets) > 1:
            before = self._sockets[number]
            self._sockets[number] = bound(before.family, before.getsockname())
            before.close()
        SERVICE.error("worker %d has ended with status %d, and is started again", number, ended)

    def _announce(self) -> None:
        """Prints `ready` when all workers are ready, if the output is a terminal."""
        if not self._has_announced and all(worker.has_been_ready for worker in self._processes):
            self._has_announced = True
            SERVICE.info("ready", extra={"fields": {"workers": self._workers}})
            say_ready([f"{self._url} ({self._workers} workers)"])

    def _stop(self, number: int, _: FrameType | None) -> None:
        """Ends the workers. A second SIGINT stops them immediately."""
        self._signals += 1
        if self._signals > 1 and number == signal.SIGINT:
            self._send(signal.SIGINT)

    def _send(self, number: signal.Signals) -> None:
        for worker in self._processes:
            if worker.process.poll() is None:
                worker.process.send_signal(number)


def bound(family: int, address: Any) -> socket.socket:
    """Returns a socket at an address, which does not listen. On Linux several sockets can have the same address. Raises
    OSError."""
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform == "linux":
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(address)
    return made


def listeners(settings: Settings, workers: int) -> list[socket.socket]:
    """Returns the listening sockets. Raises OSError if the port is in use."""
    family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    is_shared = sys.platform != "linux"
    sockets: list[socket.socket] = []
    for _ in range(1 if is_shared else workers):
        listener = bound(family, address)
        address = listener.getsockname()  # the first socket chooses the port if it is 0
        listener.listen(BACKLOG)
        sockets.append(listener)
    return sockets


def parts_of(file: Path) -> list[Path]:
    """Returns the files of the workers' sessions."""
    return sorted(file.parent.glob(f"{file.name}.worker-*[0-9]"))


def spread(file: Path, workers: int) -> None:
    """Divides a file of sessions into one for each worker. Raises StoreError, OSError."""
    before = parts_of(file)
    files = [path for path in (file, *before) if path.exists()]
    records = [record for path in files for record in dump_file.load(path, MAX_POSITION)]
    for number in range(workers):
        own = [record for record in records if worker_of(id_of(record.session), workers) == number]
        dump_file.save(part_of(file, number), own)
    for path in before:
        if path not in {part_of(file, number) for number in range(workers)}:
            path.unlink()
    if file.exists():
        file.replace(file.with_name(file.name + ASIDE))


def gather(file: Path) -> None:
    """Joins the workers' files of sessions in one file. Raises UnsavedSessions."""
    parts = parts_of(file)
    records = [record for part in parts for record in dump_file.load(part, MAX_POSITION)]
    try:
        dump_file.save(file, records)
    except OSError as error:
        raise UnsavedSessions(
            f"{len(records)} sessions stay in {', '.join(map(str, parts))}, because they could not be written to "
            f"{file}: {error.strerror}"
        ) from error
    for part in parts:
        part.unlink()
        part.with_name(part.name + ASIDE).unlink(missing_ok=True)
