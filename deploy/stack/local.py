"""How a service of the compose file is run as a process of this machine: the same program, configuration and variables.

Three things differ from the container, and nothing else. A service's address is a port of 127.0.0.1, wherever its name
or its own port is written in a variable or in the command; a mounted file is read where it lies in the checkout; and a
volume is a folder, which the process runs in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.stack.compose import Service

ROOT = Path(__file__).parents[2]
SERVER = "wane"
"""The image that is built from this checkout."""

REDIS = "redis-server"

Addresses = Mapping[tuple[str, int], int]
"""The port of this machine, by a service's name and its port in the container."""


@dataclass(frozen=True, slots=True)
class Command:
    """What is run, in which folder, with which variables beside those of its surroundings."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path


def command(service: Service, addresses: Addresses, data: Path) -> Command:
    """The process for a service; `data` is where the folders of volumes are."""
    environment = {name: _located(value, service, addresses) for name, value in service.environment.items()}
    port = addresses[service.name, service.ports[0]]
    if service.image == SERVER:
        environment |= {"WANE_HOST": "127.0.0.1", "WANE_PORT": str(port)}
        return Command((sys.executable, "-m", "service"), environment, ROOT)
    arguments = [_located(_mounted(argument, service), service, addresses) for argument in service.command]
    if service.command[0] == REDIS:
        arguments += ["--bind", "127.0.0.1", "--port", str(port)]
    volumes = [mount.source for mount in service.mounts if mount.is_volume]
    return Command(tuple(arguments), environment, data / volumes[0] if volumes else ROOT)


def probe(service: Service) -> str | None:
    """The path that answers 200 once the service is ready; None for a service that does not speak HTTP."""
    return None if service.command[:1] == (REDIS,) else "/readyz"


def _mounted(argument: str, service: Service) -> str:
    """An argument, with a mounted file's place in the checkout for that in the container."""
    places = {mount.target: str(ROOT / mount.source) for mount in service.mounts if not mount.is_volume}
    return places.get(argument, argument)


def _located(text: str, service: Service, addresses: Addresses) -> str:
    """A text, with addresses of this machine for those among containers."""
    for (name, container), port in addresses.items():
        text = text.replace(f"{name}:{container}", f"127.0.0.1:{port}")
        if name == service.name:
            text = text.replace(f"*:{container}", f"127.0.0.1:{port}")
    return text
