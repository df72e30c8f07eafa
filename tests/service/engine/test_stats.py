from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec import to_builtins
from prometheus_client.utils import floatToGoString

from tests.service.engine_harness import EngineHarness, MakeHarness, known
from wane.service.engine.stats import PHASES, Bucket, Made, Stats, durations
from wane.service.observability.metrics import REQUEST_SECONDS, Metrics, Observed
from wane.service.sessions.sessions import SessionsReport
from wane.service.types.common import Mode
from wane.service.types.request import GenerateRequest, Latency, PredictRequest, ScoreRequest, StepRequest

TOKENS = tuple(range(10, 20))


def document(stats: Stats) -> Any:
    """Returns the report of a model without sessions, as in JSON."""
    return to_builtins(stats.report(("m", "1", "cpu"), None, SessionsReport(0, 0, 0), {}))


def test_a_report_has_the_quantiles_of_the_histogram() -> None:
    seconds = Observed((0.001, 0.002, 0.004))
    seconds.observe_all([0.0005] * 50 + [0.0015] * 40 + [0.003] * 8 + [1.0] * 2)
    report = durations(seconds)
    assert (report.p50_ms, report.p90_ms, report.p99_ms) == (1.0, 2.0, 4.0)
    assert report.count == 100 and report.sum_ms == pytest.approx(2109.0)
    assert report.buckets == [Bucket(1.0, 50), Bucket(2.0, 90), Bucket(4.0, 98), Bucket(None, 100)]


def test_the_report_and_the_metrics_have_the_same_latencies() -> None:
    metrics = Metrics()
    stats = Stats(metrics, "m")
    for value_ms in (0.01, 0.4, 3.0, 3.0, 7e4):
        stats.took(Mode.WINDOW, Latency(value_ms, 2 * value_ms, 3 * value_ms))
    latency = document(stats)["modes"]["window"]["latency"]
    for phase in PHASES:
        labels = {"model": "m", "mode": "window", "phase": phase}

        def sample(name: str, labels: dict[str, str] = labels, **more: str) -> float | None:
            return metrics.registry.get_sample_value(f"wane_answer_seconds_{name}", {**labels, **more})

        assert latency[phase]["count"] == sample("count") == 5
        assert latency[phase]["sum_ms"] == pytest.approx(1e3 * (sample("sum") or 0.0), rel=1e-12)
        for bucket, bound in zip(latency[phase]["buckets"], (*REQUEST_SECONDS, math.inf), strict=True):
            assert bucket["count"] == sample("bucket", le=floatToGoString(bound))


def test_two_versions_have_their_own_reports_and_add_up_in_the_metrics() -> None:
    metrics = Metrics()
    older, newer = Stats(metrics, "m"), Stats(metrics, "m")
    older.took(Mode.WINDOW, Latency(1.0, 1.0, 1.0))
    for _ in range(2):
        newer.took(Mode.WINDOW, Latency(1.0, 1.0, 1.0))

    def total() -> float | None:
        return metrics.registry.get_sample_value(
            "wane_answer_seconds_count", {"model": "m", "mode": "window", "phase": "total"}
        )

    assert total() == 3
    older.end()
    assert total() == 3
    newer.took(Mode.WINDOW, Latency(1.0, 1.0, 1.0))
    assert total() == 4
    assert document(newer)["modes"]["window"]["latency"]["total"]["count"] == 3


def test_all_answers_of_a_batch_are_counted_before_the_model_is_unloaded() -> None:
    metrics = Metrics()
    stats = Stats(metrics, "m")
    seconds = [1e-3, 2e-3, 3e-3]
    stats.add(Made(Mode.RECURRENT, (seconds, seconds, seconds), [0.0, None, 0.5], 2, "step", 3))
    stats.add(Made(Mode.RECURRENT, (seconds, seconds, seconds), [0.0, None, 0.5], 1, "step", 2))
    stats.end()
    assert stats._count_made not in metrics.late.counts

    def sample(name: str, **more: str) -> float | None:
        return metrics.registry.get_sample_value(f"wane_{name}", {"model": "m", "mode": "recurrent", **more})

    assert sample("answers_total", operation="step") == 5
    assert sample("answer_seconds_count", phase="total") == 6
    assert sample("answer_seconds_sum", phase="total") == pytest.approx(12e-3)
    assert sample("answer_error_bound_count") == 4
    assert sample("answers_top1_proved_total") == 3


