"""Runs one service of docker-compose.yml, Redis, as a local process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.stack import secrets
from deploy.stack.compose import read
from deploy.stack.local import Place, command
from deploy.stack.process import Process
from deploy.stack.stack import COMPOSE, STORE

SECRETS = Path("secrets")
PASSWORD = SECRETS / secrets.REDIS_PASSWORD
"""The path of the file with Redis's password, relative to Redis's folder."""


@contextmanager
def redis(folder: Path) -> Iterator[Process]:
    """A context manager that runs Redis on a free port during its `with` block. `folder` is for Redis's log, data file
    and password. Creates the password if it does not exist. Raises ProcessFailed if Redis does not start."""
    service = next(one for one in read(COMPOSE) if one.name == STORE)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = int(held.getsockname()[1])
    secrets.make(folder / SECRETS)
    place = Place({(STORE, service.ports[0]): port}, folder / SECRETS, volumes=folder, copies=folder / "copies")
    process = Process(service, command(service, place), port, folder / "redis.log")
    process.start()
    try:
        process.wait_ready()
        yield process
        process.terminate()
        process.wait()
    finally:
        process.kill()
