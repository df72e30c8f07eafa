"""Runs one worker of a server. The supervisor starts it as `python -m wane.service.workers.worker`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from wane.arguments import FAILED, Parser, printable
from wane.service import server
from wane.service.app import Application
from wane.service.net.limits import Limits
from wane.service.sessions.stores.store import UnsavedSessions
from wane.service.settings import Settings
from wane.service.workers.links import Peers
from wane.service.workers.placement import Placement
from wane.service.workers.shared import SharedBucket, SharedSessions, SharedTable
from wane.service.workers.steps import Step

FAILED_FILE = "failed"  # in the workers' folder, made by the first one that fails
LIMITS = "limits"  # the file of the table of shared limits
NAMES = "models"  # the file of the names of the served models
COUNTS = "counts"  # the file of a worker's counters, with the worker's number as its ending
LOG_TURNS = "log"  # the file that a worker locks while it logs
ANSWER_S = 5  # the time beyond a request's deadline in which another worker can answer it


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place in its server: its number, the number of workers, their folder, and file descriptors. `listener`
    is a socket that listens. The worker writes a byte to `ready` when it is ready. `alive` ends when the supervisor
    ends."""

    number: int
    workers: int
    folder: str
    listener: int
    ready: int
    alive: int

    @property
    def sockets(self) -> list[str]:
        """The paths of the workers' Unix sockets."""
        return [f"{self.folder}/{number}.sock" for number in range(self.workers)]


def share_of(settings: Settings, place: Place) -> Settings:
    """Returns one worker's settings. The memory and the connections of a server are divided between its workers."""
    divided = ("state_budget_bytes", "session_budget_bytes", "receive_budget_bytes", "max_connections")
    changed: dict[str, object] = {name: -(-getattr(settings, name) // place.workers) for name in divided}
    if settings.session_file is not None:
        changed["session_file"] = part_of(settings.session_file, place.number)
    return settings.model_copy(update=changed)


def part_of(file: Path, number: int) -> Path:
    """Returns the file of one worker's sessions."""
    return file.with_name(f"{file.name}.worker-{number}")


def main(arguments: Sequence[str]) -> int:
    """Runs the worker. `arguments` are its place, as JSON, and those of `wane serve`. Returns the exit status."""
    place = msgspec.json.decode(arguments[0], type=Place)
    try:
        run(place, arguments[1:])
    except (*server.FAILURES, UnsavedSessions) as error:
        with suppress(FileExistsError), Path(place.folder, FAILED_FILE).open("x"):  # all workers fail for one reason
            print(printable(f"error: {error}"), file=sys.stderr)  # noqa: T201
        return server.UNSAVED if isinstance(error, UnsavedSessions) else FAILED
    return 0


def run(place: Place, arguments: Sequence[str]) -> None:
    """Runs the worker until a signal stops it. Raises the errors of `server.run`."""
    parser = Parser("wane serve")
    Settings.add_arguments(parser)
    settings = share_of(Settings.read(os.environ, parser.parse_args(arguments)), place)
    table = SharedTable(Path(place.folder, LIMITS), place.workers)

    def placed(app: Application, limits: Limits) -> Placement:
        timeout_s = settings.request_timeout_ms / 1000 + ANSWER_S
        peers = Peers(place.sockets, place.number, limits, timeout_s, app, partial(Step, app))
        return Placement(app, peers, place.number, place.workers)

    threading.Thread(target=_end_with, args=(place.alive,), daemon=True).start()
    worker = server.Worker(
        number=place.number,
        log_turns=Path(place.folder, LOG_TURNS),
        place=placed,
        sockets=[socket.socket(fileno=place.listener)],
        ready=lambda _: os.write(place.ready, b"r"),
        make_bucket=partial(SharedBucket, table),
        owned=SharedSessions(table, place.number),
        names_file=Path(place.folder, NAMES),
        counts_file=Path(place.folder, f"{COUNTS}.{place.number}"),
    )
    server.run(settings, worker)


def _end_with(alive: int) -> None:
    """Stops this process when the supervisor has ended."""
    os.read(alive, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
