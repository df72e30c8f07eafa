"""Runs a service of the compose file as a process of this machine, with the same program, configuration and variables.

The process differs from the container in six ways. In variables, commands and mounted files, a service's address
becomes a port of 127.0.0.1. The trusted proxy is 127.0.0.1. The path of the secrets becomes a folder of this machine. A
mounted file is read from the checkout, or from a copy if it contains one of these. A volume is a folder, and the
process's working directory. Memory is not limited.
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
"""Images of programs that Debian and Ubuntu do not package; their services are not run here."""

Addresses = Mapping[tuple[str, int], int]
"""Maps a service's name and its port in the container to a port of this machine."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, its working directory, and its variables besides the inherited ones."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path


@dataclass(frozen=True, slots=True)
class Place:
    """Ports and folders of this machine: ports by address, and the folders of secrets, of volumes, and of copies of
    mounted files."""

    addresses: Addresses
    secrets: Path
    volumes: Path
    copies: Path


def command(service: Service, place: Place) -> Command:
    """Returns the command of a service. Copies the mounted files that have to be changed."""
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
    """Returns the path that answers 200 once the service is ready; None if the service does not speak HTTP."""
    if service.command[:1] == (REDIS,):
        return None
    return "/-/ready" if service.name == PROMETHEUS else "/readyz"


def _mounted(argument: str, service: Service, place: Place) -> str:
    """Returns an argument in which the path of a mounted file, alone or after a `=`, is replaced by its path on this
    machine."""
    option, equals, path = argument.rpartition("=")
    for mount in service.mounts:
        if not mount.is_volume and (path == mount.target or path.startswith(f"{mount.target}/")):
            return f"{option}{equals}{_source(mount, service, place)}{path.removeprefix(mount.target)}"
    return argument


def _source(mount: Mount, service: Service, place: Place) -> Path:
    """Returns the path of a mount's source, or of its copy if it contains addresses or paths of secrets."""
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
    """Returns a text in which a container's addresses and paths of secrets are replaced by this machine's."""
    for (name, container), port in place.addresses.items():
        text = text.replace(f"{name}:{container}", f"127.0.0.1:{port}")
        if name == service.name:
            text = text.replace(f"*:{container}", f"127.0.0.1:{port}")
            text = text.replace(f"0.0.0.0:{container}", f"127.0.0.1:{port}")
    if service.secrets is not None:
        text = text.replace(f"{SECRETS}/", f"{place.secrets / service.secrets}/")
    return text
