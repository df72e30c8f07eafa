"""Tests that the merged reports of several replicas equal the report of one process that has answered all requests of
the replicas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from msgspec import to_builtins

from wane.service.engine.agreement import Source
from wane.service.engine.live_accuracy import LiveAccuracy
from wane.service.engine.stats import Report, Stats
from wane.service.observability.metrics import REQUEST_SECONDS, Metrics, quantile
from wane.service.sessions.sessions import SessionsReport
from wane.service.types.answer import Agreement
from wane.service.types.common import Mode
from wane.service.types.request import Latency
from wane.service.workers.merge_reports import MergeError, merge

BUCKETS_MS = tuple(1e3 * bound for bound in REQUEST_SECONDS)
REPLICAS = 3
milliseconds = some.floats(0, 1e5)
share = some.floats(0, 1)
latencies = some.builds(Latency, milliseconds, milliseconds, milliseconds)
agreements = some.builds(
    Agreement,
    some.booleans(),
    some.booleans(),
    share,
    share,
    milliseconds,
    share,
    some.none() | share,
    some.none() | share,
)
where = some.integers(0, REPLICAS - 1)
modes = some.sampled_from([Mode.RECURRENT, Mode.WINDOW, Mode.BOTH])
answered = some.tuples(where, modes, some.sampled_from(["predict", "step", "generate"]), latencies)
compared = some.tuples(where, agreements, some.sampled_from(Source))
reached = some.tuples(where, some.integers(1, 600), some.booleans(), share, some.booleans())
shadowed = some.tuples(where, some.sampled_from(["compared", "dropped", "failed"]))


def document(report: Stats, sessions: int = 0, live: LiveAccuracy | None = None) -> dict[str, Any]:
    """Returns a report document with one model, like the answer of /v1/report."""
    counts = SessionsReport(resident=sessions, parked=2 * sessions, rebuilt=3 * sessions)
    model = report.report(("m", "1", "cpu"), None if live is None else live.report(), counts, {})
    document: dict[str, Any] = to_builtins(Report("cpu", [model]))
    return document


def assert_same(found: Any, expected: Any) -> None:
    """Asserts that two reports are equal up to the rounding of floating-point sums."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-12)
    else:
        assert found == expected


@settings(deadline=None)
@given(some.lists(answered), some.lists(reached), some.lists(compared), some.lists(shadowed), some.lists(where))
def test_merged_reports_equal_the_report_of_a_single_process(
    answers: list[Any], windows: list[Any], pairs: list[Any], shadows: list[Any], sessions: list[int]
) -> None:
    parts, whole = [Stats(Metrics(), "m") for _ in range(REPLICAS)], Stats(Metrics(), "m")
    for replica, mode, operation, latency in answers:
        for report in (parts[replica], whole):
            report.took(mode, latency)
            report.answered(operation, mode)
    for replica, *window in windows:
        for report in (parts[replica], whole):
            report.reached(*window)
    for replica, agreement, source in pairs:
        for report in (parts[replica], whole):
            report.compared(agreement, source)
    for replica, outcome in shadows:
        for report in (parts[replica], whole):
            report.shadowed(outcome)
            report.shadow_took(0.25)
    found = merge([document(part, sessions.count(number)) for number, part in enumerate(parts)])
    expected = merge([document(whole, len(sessions))])
    assert (found.pop("replicas"), found["models"][0].pop("replicas")) == (REPLICAS, REPLICAS)
    assert (expected.pop("replicas"), expected["models"][0].pop("replicas")) == (1, 1)
    assert_same(found, expected)
    one = document(whole, len(sessions))["models"][0]
    for figure in ("windows", "operations", "agreement", "shadow", "sessions"):
        assert_same(found["models"][0][figure], one[figure])
    for mode, measured in one["modes"].items():
        assert found["models"][0]["modes"][mode]["requests"] == measured["requests"]
        for phase, durations in measured["latency"].items():
            assert found["models"][0]["modes"][mode]["latency"][phase]["buckets"] == durations["buckets"]


@given(some.lists(some.tuples(where, some.integers(0, 5))))
def test_merged_live_accuracy_equals_that_of_a_single_process(steps: list[tuple[int, int]]) -> None:
    parts, whole = (
        [LiveAccuracy(3, 9, Metrics(), "m", "1") for _ in range(REPLICAS)],
        LiveAccuracy(3, 9, Metrics(), "m", "1"),
    )
    for replica, token in steps:
        for live in (parts[replica], whole):
            live.keep([("a", 1, [1, 2, 3])])
            live.judge([("a", 1 if token else 2, token)])
    (found,) = merge([document(Stats(Metrics(), "m"), live=live) for live in parts])["models"]
    assert_same(found["live_accuracy"], to_builtins(whole.report()))
    reports = [document(Stats(Metrics(), "m"), live=live) for live in (None, whole)]
    assert_same(merge(reports)["models"][0]["live_accuracy"], to_builtins(whole.report()))


def test_live_accuracies_of_different_k_are_not_merged() -> None:
    lives = [LiveAccuracy(k, 9, Metrics(), "m", "1") for k in (3, 4)]
    with pytest.raises(MergeError, match="live_accuracy"):
        merge([document(Stats(Metrics(), "m"), live=live) for live in lives])


@settings(deadline=None)
@given(some.lists(milliseconds, min_size=1))
def test_a_quantile_is_within_the_bucket_of_the_exact_quantile(values: list[float]) -> None:
    counts = [sum(value <= bound for value in values) for bound in BUCKETS_MS] + [len(values)]
    for wanted in (0.5, 0.9, 0.99):
        found = quantile(list(zip([*BUCKETS_MS, math.inf], counts, strict=True)), wanted)
        exact = sorted(values)[math.ceil(wanted * len(values)) - 1]
        at = int(np.searchsorted(BUCKETS_MS, exact))
        low, high = (0.0, *BUCKETS_MS)[at], (*BUCKETS_MS, BUCKETS_MS[-1])[at]
        assert found is not None and low <= found <= high


def test_a_quantile_without_values_is_none() -> None:
    assert quantile([(1.0, 0), (math.inf, 0)], 0.5) is None


def test_different_versions_and_devices_are_all_listed() -> None:
    reports = [document(Stats(Metrics(), "m")) for _ in range(3)]
    reports[1]["models"][0] |= {"model_version": "2", "device": "cuda"}
    reports[1]["device"] = "cuda"
    reports[2]["models"].append(reports[2]["models"][0] | {"model": "other"})
    merged = merge(reports)
    assert (merged["device"], merged["replicas"]) == ("cpu, cuda", 3)
    assert [(model["model"], model["model_version"], model["replicas"]) for model in merged["models"]] == [
        ("m", "1, 2", 3),
        ("other", "1", 1),
    ]


def test_two_versions_of_a_model_in_one_process_are_one_replica() -> None:
    report = document(Stats(Metrics(), "m"))
    report["models"].append(report["models"][0] | {"model_version": "2"})
    (model,) = merge([report])["models"]
    assert (model["replicas"], model["model_version"]) == (1, "1, 2")


def test_histograms_with_different_buckets_are_not_merged() -> None:
    one, other = Stats(Metrics(), "m"), Stats(Metrics(), "m")
    for report in (one, other):
        report.took(Mode.WINDOW, Latency(1, 1, 1))
    reports = [document(one), document(other)]
    reports[1]["models"][0]["modes"]["window"]["latency"]["queue"]["buckets"][0]["le_ms"] = 1e-9
    with pytest.raises(MergeError, match="different buckets"):
        merge(reports)
