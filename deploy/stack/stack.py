"""All services of `docker-compose.yml` as processes of this machine, in a folder of their own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from deploy.stack.compose import Service, read
from deploy.stack.local import ROOT, SERVER, command
from deploy.stack.process import Process

COMPOSE = ROOT / "docker-compose.yml"
ENTRANCE = "haproxy"
STORE = "redis"


def replicas() -> list[str]:
    """The names of the servers."""
    return sorted(service.name for service in read(COMPOSE) if service.image == SERVER)


class Stack:
    """Every service, started after those that it needs, and stopped before them; a context.

    `folder` takes logs and volumes. `published` has the port for those that the compose file publishes, by the port
    that it publishes; without it every port is a free one. `variables` are set for services, by name, beside those of
    the compose file.
    """

    def __init__(
        self,
        folder: Path,
        published: Mapping[int, int] | None = None,
        variables: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        services = read(COMPOSE)
        self.addresses = _addresses(services, published or {})
        self.logs = folder / "logs"
        self.processes: dict[str, Process] = {}
        for service in services:
            added = (variables or {}).get(service.name, {})
            service = replace(service, environment={**service.environment, **added})
            self.processes[service.name] = Process(
                service,
                command(service, self.addresses, folder / "volumes"),
                self.addresses[service.name, service.ports[0]],
                self.logs / f"{service.name}.log",
            )

    @property
    def url(self) -> str:
        """Where clients come."""
        return self.processes[ENTRANCE].url

    @property
    def port(self) -> int:
        """The port of `url`."""
        return self.processes[ENTRANCE].port

    @property
    def operations(self) -> int:
        """The port of HAProxy's own page and metrics."""
        return self.addresses[ENTRANCE, 8404]

    @property
    def store(self) -> str:
        """The address of the sessions' store."""
        return f"redis://127.0.0.1:{self.processes[STORE].port}/0"

    @property
    def replicas(self) -> list[Process]:
        """The servers, by name."""
        found = (process for process in self.processes.values() if process.service.image == SERVER)
        return sorted(found, key=lambda process: process.name)

    def start(self) -> None:
        """Starts all, and waits until all are ready. Raises ProcessFailed."""
        self.logs.mkdir(parents=True, exist_ok=True)
        ready: set[str] = set()
        for process in self.processes.values():
            for name in sorted(process.service.after - ready):
                self.processes[name].wait_ready()
                ready.add(name)
            process.start()
        for process in self.processes.values():
            process.wait_ready()

    def stop(self) -> dict[str, int]:
        """Stops all, those that need others first; their exit codes, negative for what had to be killed."""
        codes: dict[str, int] = {}
        for process in reversed(list(self.processes.values())):
            for other in self.processes.values():
                if process.name in other.service.after and other.running:
                    codes[other.name] = other.wait()
            process.terminate()
        for process in self.processes.values():
            if process.running:
                codes[process.name] = process.wait()
        return codes

    def tend(self) -> list[str]:
        """Starts again what has ended, as the compose file wants it; the names of those."""
        ended = [process for process in self.processes.values() if not process.running]
        for process in ended:
            process.start()
        return [process.name for process in ended]

    def __enter__(self) -> Stack:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends all at once."""
        for process in self.processes.values():
            process.kill()


def _addresses(services: list[Service], published: Mapping[int, int]) -> dict[tuple[str, int], int]:
    """The port of this machine for every port of a service."""
    wanted = [(service, port) for service in services for port in service.ports]
    with contextlib.ExitStack() as stack:
        found: dict[tuple[str, int], int] = {}
        for service, port in wanted:
            held = stack.enter_context(socket.socket())
            held.bind(("127.0.0.1", 0))
            fixed = published.get(service.published.get(port, -1))
            found[service.name, port] = held.getsockname()[1] if fixed is None else fixed
    return found
