"""The results of `benchmarks.bench` as stored in JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from benchmarks.summary import Spread, write_json
from wane.models.layer_registry import Frozen

Figure = Literal["rate", "p50_ms", "p99_ms"]


class Timed(Frozen):
    """The number of answered requests of one load, and the percentiles of their latencies.

    In a closed loop, a latency is measured from the time when the request is sent. In an open loop, it is measured from
    the time when the request is due. `lag_p99_ms`: the p99 of the delay between a request's due time and its sending;
    null in a closed loop.
    """

    requests: int
    seconds: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    longest_ms: float
    lag_p99_ms: float | None = None


class Measured(Timed):
    """The figures of one load on one contender in one round.

    items: answered tokens or windows. server_cpu_s: CPU time of the server's processes; null for a load without a
    server.
    """

    items: int
    server_cpu_s: float | None = None

    @property
    def rate(self) -> float:
        """Items per second."""
        return self.items / self.seconds

    @property
    def server_cpus(self) -> float | None:
        """CPU seconds of the server per second of the load, which is the mean number of CPU cores in use."""
        return None if self.server_cpu_s is None else self.server_cpu_s / self.seconds

    @property
    def item_cpu_us(self) -> float | None:
        """CPU time of the server per item, in microseconds."""
        return None if self.server_cpu_s is None else 1e6 * self.server_cpu_s / self.items


class Visit(Frozen):
    """The figures of one visit: the measurement of one contender with one model in one round.

    loads: the figures of each load, by the load's name. refused: the server's answer to each load that it does not
    support, by the load's name.
    """

    model: str
    contender: str
    round: int
    version: str
    loads: dict[str, Measured]
    refused: dict[str, str] = Field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes the JSON file `path` atomically."""
        write_json(path, self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_bytes())


class Rounds:
    """The figures of all rounds, and the contenders' versions. `figures` has, for each model, contender and load, a
    list of figures in the order of the rounds.

    refused: servers' answers to loads that they do not support, by model, contender and load."""

    def __init__(self, visits: Iterable[Visit]) -> None:
        self.figures: dict[str, dict[str, dict[str, list[Measured]]]] = {}
        self.refused: dict[str, dict[str, dict[str, str]]] = {}
        self.versions: dict[str, str] = {}
        for visit in sorted(visits, key=lambda visit: visit.round):
            self.versions[visit.contender] = visit.version
            if visit.refused:
                self.refused.setdefault(visit.model, {}).setdefault(visit.contender, {}).update(visit.refused)
            loads = self.figures.setdefault(visit.model, {}).setdefault(visit.contender, {})
            for name, measured in visit.loads.items():
                loads.setdefault(name, []).append(measured)

    def of(self, model: str, contender: str, load: str) -> list[Measured]:
        """Returns one load's figures, one item for each round. The list is empty if the load was not measured."""
        return self.figures.get(model, {}).get(contender, {}).get(load, [])


class Summary(Frozen):
    """The figures of one load on one contender, summarised over the rounds.

    requests: the number of requests in all rounds. rate: items per second. item_cpu_us: CPU time of the server per
    item, in microseconds.
    """

    rounds: int
    requests: int
    rate: Spread
    p50_ms: Spread
    p90_ms: Spread
    p99_ms: Spread
    longest_ms: float
    lag_p99_ms: Spread | None = None
    server_cpus: Spread | None = None
    item_cpu_us: Spread | None = None

    @classmethod
    def of(cls, rounds: Sequence[Measured]) -> Self:
        """Summarises `rounds`, which must not be empty."""
        lags = [one.lag_p99_ms for one in rounds if one.lag_p99_ms is not None]
        cpus = [one.server_cpus for one in rounds if one.server_cpus is not None]
        item_cpus = [one.item_cpu_us for one in rounds if one.item_cpu_us is not None]
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
            item_cpu_us=Spread.of(item_cpus) if item_cpus else None,
        )


class Target(Frozen):
    """A row in the table of targets. Its value is the ratio of a figure of Wane to another figure, or a figure of Wane
    alone.

    what: the description of Wane's figure.
    against: the description of the other figure.
    wanted: the largest accepted value if `most` is true, else the smallest accepted value; None without a target.
    value: the median of Wane's figure divided by the median of the other figure, or the median of Wane's figure alone.
    unit: the unit of `value`, of `wanted` and of `spread`.
    spread: the median, the smallest and the largest of the values of the rounds.
    """

    what: str
    against: str
    wanted: float | None = None
    most: bool
    unit: str
    value: float
    spread: Spread

    @property
    def met(self) -> bool | None:
        """Whether `value` meets the target; None without a target."""
        if self.wanted is None:
            return None
        return self.value <= self.wanted if self.most else self.value >= self.wanted


class Comparison(Frozen):
    """The figures of one load on this checkout's server, divided by those on the baseline's server. The load was
    applied to one of the two servers, and then to the other.

    figure: the name of the compared figure. ratio: in each round, the figure on this checkout's server divided by the
    figure on the baseline's server. item_cpu: the same ratio of the servers' CPU times per item.
    """

    model: str
    contender: str
    baseline: str
    load: str
    figure: Figure
    ratio: Spread
    item_cpu: Spread


class Results(Frozen):
    """A run's machine, models and figures. Figures are stored by model, contender and load.

    versions: the version of each contender. refused: servers' answers to loads that they do not support, by model,
    contender and load.
    """

    created: str
    commit: str | None = None
    machine: dict[str, str]
    seconds: float
    rounds: int
    models: dict[str, dict[str, str]]
    versions: dict[str, str] = Field(default_factory=dict)
    figures: dict[str, dict[str, dict[str, Summary]]] = Field(default_factory=dict)
    refused: dict[str, dict[str, dict[str, str]]] = Field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    comparisons: tuple[Comparison, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_bytes())

    def write(self, path: Path) -> None:
        """Writes the JSON file `path` atomically."""
        write_json(path, self.model_dump(mode="json", exclude_none=True))

    def having(self, rounds: Rounds, targets: Sequence[Target], comparisons: Sequence[Comparison] = ()) -> Results:
        """Returns a copy that has the summaries of `rounds`, the targets, and the comparisons with a baseline."""
        figures = {
            model: {
                name: {load: Summary.of(found) for load, found in loads.items()} for name, loads in contenders.items()
            }
            for model, contenders in rounds.figures.items()
        }
        found = {"targets": tuple(targets), "comparisons": tuple(comparisons)}
        return self.model_copy(
            update={"figures": figures, "refused": rounds.refused, "versions": rounds.versions, **found}
        )

    def summary(self, model: str, contender: str, load: str) -> Summary | None:
        """Returns one load's summary; None if the load was not measured."""
        return self.figures.get(model, {}).get(contender, {}).get(load)

    def refusal(self, model: str, contender: str, load: str) -> str:
        """Returns the answer of a server that does not support the load. Returns an empty string if the server supports
        the load."""
        return self.refused.get(model, {}).get(contender, {}).get(load, "")
