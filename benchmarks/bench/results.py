"""What `benchmarks.bench` finds, as it is kept in its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field

from benchmarks.summary import Spread, write_json
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
        write_json(path, self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_bytes())


class Rounds:
    """The figures of every round, by model, contender and load, in the rounds' order; and the contenders' versions."""

    def __init__(self, visits: Iterable[Visit]) -> None:
        self.figures: dict[str, dict[str, dict[str, list[Measured]]]] = {}
        self.versions: dict[str, str] = {}
        for visit in sorted(visits, key=lambda visit: visit.round):
            self.versions[visit.contender] = visit.version
            loads = self.figures.setdefault(visit.model, {}).setdefault(visit.contender, {})
            for name, measured in visit.loads.items():
                loads.setdefault(name, []).append(measured)

    def of(self, model: str, contender: str, load: str) -> list[Measured]:
        """One load's; none where it was not measured."""
        return self.figures.get(model, {}).get(contender, {}).get(load, [])


class Summary(Frozen):
    """One load on one contender, over the rounds. requests: of all rounds; rate: items a second."""

    rounds: int
    requests: int
    rate: Spread
    p50_ms: Spread
    p90_ms: Spread
    p99_ms: Spread
    longest_ms: float
    lag_p99_ms: Spread | None = None
    server_cpus: Spread | None = None

    @classmethod
    def of(cls, rounds: Sequence[Measured]) -> Self:
        """Of at least one round."""
        lags = [one.lag_p99_ms for one in rounds if one.lag_p99_ms is not None]
        cpus = [one.server_cpus for one in rounds if one.server_cpus is not None]
        return cls(
            rounds=len(rounds),
            requests=sum(one.requests for one in rounds),
            rate=Spread.of(one.rate for one in rounds),
            p50_ms=Spread.of(one.p50_ms for one in rounds),
            p90_ms=Spread.of(one.p90_ms for one in rounds),
            p99_ms=Spread.of(one.p99_ms for one in rounds),
            longest_ms=max(one.longest_ms for one in rounds),
            lag_p99_ms=Spread.of(lags) if lags else None,
            server_cpus=Spread.of(cpus) if cpus else None,
        )


class Target(Frozen):
    """what, over against: at least `wanted`, or at most if `most`. spread: of the value, round by round."""

    what: str
    against: str
    wanted: float
    most: bool
    unit: str
    value: float
    spread: Spread

    @property
    def met(self) -> bool:
        """By the median."""
        return self.value <= self.wanted if self.most else self.value >= self.wanted


class Results(Frozen):
    """A run: on what, of what, and its figures, by model, contender and load. versions: by contender."""

    created: str
    commit: str | None = None
    machine: dict[str, str]
    seconds: float
    rounds: int
    models: dict[str, dict[str, str]]
    versions: dict[str, str] = Field(default_factory=dict)
    figures: dict[str, dict[str, dict[str, Summary]]] = Field(default_factory=dict)
    targets: tuple[Target, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_bytes())

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        write_json(path, self.model_dump(mode="json", exclude_none=True))

    def having(self, rounds: Rounds, targets: Sequence[Target]) -> Results:
        """With the summaries of these rounds, and the targets that they reach or miss."""
        figures = {
            model: {
                name: {load: Summary.of(found) for load, found in loads.items()} for name, loads in contenders.items()
            }
            for model, contenders in rounds.figures.items()
        }
        return self.model_copy(update={"figures": figures, "versions": rounds.versions, "targets": tuple(targets)})

    def summary(self, model: str, contender: str, load: str) -> Summary | None:
        """None where it was not measured."""
        return self.figures.get(model, {}).get(contender, {}).get(load)
