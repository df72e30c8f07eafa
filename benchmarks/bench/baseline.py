"""Compares this checkout with another checkout of Wane, the baseline. Both servers run at the same time, and each load
is applied to one server after the other.

The host's speed changes from minute to minute. The two servers are therefore measured within seconds of each other, and
each ratio compares two figures of the same round.
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
    """Another checkout. This interpreter starts its server as `python -m MODULE serve` in the checkout's folder."""

    folder: Path
    module: str

    def of(self, contender: Contender) -> Contender:
        """`contender` is a server of this checkout. Returns the other checkout's server with the same settings."""
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
    """Returns the server's CPU time per item in each round, in microseconds. Rounds without a CPU time are left out."""
    return [one.item_cpu_us for one in rounds if one.item_cpu_us is not None]
