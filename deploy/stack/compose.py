"""The services of `docker-compose.yml`, as far as they say what is run: those without a profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

SECRETS = "/run/secrets"
"""Where a container finds its secrets, each a file of its name."""


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
    services that must be ready before this one starts; `secrets` the files that it finds in `SECRETS`; `grace_s` is the
    time that it has to end.
    """

    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]
    ports: tuple[int, ...]
    published: Mapping[int, int]
    after: frozenset[str]
    secrets: tuple[str, ...]
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
    return Service(
        name=name,
        image=body["image"],
        command=(*body.get("entrypoint", ()), *body.get("command", ())),
        environment={key: str(value) for key, value in body.get("environment", {}).items() if value is not None},
        mounts=tuple(Mount(*entry.split(":")[:2]) for entry in body.get("volumes", ())),
        ports=(*(int(port) for port in body.get("expose", ())), *published),
        published=published,
        after=frozenset(body.get("depends_on", ())),
        secrets=tuple(body.get("secrets", ())),
        grace_s=float(body["stop_grace_period"].removesuffix("s")),
    )
