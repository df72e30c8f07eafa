"""Wane's targets and further ratios, computed from the figures of one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.bench.contenders import BARE, HANDLER, LSTM, SCAN, SHIPPED, WANE, contenders, peer_names
from benchmarks.bench.results import Measured, Rounds, Target
from benchmarks.summary import Spread, ratios

OWN = "Wane's session tokens/s over HTTP, 64 connections"
STEPS = "session tokens/s over HTTP, 64 connections"
P99_MS = 5.0

Getter = Callable[[Measured], float]


def rate(measured: Measured) -> float:
    return measured.rate


def p50(measured: Measured) -> float:
    return measured.p50_ms


def p99(measured: Measured) -> float:
    return measured.p99_ms


def targets(rounds: Rounds) -> list[Target]:
    """Returns the targets whose figures were measured, in the table's order."""
    fastest = best_peer(rounds, LSTM, "window-64", rate, largest=True)
    quickest = best_peer(rounds, LSTM, "window-1", p50, largest=False)
    stateful = peer_names("sessions")
    wanted = [
        _ratio(rounds, STEPS, "session-64", rate, fastest, "window-64", 4),
        _ratio(rounds, STEPS, "session-64", rate, HANDLER, "handler-64", 0.75),
        _ratio(rounds, "latency at one connection, p50", "session-1", p50, quickest, "window-1", 0.13, most=True),
        _ratio(rounds, "window mode, windows/s, 64 connections", "window-64", rate, fastest, "window-64", 1.2),
        _ratio(
            rounds, "session tokens/s, 64 sessions with a WebSocket each", "websocket-64", rate, WANE, "session-64", 1.5
        ),
        _ratio(rounds, "session tokens/s, requests with 64 steps each", "batched-64", rate, WANE, "session-64", 5),
        _scan(rounds, LSTM, "state", ("native",), 1.8),
        _scan(rounds, LSTM, "score", ("native",), 1.3),
        *(_scan(rounds, SHIPPED, kind, ("one call", "in pieces"), 4) for kind in ("state", "score")),
        *(_engine(rounds, model, way) for model in (LSTM, SHIPPED) for way in ("engine", "batcher")),
        *(_stateful(rounds, model, name, "session-64", rate) for model in (LSTM, SHIPPED) for name in stateful),
        *(_stateful(rounds, LSTM, name, "session-1", p50) for name in stateful),
        _ratio(
            rounds,
            "latency of a window at one connection, p50",
            "window-1",
            p50,
            "mosec",
            "window-1",
            1,
            most=True,
            model=SHIPPED,
        ),
        _ratio(
            rounds, "session tokens/s, sessions in Redis", "session-64", rate, WANE, "session-64", name=f"{WANE}-redis"
        ),
        _ratio(
            rounds,
            "session tokens/s, 1 % of requests traced",
            "session-64",
            rate,
            WANE,
            "session-64",
            name=f"{WANE}-traced",
        ),
        _ratio(rounds, "session tokens/s, tokens sent as text", "text-64", rate, WANE, "session-64"),
        _ratio(
            rounds,
            "session tokens/s, requests with 64 steps each, answers in the columns format",
            "columns-64",
            rate,
            WANE,
            "session-64",
        ),
    ]
    found = [target for target in wanted if target is not None]
    if open_loop := rounds.of(LSTM, WANE, "open-1000"):
        events = Spread.of(map(p99, open_loop))
        against = "7 ms p90 (Serenade at bol.com, 2 vCPU)"
        what = "p99 at 1,000 session events/s, open loop"
        found.append(_told(what, against, P99_MS, True, " ms", events.median, events))
    return found


def _ratio(
    rounds: Rounds,
    what: str,
    ours: str,
    figure: Getter,
    other: str | None,
    theirs: str,
    wanted: float | None = None,
    most: bool = False,
    model: str = LSTM,
    name: str = WANE,
) -> Target | None:
    """Returns the target for a ratio: the figure of the load `ours` on Wane's server `name`, divided by the figure of
    the load `theirs` on the contender `other`."""
    above = rounds.of(model, name, ours)
    below = rounds.of(model, other, theirs) if other else []
    against = OWN if other == WANE else contenders()[other].title if other else ""
    what = what if model == LSTM else f"{what}, `{model}`"
    return _target(what, against, wanted, most, [figure(found) for found in above], [figure(found) for found in below])


def _stateful(rounds: Rounds, model: str, name: str, load: str, figure: Getter) -> Target | None:
    """Returns the target for session steps: Wane's figure divided by the same figure of the peer `name`, which keeps
    sessions. `figure` is `rate` or `p50`."""
    if figure is rate:
        wanted = 1.5 if (model, name) == (LSTM, "mosec-sessions") else None
        return _ratio(rounds, STEPS, load, figure, name, load, wanted, model=model)
    wanted = 1 if name == "fastapi-sessions" else None
    return _ratio(rounds, "latency at one connection, p50", load, figure, name, load, wanted, most=True, model=model)


def _scan(rounds: Rounds, model: str, kind: str, ways: tuple[str, ...], wanted: float) -> Target | None:
    """Returns the target for a long sequence: the rate of the parallel method divided by the rate of the fastest of the
    sequential methods `ways`."""
    ordered = {way: [rate(found) for found in rounds.of(model, SCAN, f"{kind}-{way}")] for way in ways}
    above = [rate(found) for found in rounds.of(model, SCAN, f"{kind}-parallel")]
    if not all(ordered.values()):
        return None
    best = max(ways, key=lambda way: statistics.median(ordered[way]))
    against = (
        "one native LSTM call, 2 threads"
        if best == "native"
        else f"the same model's graph, run sequentially ({best}), 2 threads"
    )
    return _target(f"65,536 tokens in parallel, {kind}, `{model}`", against, wanted, False, above, ordered[best])


def _engine(rounds: Rounds, model: str, way: str) -> Target | None:
    """Returns the target for Wane's batcher or engine without HTTP: its rate divided by the rate of a loop that only
    runs the model."""
    above, below = ([rate(found) for found in rounds.of(model, BARE, load)] for load in (f"{way}-64", "step-64"))
    what = f"steps/s of the {way} without HTTP, batches of 64, `{model}`"
    return _target(what, "onnxruntime in a loop, batches of 64", 0.6, False, above, below)


def _target(
    what: str, against: str, wanted: float | None, most: bool, above: list[float], below: list[float]
) -> Target | None:
    """Returns the target for the median of `above` divided by the median of `below`. Returns None if one of the two
    lists is empty, which means that its figure was not measured."""
    if not above or not below:
        return None
    value = Spread.of(above).median / Spread.of(below).median
    both = min(len(above), len(below))  # one of the two lists may be shorter, because a round failed
    return _told(what, against, wanted, most, "x", value, ratios(above[:both], below[:both]))


def _told(what: str, against: str, wanted: float | None, most: bool, unit: str, value: float, spread: Spread) -> Target:
    return Target(what=what, against=against, wanted=wanted, most=most, unit=unit, value=value, spread=spread)


def best_peer(rounds: Rounds, model: str, load: str, figure: Getter, largest: bool) -> str | None:
    """Returns the peer with the largest median of `figure`, or with the smallest median if `largest` is false. Returns
    None if no peer was measured."""
    medians = {
        name: statistics.median(map(figure, found)) for name in peer_names() if (found := rounds.of(model, name, load))
    }
    if not medians:
        return None
    return max(medians, key=lambda name: medians[name]) if largest else min(medians, key=lambda name: medians[name])
