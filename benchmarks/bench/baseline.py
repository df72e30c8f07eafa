"""Compares this checkout of Wane with another checkout, the baseline. The servers of the two checkouts run at the same
time. Each load is applied to one of the two servers, and then to the other.

The speed of the machine changes from minute to minute. The benchmark therefore measures the two servers within seconds
of each other, and divides only figures of the same round by each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench.contenders import Contender, wanes
from benchmarks.bench.loads import loads_of
from benchmarks.bench.results import Comparison, Measured, Rounds
from benchmarks.summary import ratios

NAME = "baseline"


@dataclass(frozen=True)
class Baseline:
    """A checkout whose server is compared with this checkout's server. The Python interpreter of this process starts
    the server as `python -m module serve` in `folder`."""

    folder: Path
    module: str

    def of(self, contender: Contender) -> Contender:
        """Returns the baseline's server with the settings of `contender`, which is a server of this checkout."""
        ours = [wane.name for wane in wanes()]
        return wanes(self.folder, self.module, NAME, title=NAME)[ours.index(contender.name)]


def comparisons(rounds: Rounds, models: list[str]) -> list[Comparison]:
    """Returns a comparison for each load that was measured on this checkout's server and on the baseline's server, in
    the order of measurement."""
    found = []
    for model in models:
        for ours, theirs in zip(wanes(), wanes(name=NAME), strict=True):
            for load in loads_of(ours, model):
                above, below = (rounds.of(model, contender.name, load.name) for contender in (ours, theirs))
                if not above or not below:
                    continue
                found.append(
                    Comparison(
                        model=model,
                        contender=ours.name,
                        baseline=theirs.name,
                        load=load.name,
                        figure=load.figure,
                        ratio=ratios(*([getattr(one, load.figure) for one in side] for side in (above, below))),
                        item_cpu=ratios(item_cpus(above), item_cpus(below)),
                    )
                )
    return found


def item_cpus(rounds: list[Measured]) -> list[float]:
    """Returns, for each round, the CPU time of the server per item, in microseconds. Leaves out rounds without a CPU
    time."""
    return [one.item_cpu_us for one in rounds if one.item_cpu_us is not None]
