"""Runs the services of `docker-compose.yml` as local processes, except those whose programs Debian and Ubuntu do not
package. All files of the processes are in one folder."""

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
    """Returns the names of the Wane servers."""
    return sorted(service.name for service in read(COMPOSE) if service.image == SERVER)


def run_here() -> list[Service]:
    """Returns the services of the compose file whose programs can be installed on this machine."""
    return [service for service in read(COMPOSE) if service.image.partition(":")[0] not in ELSEWHERE]


class Stack:
    """A context manager that runs every service during its `with` block. A service starts after the services that it
    depends on, and stops before them. `folder` is for logs, volumes and secrets. Missing secrets are created.
    `published` has the local port for each port that the compose file publishes. For a port that it lacks, the local
    port is a free port. `variables` has additional environment variables for each service. If `whole` is false, the
    servers require no API keys, and Prometheus does not run.
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
        """The address of HAProxy, to which clients send requests."""
        return self.processes[ENTRANCE].url

    @property
    def port(self) -> int:
        """HAProxy's port for clients."""
        return self.processes[ENTRANCE].port

    @property
    def operations(self) -> int:
        """The port of HAProxy's status page and metrics."""
        return self.addresses[ENTRANCE, 8404]

    @property
    def store(self) -> str:
        """The address of the session store."""
        return f"redis://:{self.secret(secrets.REDIS_PASSWORD)}@127.0.0.1:{self.processes[STORE].port}/0"

    @property
    def administered_store(self) -> str:
        """The address of the session store for the user `admin`, who has all permissions."""
        return self.store.replace(
            f"//:{self.secret(secrets.REDIS_PASSWORD)}", f"//admin:{self.secret(secrets.ADMIN_PASSWORD)}"
        )

    def secret(self, name: str) -> str:
        """Returns the secret in the file with this name."""
        return (self.secrets / name).read_text(encoding="utf-8").strip()

    @property
    def replicas(self) -> list[Process]:
        """The Wane servers, in the order of their names."""
        found = (process for process in self.processes.values() if process.service.image == SERVER)
        return sorted(found, key=lambda process: process.name)

    def start(self) -> None:
        """Starts all services and waits until they are ready. Raises ProcessFailed if a service does not start."""
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
        """Stops all services, each before the services that it depends on. Returns the exit codes. A killed process has
        a negative exit code."""
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
        """Restarts the services that have ended, as the compose file requires. Returns their names."""
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
        """Kills all services."""
        for process in self.processes.values():
            process.kill()


def _addresses(services: list[Service], published: Mapping[int, int]) -> dict[tuple[str, int], int]:
    """Returns a local port for every container port of every service."""
    wanted = [(service, port) for service in services for port in service.ports]
    with contextlib.ExitStack() as stack:
        found: dict[tuple[str, int], int] = {}
        for service, port in wanted:
            held = stack.enter_context(socket.socket())
            held.bind(("127.0.0.1", 0))
            fixed = published.get(service.published.get(port, -1))
            found[service.name, port] = held.getsockname()[1] if fixed is None else fixed
    return found
