"""The services of `docker-compose.yml`, as far as they say what is run: those without a profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

SECRETS = "/run/secrets"
"""Where a container finds its secrets: a folder of the compose file's own, each of them a file in it."""


@dataclass(frozen=True, slots=True)
class Mount:
    """What a container sees at `target`: a file or folder of the checkout, or else a volume by its name."""

    source: str
    target: str

    @property
    def is_volume(self) -> bool:
        """Whether it is storage of the service's own, and nothing of the checkout."""
        return not self.source.startswith(".")


@dataclass(frozen=True, slots=True)
class Service:
    """One service.

    `command` begins with the program, and is empty where the image says what is run. A variable without a value is that
    of the surroundings, and not in `environment`. `published` has the host's port by the container's; `after` names the
    services that must be ready before this one starts; `secrets` is the name of the folder that it finds as `SECRETS`,
    if any; `grace_s` is the time that it has to end.
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
    """The services of a compose file, each behind those that it waits for."""
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
        ports=(*(int(port) for port in body.get("expose", ())), *published),
        published=published,
        after=frozenset(body.get("depends_on", ())),
        secrets=secrets[0] if secrets else None,
        grace_s=float(body["stop_grace_period"].removesuffix("s")),
    )


def _mount(entry: str | Mapping[str, Any]) -> Mount:
    """One of `volumes`, by either of the specification's syntaxes."""
    if isinstance(entry, str):
        return Mount(*entry.split(":")[:2])
    return Mount(entry["source"], entry["target"])
