"""How a service of the compose file is run as a process of this machine: the same program, configuration and variables.

Six things differ from the container, and nothing else. A service's address is a port of 127.0.0.1, wherever its name or
its own port is written in a variable, in the command, or in a mounted file; that is where a proxy is, too; the folder
of its secrets is one of this machine, wherever its path is; a mounted file is read where it lies in the checkout, or as
a copy where one of these is written in it; a volume is a folder, which the process runs in; and it may take what memory
there is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.stack.compose import SECRETS, Mount, Service

ROOT = Path(__file__).parents[2]
SERVER = "wane"
"""The image that is built from this checkout."""

PROXIES = "WANE_TRUSTED_PROXIES"
REDIS = "redis-server"
PROMETHEUS = "prometheus"
ELSEWHERE = frozenset({"grafana/grafana"})
"""Images of programs that no package of Debian or Ubuntu has: their services are not run here."""

Addresses = Mapping[tuple[str, int], int]
"""The port of this machine, by a service's name and its port in the container."""


@dataclass(frozen=True, slots=True)
class Command:
    """What is run, in which folder, with which variables beside those of its surroundings."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path


@dataclass(frozen=True, slots=True)
class Place:
    """Where things are on this machine: ports by address, the folders of secrets, those of volumes, and copies of what
    is mounted."""

    addresses: Addresses
    secrets: Path
    volumes: Path
    copies: Path


def command(service: Service, place: Place) -> Command:
    """The process for a service. What it reads is copied, where it has to be."""
    environment = {name: _located(value, service, place) for name, value in service.environment.items()}
    port = place.addresses[service.name, service.ports[0]]
    if service.image == SERVER:
        environment |= {"WANE_HOST": "127.0.0.1", "WANE_PORT": str(port)}
        if PROXIES in environment:
            environment[PROXIES] = "127.0.0.1"
        return Command((sys.executable, "-m", "wane", "serve"), environment, ROOT)
    program, *rest = service.command
    arguments = [_located(_mounted(argument, service, place), service, place) for argument in rest]
    if program == REDIS:
        arguments += ["--bind", "127.0.0.1", "--port", str(port)]
    volumes = [mount.source for mount in service.mounts if mount.is_volume]
    folder = place.volumes / volumes[0] if volumes else ROOT
    return Command((Path(program).name, *arguments), environment, folder)


def probe(service: Service) -> str | None:
    """The path that answers 200 once the service is ready; None for a service that does not speak HTTP."""
    if service.command[:1] == (REDIS,):
        return None
    return "/-/ready" if service.name == PROMETHEUS else "/readyz"


def _mounted(argument: str, service: Service, place: Place) -> str:
    """An argument, with a mounted file's place on this machine for that in the container: behind a `=`, or alone."""
    option, equals, path = argument.rpartition("=")
    for mount in service.mounts:
        if not mount.is_volume and (path == mount.target or path.startswith(f"{mount.target}/")):
            return f"{option}{equals}{_source(mount, service, place)}{path.removeprefix(mount.target)}"
    return argument


def _source(mount: Mount, service: Service, place: Place) -> Path:
    """What is mounted, or its copy, where addresses or secrets are written in it."""
    source = ROOT / mount.source
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    located = {path: _located(text, service, place) for path, text in texts.items()}
    if located == texts:
        return source
    copy = place.copies / service.name / source.name
    for path, text in located.items():
        target = copy / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return copy


def _located(text: str, service: Service, place: Place) -> str:
    """A text, with addresses and secrets of this machine for those of a container."""
    for (name, container), port in place.addresses.items():
        text = text.replace(f"{name}:{container}", f"127.0.0.1:{port}")
        if name == service.name:
            text = text.replace(f"*:{container}", f"127.0.0.1:{port}")
            text = text.replace(f"0.0.0.0:{container}", f"127.0.0.1:{port}")
    if service.secrets is not None:
        text = text.replace(f"{SECRETS}/", f"{place.secrets / service.secrets}/")
    return text
