"""The services that a server may use: Redis, which stores sessions, and a collector, which receives traces.

Both services are real programs. The CPU time of a service is not counted as CPU time of the server.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.bench.contenders import Service
from tests.service.sessions.stores.redis_server import redis_server
from tests.stack.harness.receiver import receiver

APPENDED = ("--appendonly", "yes", "--appendfsync", "everysec")
"""Redis's options. With them, Redis appends every command to a file and flushes the file to the disk once a second."""


class ServiceMissing(Exception):
    """A program is not installed. The message says how to install it."""


def require_services(names: list[Service]) -> None:
    """Raises ServiceMissing if a service's program is not installed."""
    if "redis" in names and shutil.which("redis-server") is None:
        raise ServiceMissing("redis-server was not found; on Debian and Ubuntu: apt-get install redis-server")
    if "collector" in names and importlib.util.find_spec("rotel") is None:
        raise ServiceMissing("rotel, a collector of traces, was not found; the extra `dev` installs it (Linux, x86_64)")


@contextmanager
def service(name: Service) -> Iterator[str]:
    """Runs a service and yields its address."""
    if name == "redis":
        with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder), APPENDED) as server:
            yield server.url
    else:
        with receiver() as collector:
            yield collector.endpoint
