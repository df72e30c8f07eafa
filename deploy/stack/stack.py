"""All services of `docker-compose.yml` as processes of this machine, in a folder of their own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from deploy.stack import secrets
from deploy.stack.compose import Service, read
from deploy.stack.local import ELSEWHERE, PROMETHEUS, ROOT, SERVER, Place, command
from deploy.stack.process import Process

COMPOSE = ROOT / "docker-compose.yml"
ENTRANCE = "haproxy"
STORE = "redis"
KEYS = "WANE_API_KEYS_FILE"


def replicas() -> list[str]:
    """The names of the servers."""
    return sorted(service.name for service in read(COMPOSE) if service.image == SERVER)


def run_here() -> list[Service]:
    """The services of the compose file whose programs this machine may have."""
    return [service for service in read(COMPOSE) if service.image.partition(":")[0] not in ELSEWHERE]


class Stack:
    """Every service, started after those that it needs, and stopped before them; a context.

    `folder` takes logs and volumes. `published` has the port for those that the compose file publishes, by the port
    that it publishes; without it every port is a free one. `variables` are set for services, by name, beside those of
    the compose file. `whole` is all of it: else nobody is asked for a key, and Prometheus is left out, for those who
    look at something else. Secrets that are not in the `folder` are made.
    """

    def __init__(
        self,
        folder: Path,
        published: Mapping[int, int] | None = None,
        variables: Mapping[str, Mapping[str, str]] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        services = [service for service in run_here() if whole or service.name != PROMETHEUS]
        self.addresses = _addresses(services, published or {})
        self.logs = folder / "logs"
        self.secrets = folder / "secrets"
        secrets.make(self.secrets)
        place = Place(self.addresses, self.secrets, folder / "volumes", folder / "copies")
        self.processes: dict[str, Process] = {}
        for service in services:
            added = (variables or {}).get(service.name, {})
            own = {name: value for name, value in service.environment.items() if whole or name != KEYS}
            service = replace(service, environment={**own, **added})
            self.processes[service.name] = Process(
                service,
                command(service, place),
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
        return f"redis://:{self.secret(secrets.REDIS_PASSWORD)}@127.0.0.1:{self.processes[STORE].port}/0"

    @property
    def administered_store(self) -> str:
        """The same, for who may do everything there: Wane may not."""
        return self.store.replace(
            f"//:{self.secret(secrets.REDIS_PASSWORD)}", f"//admin:{self.secret(secrets.ADMIN_PASSWORD)}"
        )

    def secret(self, name: str) -> str:
        """One of the secrets, by its file in the folder of them."""
        return (self.secrets / name).read_text(encoding="utf-8").strip()

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

    def __exit__(self, *raised: object) -> None:
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
