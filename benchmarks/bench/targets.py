"""What Wane is to reach, and whether it did: computed from the figures of one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.bench.contenders import BARE, HANDLER, WANE, contenders, peer_names
from benchmarks.bench.results import Measured, Results, Spread

MODEL = "lstm256"
SERENADE_P99_MS = 5.0

Figure = Callable[[Measured], float]


@dataclass(frozen=True)
class Target:
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


def rate(measured: Measured) -> float:
    return measured.rate


def p50(measured: Measured) -> float:
    return measured.p50_ms


def p99(measured: Measured) -> float:
    return measured.p99_ms


def targets(results: Results, model: str = MODEL) -> list[Target]:
    """Those whose figures were measured, in the table's order."""
    titles = {name: contender.title for name, contender in contenders().items()}
    found: list[Target] = []

    def ratio(
        what: str, ours: str, figure: Figure, other: str | None, theirs: str, wanted: float, most: bool = False
    ) -> None:
        above = results.rounds_of(model, WANE, ours)
        below = results.rounds_of(model, other, theirs) if other else []
        if above and below:
            values = [figure(a) / figure(b) for a, b in zip(above, below, strict=False)]
            value = Spread.of([figure(a) for a in above]).median / Spread.of([figure(b) for b in below]).median
            against = "own HTTP single-token rate" if other == WANE else titles.get(other or "", "")
            found.append(Target(what, against, wanted, most, "x", value, Spread.of(values)))

    fastest = best_peer(results, model, "window-64", rate, largest=True)
    quickest = best_peer(results, model, "window-1", p50, largest=False)
    ratio("session tokens/s over HTTP, 64 connections", "session-64", rate, fastest, "window-64", 4)
    ratio("the same", "session-64", rate, HANDLER, "handler-64", 0.75)
    ratio("latency at one connection, p50", "session-1", p50, quickest, "window-1", 0.13, most=True)
    ratio("window mode, windows/s, 64 connections", "window-64", rate, fastest, "window-64", 1.2)
    ratio("one WebSocket per session, 64 of them, tokens/s", "websocket-64", rate, WANE, "session-64", 1.5)
    ratio("batched calls, 64 inputs each, tokens/s", "batched-64", rate, WANE, "session-64", 5)
    events = results.spread(model, WANE, "open-1000", p99)
    if events:
        against = "7 ms p90 (Serenade at bol.com, 2 vCPU)"
        what = "p99 at 1,000 session events/s, open loop"
        found.append(Target(what, against, SERENADE_P99_MS, True, " ms", events.median, events))
    return found


def best_peer(results: Results, model: str, load: str, figure: Figure, largest: bool) -> str | None:
    """The peer whose median figure is the best; None where none was measured."""
    medians = {name: spread.median for name in peer_names() if (spread := results.spread(model, name, load, figure))}
    if not medians:
        return None
    return max(medians, key=lambda name: medians[name]) if largest else min(medians, key=lambda name: medians[name])


def share_of_ceiling(results: Results, model: str) -> float | None:
    """Session tokens a second over HTTP, as a share of the bare loop's at the same batch."""
    ours = results.spread(model, WANE, "session-64", rate)
    bare = results.spread(model, BARE, "step-64", rate)
    return ours.median / bare.median if ours and bare else None
