"""Runs a service of the compose file as a local process, with the same program, configuration and variables.

The process differs from the container in seven ways. In variables, commands and mounted files, the address of a service
becomes a port of 127.0.0.1. The trusted proxy is 127.0.0.1. The path of the secrets becomes a local folder. A mounted
file is read from the checkout. If the file contains an address of a service or a path of secrets, a changed copy is
read instead. A volume is a local folder, which is also the working directory of the process. The bundles are read from
their local folder. Memory is not limited.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.stack.compose import SECRETS, Mount, Service

ROOT = Path(__file__).parents[2]
SERVER = "wane"
"""The name of the image that is built from this checkout."""

PROXIES = "WANE_TRUSTED_PROXIES"
BUNDLES = "WANE_BUNDLES"
REDIS = "redis-server"
PROMETHEUS = "prometheus"
ELSEWHERE = frozenset({"grafana/grafana"})
"""Images of programs that Debian and Ubuntu do not package. The services with these images do not run locally."""

Addresses = Mapping[tuple[str, int], int]
"""Maps a service's name and its container port to a local port."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, its working directory, and its additional environment variables."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path


@dataclass(frozen=True, slots=True)
class Place:
    """Local ports and folders. `addresses` maps the address of a service to a local port. The folders are for secrets,
    volumes, and changed copies of mounted files."""

    addresses: Addresses
    secrets: Path
    volumes: Path
    copies: Path


def command(service: Service, place: Place) -> Command:
    """Returns the command of a service. Writes changed copies of the mounted files that contain addresses of services
    or paths of secrets."""
    environment = {name: _located(value, service, place) for name, value in service.environment.items()}
    port = place.addresses[service.name, service.ports[0]]
    if service.image == SERVER:
        environment |= {"WANE_HOST": "127.0.0.1", "WANE_PORT": str(port)}
        if PROXIES in environment:
            environment[PROXIES] = "127.0.0.1"
        for mount in service.mounts:
            if environment.get(BUNDLES) == mount.target:
                environment[BUNDLES] = str(ROOT / mount.source)
        return Command((sys.executable, "-m", "wane", "serve"), environment, ROOT)
    program, *rest = service.command
    arguments = [_located(_mounted(argument, service, place), service, place) for argument in rest]
    if program == REDIS:
        # Without a process title of its own, Redis keeps its environment readable, by which scripts/test finds it.
        arguments += ["--bind", "127.0.0.1", "--port", str(port), "--set-proc-title", "no"]
    volumes = [mount.source for mount in service.mounts if mount.is_volume]
    folder = place.volumes / volumes[0] if volumes else ROOT
    return Command((Path(program).name, *arguments), environment, folder)


def probe(service: Service) -> str | None:
    """Returns the HTTP path of the service's readiness probe, or None if the service does not speak HTTP."""
    if service.command[:1] == (REDIS,):
        return None
    return "/-/ready" if service.name == PROMETHEUS else "/readyz"


def _mounted(argument: str, service: Service, place: Place) -> str:
    """Returns a command's argument, with the path of a mounted file in the container replaced with the file's local
    path. The path is the whole argument or the part after a `=`."""
    option, equals, path = argument.rpartition("=")
    for mount in service.mounts:
        if not mount.is_volume and (path == mount.target or path.startswith(f"{mount.target}/")):
            return f"{option}{equals}{_source(mount, service, place)}{path.removeprefix(mount.target)}"
    return argument


def _source(mount: Mount, service: Service, place: Place) -> Path:
    """Returns the path of a mount's source, or of a changed copy if the source contains addresses or paths of
    secrets."""
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
    """Returns the text with local addresses instead of the services' addresses, and local paths instead of the secrets'
    paths in containers."""
    for (name, container), port in place.addresses.items():
        text = text.replace(f"{name}:{container}", f"127.0.0.1:{port}")
        if name == service.name:
            text = text.replace(f"*:{container}", f"127.0.0.1:{port}")
            text = text.replace(f"0.0.0.0:{container}", f"127.0.0.1:{port}")
    if service.secrets is not None:
        text = text.replace(f"{SECRETS}/", f"{place.secrets / service.secrets}/")
    return text