def test_without_answers_there_are_no_modes() -> None:
    assert document(Stats(Metrics(), "m"))["modes"] == {}


def test_a_request_in_mode_both_counts_once_and_each_part_counts_in_its_mode() -> None:
    report = Stats(Metrics(), "m")
    report.answered("predict", Mode.BOTH)
    for mode in (Mode.RECURRENT, Mode.WINDOW, Mode.BOTH):
        report.took(mode, Latency(1.0, 2.0, 3.0))
    modes = document(report)["modes"]
    assert {mode: part["requests"] for mode, part in modes.items()} == {
        "recurrent": 0,
        "window": 0,
        "both": 1,
    }
    assert modes["window"]["latency"]["compute"]["p50_ms"] == 1.75  # in the middle of the bucket from 1.5 to 2 ms


async def test_the_report_counts_requests_by_operation_and_mode(harness: EngineHarness) -> None:
    session = (await harness.engine.create_session()).session
    parked = (await harness.engine.create_session()).session
    for _ in range(3):
        await harness.engine.submit(StepRequest(session, (5,)))
    await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.WINDOW))
    await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.BOTH))
    await harness.engine.score(ScoreRequest(TOKENS))
    async for _ in await harness.engine.generate(GenerateRequest(TOKENS, max_tokens=2)):
        pass
    report: Any = to_builtins(await harness.engine.report())
    assert (report["model"], report["model_version"], report["device"]) == ("fake", "1", "cpu")
    assert report["operations"] == {"step": 3, "predict": 2, "score": 1, "generate": 1}
    assert {mode: part["requests"] for mode, part in report["modes"].items()} == {
        "recurrent": 3,
        "window": 1,
        "both": 1,
    }
    # The four answers are three steps and the recurrent part of a request in mode both.
    assert report["modes"]["recurrent"]["latency"]["total"]["count"] == 4
    assert report["agreement"]["compared"] == 1
    assert report["sessions"] == {"resident": 1, "parked": 1, "rebuilt": 0}
    assert parked != session


async def test_prometheus_has_the_same_counts_and_no_session_id(harness: EngineHarness) -> None:
    session = (await harness.engine.create_session("a-session-by-name")).session
    await harness.engine.submit(StepRequest(session, (5,)))
    await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.BOTH))
    assert harness.sample("wane_answers_total", operation="step", mode="recurrent") == 1
    assert harness.sample("wane_answer_seconds_count", mode="window", phase="compute") == 1
    assert harness.sample("wane_sessions_resident") == 1
    assert harness.sample("wane_state_bytes") == harness.engine.state_cache.slot_bytes
    assert harness.sample("wane_batch_items_count", role="step") == 1
    text = harness.metrics.render()[0].decode()
    assert "a-session-by-name" not in text
    assert 'wane_model_info{device="cpu",model="fake",version="1"} 1.0' in text


async def test_bounds_and_proofs_of_answers_are_counted(make_harness: MakeHarness) -> None:
    harness = make_harness(certified=True, window=130, max_window=140)
    tokens = TOKENS * 20
    exact = await harness.engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT))
    window = await harness.engine.submit(PredictRequest(tokens, mode=Mode.WINDOW))
    vacuous = await harness.engine.submit(PredictRequest(tokens, mode=Mode.WINDOW, window=1))
    assert (exact.error_bound, exact.top1_proved, vacuous.top1_proved) == (0.0, True, False)
    assert window.error_bound is not None and 0 < window.error_bound < 1e-2
    assert vacuous.error_bound == pytest.approx(1.0)
    for mode, le, count in (("recurrent", "0.0", 1), ("window", "0.0", 0), ("window", "0.01", 1), ("window", "1.0", 2)):
        assert harness.sample("wane_answer_error_bound_bucket", mode=mode, le=le) == count
    assert harness.sample("wane_answers_top1_proved_total", mode="recurrent") == 1
    assert harness.sample("wane_answers_top1_proved_total", mode="window") == window.top1_proved
    uncertified = make_harness()
    await uncertified.engine.submit(PredictRequest(tokens, mode=Mode.WINDOW))
    assert uncertified.sample("wane_answer_error_bound_count", mode="window") == 0


