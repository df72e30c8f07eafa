"""The Redis of the compose file alone, as a process of this machine, and for whoever reaches it there: for what runs
its replicas in another way."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from deploy.stack.compose import read
from deploy.stack.local import Place, command
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
    service = replace(service, command=service.command[:2])  # without the file of who may use it
    place = Place({(STORE, service.ports[0]): port}, secrets=folder, volumes=folder, copies=folder)
    process = Process(service, command(service, place), port, folder / "redis.log")
    process.start()
    try:
        process.wait_ready()
        yield process
        process.terminate()
        process.wait()
    finally:
        process.kill()
