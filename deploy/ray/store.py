"""The Redis of the compose file alone, as a process of this machine: for what runs its replicas in another way."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.stack.compose import read
from deploy.stack.local import command
from deploy.stack.process import Process
from deploy.stack.stack import COMPOSE, STORE


@contextmanager
def redis(folder: Path) -> Iterator[Process]:
    """Takes commands in the block, on a free port; `folder` takes its log and its file. Raises ProcessFailed."""
    service = next(one for one in read(COMPOSE) if one.name == STORE)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = int(held.getsockname()[1])
    folder.mkdir(parents=True, exist_ok=True)
    places = {(STORE, service.ports[0]): port}
    process = Process(service, command(service, places, folder), port, folder / "redis.log")
    process.start()
    try:
        process.wait_ready()
        yield process
        process.terminate()
        process.wait()
    finally:
        process.kill()