async def test_the_report_has_the_bounds_that_windows_reached_by_k(make_harness: MakeHarness) -> None:
    harness = make_harness(certified=True, window=130, max_window=140)
    tokens, asked = TOKENS * 20, []
    for window, prove, mode in (
        (130, False, Mode.WINDOW),
        (139, False, Mode.BOTH),
        (1, False, Mode.WINDOW),
        (130, True, Mode.WINDOW),
    ):
        asked.append(await harness.engine.submit(PredictRequest(tokens, mode=mode, window=window, prove=prove)))
    await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.WINDOW, window=130))  # leaves nothing out
    await harness.engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT))
    found: Any = to_builtins(await harness.engine.report())["windows"]
    assert [(each["k"], each["prove"], each["answers"]) for each in found] == [
        (1, False, 1),
        (128, False, 2),
        (128, True, 1),
    ]
    assert asked[1].agreement is not None
    proved = [asked[0].top1_proved, asked[1].agreement.top1_proved, asked[2].top1_proved, asked[3].top1_proved]
    assert [each["top1_proved"] for each in found] == [proved[2], proved[0] + proved[1], proved[3]]
    bounds = known([asked[0].error_bound, asked[1].agreement.error_bound])
    assert [bucket["count"] for bucket in found[1]["buckets"]] == [
        sum(bound <= (bucket["le"] or 1) for bound in bounds) for bucket in found[1]["buckets"]
    ]
    assert (found[0]["p90"], found[0]["buckets"][-2]) == (pytest.approx(0.95), {"le": 1.0, "count": 1})


async def test_the_report_has_the_bounds_and_proofs_of_comparisons(make_harness: MakeHarness) -> None:
    harness = make_harness(certified=True, window=130, max_window=140)
    for window in (130, 1, 140):
        await harness.engine.submit(PredictRequest(TOKENS * 20, mode=Mode.BOTH, window=window))
    await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.BOTH))
    agreement: Any = to_builtins(await harness.engine.report())["agreement"]
    epsilon = harness.manifest.certificate.error_bound_at
    bounds = known([epsilon(130), epsilon(1), epsilon(140), 0.0])
    assert agreement["error_bound"] == {"bounded": 4, "mean": pytest.approx(sum(bounds) / 4), "max": max(bounds)}
    assert agreement["top1_proved_rate"] == harness.sample("wane_agreement_top1_proved_total") / 4 >= 0.25
    assert agreement["bound_violations"] == harness.sample("wane_agreement_bound_violations_total") == 0


async def test_a_comparison_over_its_bound_is_counted_and_logged(
    make_harness: MakeHarness, caplog: pytest.LogCaptureFixture
) -> None:
    # This radius is smaller than the true error.
    harness = make_harness(certified=True, window=4, max_window=140, radius=1e-9)
    answer = await harness.engine.submit(PredictRequest(TOKENS * 20, mode=Mode.BOTH))
    assert answer.agreement is not None and answer.agreement.error_bound is not None
    assert answer.agreement.total_variation > answer.agreement.error_bound
    agreement: Any = to_builtins(await harness.engine.report())["agreement"]
    assert agreement["bound_violations"] == harness.sample("wane_agreement_bound_violations_total") == 1
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    fields = vars(record)["fields"]
    assert (fields["model"], fields["error_bound"]) == ("fake", answer.agreement.error_bound)
