"""Tests of the figures of a run: their JSON, tables and targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench.baseline import comparisons
from benchmarks.bench.contenders import BARE, HANDLER, SCAN, SHIPPED, WANE
from benchmarks.bench.results import Measured, Results, Rounds, Visit
from benchmarks.bench.tables import page_tables
from benchmarks.bench.targets import best_peer, p50, rate, targets
from benchmarks.page import with_tables

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "docs" / "figures" / "bench.json"
PUBLISHED = ROOT / "docs" / "benchmarks.md"
EMPTY = Results(
    created="2026-01-01",
    commit=None,
    machine={"cpu": "a processor", "cores": "2 cores"},
    seconds=1,
    rounds=3,
    models={"lstm256": {"about": "1 x lstm of 256", "weights": "0", "window": "0"}},
)


def measured(requests: int, items: int = 1, p50: float = 1.0, p99: float = 2.0) -> Measured:
    """Returns the figures of a load with `requests` requests in one second."""
    return Measured(
        requests=requests,
        seconds=1,
        p50_ms=p50,
        p90_ms=p50,
        p99_ms=p99,
        longest_ms=p99,
        items=requests * items,
        server_cpu_s=0.5,
    )


def three_rounds(loads: dict[str, dict[str, list[Measured]]], model: str = "lstm256") -> Rounds:
    """Returns three rounds of the figures of each contender and load."""
    visits = [
        Visit(
            model=model,
            contender=name,
            round=number,
            version="1",
            loads={load: rounds[number] for load, rounds in found.items()},
        )
        for name, found in loads.items()
        for number in reversed(range(3))
    ]
    return Rounds(visits)


def three(*requests: int, items: int = 1) -> list[Measured]:
    return [measured(count, items, p50=1000 / count) for count in requests]


@pytest.fixture
def rounds() -> Rounds:
    return three_rounds(
        {
            WANE: {
                "session-64": three(4000, 5000, 4400),
                "session-1": three(2000, 2000, 2000),
                "window-64": three(1100, 1100, 1100),
                "websocket-64": three(8000, 6600, 7000),
                "batched-64": three(400, 300, 340, items=64),
                "open-1000": [measured(1000, p99=value) for value in (3.0, 9.0, 4.0)],
            },
            "mosec": {"window-64": three(1000, 1000, 1000), "window-1": three(200, 200, 200)},
            "litserve": {"window-64": three(800, 800, 2000), "window-1": three(250, 250, 250)},
            HANDLER: {"handler-64": three(8000, 8000, 8000)},
            BARE: {"step-64": three(2000, 2000, 2000, items=64)},
        }
    )


@pytest.fixture
def results(rounds: Rounds) -> Results:
    return EMPTY.having(rounds, targets(rounds))


def test_figures_are_medians_over_the_rounds_and_rounds_keep_their_order(rounds: Rounds, results: Results) -> None:
    summary = results.summary("lstm256", WANE, "session-64")
    assert summary is not None
    assert (summary.rate.median, summary.rate.least, summary.rate.most) == (4400, 4000, 5000)
    assert (summary.rounds, summary.requests) == (3, 13_400)
    assert [found.requests for found in rounds.of("lstm256", WANE, "session-64")] == [4000, 5000, 4400]
    assert results.summary("lstm256", WANE, "absent") is None


def test_the_best_peer_has_the_best_median_and_upper_limits_are_not_peers(rounds: Rounds) -> None:
    assert best_peer(rounds, "lstm256", "window-64", rate, largest=True) == "mosec"
    assert best_peer(rounds, "lstm256", "window-1", p50, largest=False) == "litserve"
    assert best_peer(rounds, "lstm256", "absent", rate, largest=True) is None


def test_targets_have_the_ratio_of_medians_and_the_ratio_of_each_round(rounds: Rounds) -> None:
    found = targets(rounds)
    figures: list[tuple[str, object, bool | None]] = [(one.against, pytest.approx(one.value), one.met) for one in found]
    assert figures == [
        ("mosec", 4.4, True),
        ("trivial FastAPI handler", 0.55, False),
        ("LitServe", 0.125, True),
        ("mosec", 1.1, False),
        ("Wane's session tokens/s over HTTP, 64 connections", 7000 / 4400, True),
        ("Wane's session tokens/s over HTTP, 64 connections", 340 * 64 / 4400, False),
        ("7 ms p90 (Serenade at bol.com, 2 vCPU)", 4.0, True),
    ]
    assert (found[0].spread.least, found[0].spread.most) == (4, 5)


def test_a_target_without_figures_is_left_out() -> None:
    found = targets(three_rounds({WANE: {"session-64": three(1, 1, 1), "websocket-64": three(2, 2, 2)}}))
    assert [target.what for target in found] == ["session tokens/s, 64 sessions with a WebSocket each"]


def test_the_engine_is_compared_with_the_bare_onnxruntime_loop_of_the_same_visits() -> None:
    loop = {"step-64": three(2000, 2000, 2000, items=64), "engine-64": three(96_000, 112_000, 104_000)}
    (found,) = targets(three_rounds({BARE: loop}, SHIPPED))
    assert (found.against, found.value, found.met) == ("onnxruntime in a loop, batches of 64", 0.8125, True)
    assert (found.spread.least, found.spread.most) == (0.75, 0.875)
    (small,) = targets(three_rounds({BARE: loop}))
    assert (small.value, small.wanted) == (0.8125, 0.6)


def test_the_parallel_scan_is_compared_with_the_fastest_sequential_method() -> None:
    ways = {"one call": (20, 22, 21), "in pieces": (30, 25, 28), "parallel": (140, 160, 150)}
    found = targets(three_rounds({SCAN: {f"score-{way}": three(*rounds) for way, rounds in ways.items()}}, SHIPPED))
    assert [(target.against, target.value, target.met) for target in found] == [
        ("the same model's graph, run sequentially (in pieces), 2 threads", 150 / 28, True)
    ]
    native = {"state-native": three(10, 10, 10), "state-parallel": three(17, 18, 17)}
    (target,) = targets(three_rounds({SCAN: native}))
    assert (target.against, target.value, target.met) == ("one native LSTM call, 2 threads", 1.7, False)


def test_the_latency_of_a_single_window_is_compared_with_mosec() -> None:
    found = {WANE: {"window-1": three(150, 160, 170)}, "mosec": {"window-1": three(250, 256, 260)}}
    (target,) = targets(three_rounds(found, SHIPPED))
    assert (target.what, target.against) == ("latency of a window at one connection, p50, `gated-stable`", "mosec")
    assert target.value == pytest.approx(1.6)
    assert (target.wanted, target.most, target.met) == (1.0, True, False)


def test_steps_are_compared_with_stateful_peers_and_other_settings_with_the_default_settings() -> None:
    steps = {"session-64": three(4000, 4000, 4000), "session-1": three(2000, 2000, 2000)}
    found = targets(
        three_rounds(
            {
                WANE: steps,
                "wane-redis": {"session-64": three(3000, 3000, 3000)},
                "mosec-sessions": {"session-64": three(2000, 2000, 2000), "session-1": three(500, 500, 500)},
            }
        )
    )
    assert [(one.what, one.against, one.value) for one in found] == [
        ("session tokens/s over HTTP, 64 connections", "mosec with its own state", 2.0),
        ("latency at one connection, p50", "mosec with its own state", 0.25),
        ("session tokens/s, sessions in Redis", "Wane's session tokens/s over HTTP, 64 connections", 0.75),
    ]


def test_each_round_is_compared_with_its_baseline_by_figure_and_cpu_time() -> None:
    rounds = three_rounds(
        {
            WANE: {"session-64": three(4000, 6000, 4400), "session-1": three(2000, 2000, 1000)},
            "baseline": {"session-64": three(2000, 4000, 4000), "session-1": three(1000, 500, 500)},
            "wane-redis": {"session-64": three(1, 1, 1)},
        }
    )
    found = comparisons(rounds, ["lstm256"])
    assert [(one.load, one.figure, one.ratio.median) for one in found] == [
        ("session-64", "rate", 1.5),
        ("session-1", "p50_ms", 0.5),
    ]
    assert (found[0].ratio.least, found[0].ratio.most) == (1.1, 2)
    assert found[0].item_cpu.median == pytest.approx(1 / 1.5)


def test_the_page_shows_exactly_the_stored_figures() -> None:
    text = PUBLISHED.read_text(encoding="utf-8")
    if KEPT.exists():
        assert with_tables(text, page_tables(Results.read(KEPT)), "benchmarks.md") == text
    else:
        assert "<!-- targets -->\n<!-- /targets -->\n" in text and "<!-- bench -->\n<!-- /bench -->\n" in text
