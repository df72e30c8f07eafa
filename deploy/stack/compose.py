"""Reads the services without a profile from `docker-compose.yml`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

SECRETS = "/run/secrets"
"""The folder with a container's secrets. Each secret is a file."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount at the path `target` of a container. Its source is a file or folder of the checkout, or a named
    volume."""

    source: str
    target: str

    @property
    def is_volume(self) -> bool:
        """True if the source is a named volume."""
        return not self.source.startswith((".", "/"))


@dataclass(frozen=True, slots=True)
class Service:
    """One service. `command` begins with the program. It is empty if the image sets the command. `environment` omits
    the variables without a value, whose values come from the environment of `docker compose`. `published` maps ports of
    the container to ports of the host. `after` has the names of the services that must be ready before this service
    starts. `secrets` is the name of the folder that is mounted at `SECRETS`, or None if the service has no secrets.
    `grace_s` is the time between SIGTERM and SIGKILL.
    """

    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]
    ports: tuple[int, ...]
    published: Mapping[int, int]
    after: frozenset[str]
    secrets: str | None
    grace_s: float


def read(file: Path) -> list[Service]:
    """Returns the services of a compose file in the order in which they can start."""
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    services = {name: _service(name, body) for name, body in document["services"].items() if "profiles" not in body}
    order = TopologicalSorter({name: service.after for name, service in services.items()}).static_order()
    return [services[name] for name in order]


def _service(name: str, body: Mapping[str, Any]) -> Service:
    published: dict[int, int] = {}
    for entry in body.get("ports", ()):
        host, container = entry.rsplit(":", 2)[-2:]
        published[int(container)] = int(host)
    mounts = [_mount(entry) for entry in body.get("volumes", ())]
    secrets = [Path(mount.source).name for mount in mounts if mount.target == SECRETS]
    return Service(
        name=name,
        image=body["image"],
        command=(*body.get("entrypoint", ()), *body.get("command", ())),
        environment={key: str(value) for key, value in body.get("environment", {}).items() if value is not None},
        mounts=tuple(mount for mount in mounts if mount.target != SECRETS),
        ports=tuple(dict.fromkeys([*map(int, body.get("expose", ())), *published])),
        published=published,
        after=frozenset(body.get("depends_on", ())),
        secrets=secrets[0] if secrets else None,
        grace_s=float(body["stop_grace_period"].removesuffix("s")),
    )


def _mount(entry: str | Mapping[str, Any]) -> Mount:
    """Parses an entry of `volumes`, in the short or the long syntax of the specification. In the long syntax, a source
    `${NAME:-default}` is the value of an environment variable."""
    if isinstance(entry, str):
        return Mount(*entry.split(":")[:2])
    source: str = entry["source"]
    if (variable := re.fullmatch(r"\$\{(\w+):-(.+)\}", source)) is not None:
        source = os.environ.get(variable[1]) or variable[2]
    return Mount(source if source.startswith((".", "/")) else f"./{source}", entry["target"])
