"""What `benchmarks.bench` finds, as it is kept in its JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import Field

from wane.models.manifest import Frozen


class Timed(Frozen):
    """One load for some seconds: how many requests were answered, and how long they took from sending, or, of an open
    loop, from when they should have been sent; `lag_p99_ms` is then how late they were sent."""

    requests: int
    seconds: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    longest_ms: float
    lag_p99_ms: float | None = None


class Measured(Timed):
    """A load on one contender in one round. items: tokens or windows answered, the same as requests where each has one;
    server_cpus: CPU seconds of the server's processes for each second; null where the load runs in the model's."""

    items: int
    server_cpus: float | None = None

    @property
    def rate(self) -> float:
        """Items a second."""
        return self.items / self.seconds


class Visit(Frozen):
    """One round's loads on one contender: started, checked, measured, stopped. loads: by name."""

    model: str
    contender: str
    round: int
    version: str
    loads: dict[str, Measured]

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        write(path, self)

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_bytes())


class Spread(Frozen):
    """Median, smallest and largest over the rounds."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median=statistics.median(values), smallest=min(values), largest=max(values))


class Results(Frozen):
    """A run: on what, of what, and every round's figures, by model, contender and load. versions: by contender."""

    created: str
    commit: str | None
    machine: dict[str, str]
    seconds: float
    rounds: int
    models: dict[str, dict[str, str]]
    versions: dict[str, str] = Field(default_factory=dict)
    figures: dict[str, dict[str, dict[str, list[Measured]]]] = Field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_bytes())

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        write(path, self)

    def having(self, visits: list[Visit]) -> Results:
        """With these rounds, in their order."""
        figures: dict[str, dict[str, dict[str, list[Measured]]]] = {}
        versions: dict[str, str] = {}
        for visit in sorted(visits, key=lambda visit: visit.round):
            versions[visit.contender] = visit.version
            loads = figures.setdefault(visit.model, {}).setdefault(visit.contender, {})
            for name, measured in visit.loads.items():
                loads.setdefault(name, []).append(measured)
        return self.model_copy(update={"figures": figures, "versions": versions})

    def rounds_of(self, model: str, contender: str, load: str) -> list[Measured]:
        """Every round's figures; none where it was not measured."""
        return self.figures.get(model, {}).get(contender, {}).get(load, [])

    def spread(self, model: str, contender: str, load: str, of: Callable[[Measured], float]) -> Spread | None:
        """Of one figure over the rounds; None where it was not measured."""
        rounds = self.rounds_of(model, contender, load)
        return Spread.of([of(measured) for measured in rounds]) if rounds else None


def write(path: Path, document: Frozen) -> None:
    """As JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_suffix(".part")
    building.write_text(document.model_dump_json(indent=1) + "\n", encoding="utf-8")
    building.replace(path)
