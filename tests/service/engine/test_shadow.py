from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import getgeneratorlocals
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from tests.service.engine_harness import EngineHarness, MakeHarness
from tests.service.shipped import PATHS
from wane.service.engine import shadow
from wane.service.engine.agreement import AgreementBySource, Source, compare
from wane.service.engine.shadow import Shadow
from wane.service.engine.stats import ShadowReport
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import PredictRequest, StepRequest

EOS = 0
NOWHERE = np.zeros(4, np.float32)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "PAUSE_S", 0.0)


def shadow_of(harness: EngineHarness) -> Shadow:
    assert harness.engine.shadow is not None
    return harness.engine.shadow


async def turn() -> None:
    """Runs all ready tasks and timers until each waits again."""
    for _ in range(5):
        await asyncio.sleep(0)


async def settled(found: Shadow) -> None:
    """Waits until no shadow comparison is queued or running."""
    while found._working is not None:  # noqa: ASYNC110  (there is no event for it)
        await asyncio.sleep(0)


async def report(harness: EngineHarness) -> tuple[AgreementBySource, ShadowReport]:
    """Returns the fields `agreement` and `shadow` of the report."""
    document = await harness.engine.report()
    return document.agreement, document.shadow


async def session_of(harness: EngineHarness, *tokens: int, mode: Mode | None = None) -> tuple[str, Answer]:
    """Creates a session, and sends one step with these tokens. Returns the session's id and the answer."""
    session = (await harness.engine.create_session(mode=mode)).session
    return session, await harness.engine.submit(StepRequest(session, tokens))


async def test_a_shadow_window_of_a_step_is_only_in_the_report(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(shadow_rate=1.0)
    tokens = tuple(range(2, 12))
    _, answer = await session_of(harness, *tokens)
    await settled(shadow_of(harness))
    assert (answer.mode, answer.state, answer.modes, answer.agreement) == (
        Mode.RECURRENT,
        StateSource.RESIDENT,
        None,
        None,
    )
    assert harness.runner.roles() == ["advance", "step"]
    assert harness.shadow_runner.calls == [("window", [list(tokens[-4:])])]
    agreement, shadows = await report(harness)
    assert (agreement.compared, shadows.compared, shadows.dropped, shadows.failed) == (1, 1, 0, 0)
    expected = compare(
        harness.runner.logits([EOS, *tokens]),
        harness.runner.logits(tokens[-4:]),
        NOWHERE,
        NOWHERE,
        None,
        False,
    )
    assert agreement.total_variation.max == pytest.approx(expected.total_variation)
    assert agreement.max_logit_difference == pytest.approx(expected.max_logit_difference)


async def test_a_one_token_step_is_compared_with_the_window_that_ends_in_it(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(shadow_rate=1.0)
    tokens = tuple(range(2, 9))
    session = (await harness.engine.create_session()).session
    for token in tokens:
        step = asyncio.ensure_future(harness.engine.submit(StepRequest(session, (token,))))
        await turn()
        await step
        await settled(shadow_of(harness))
    windows = [list((EOS, *tokens[:end]) if end <= 4 else tokens[end - 4 : end]) for end in range(1, 8)]
    assert harness.shadow_runner.calls == [("window", [window]) for window in windows]
    agreement, shadows = await report(harness)
    assert (agreement.compared, shadows.dropped) == (7, 0)
    expected = [
        compare(
            harness.runner.logits([EOS, *tokens[:end]]),
            harness.runner.logits(window),
            NOWHERE,
            NOWHERE,
            None,
            False,
        )
        for end, window in enumerate(windows, start=1)
    ]
    assert agreement.max_logit_difference == pytest.approx(max(one.max_logit_difference for one in expected))


async def test_comparisons_of_requests_and_of_shadows_are_counted_separately(make_harness: MakeHarness) -> None:
    harness = make_harness(shadow_rate=1.0)
    await harness.engine.submit(PredictRequest((2, 3, 4, 5, 6), mode=Mode.BOTH))
    await harness.engine.submit(PredictRequest((2, 3, 4, 5, 6)))
    await harness.engine.submit(PredictRequest((2, 3, 4, 5, 7)))
    await settled(shadow_of(harness))
    agreement, shadows = await report(harness)
    sources = agreement.sources
    assert [agreement.compared, sources[Source.BOTH].compared, sources[Source.SHADOW].compared] == [3, 1, 2]
    assert shadows.cpu_s > 0
    assert harness.sample("wane_shadow_total", outcome="compared") == 2
    assert harness.sample("wane_agreement_compared_total") == 3
    assert harness.sample("wane_shadow_cpu_seconds_total") == shadows.cpu_s


async def test_the_answer_of_a_window_is_compared_with_a_run_of_all_tokens_in_pieces(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "PIECE_TOKENS", 4)
    harness = make_harness(shadow_rate=1.0, certified=True, window=100, max_window=140)
    tokens = tuple(5 + index % 90 for index in range(110))
    answer = await harness.engine.submit(PredictRequest(tokens, mode=Mode.WINDOW))
    await settled(shadow_of(harness))
    assert harness.shadow_runner.roles() == 28 * ["advance"] + ["head"]
    assert [token for _, rows in harness.shadow_runner.calls[:-1] for token in rows[0]] == [EOS, *tokens]
    agreement, _ = await report(harness)
    expected = compare(
        harness.runner.logits([EOS, *tokens]),
        harness.runner.logits(tokens[-100:]),
        NOWHERE,
        NOWHERE,
        None,
        False,
    )
    assert agreement.total_variation.max == pytest.approx(expected.total_variation, abs=1e-9)
    assert agreement.error_bound.max == answer.error_bound
    assert agreement.bound_violations == 0


async def test_a_window_session_is_compared_with_a_run_of_its_stored_tokens(make_harness: MakeHarness) -> None:
    harness = make_harness(shadow_rate=1.0)
    tokens = tuple(range(2, 32))
    session, _ = await session_of(harness, *tokens[:20], mode=Mode.WINDOW)
    await settled(shadow_of(harness))
    await harness.engine.submit(StepRequest(session, tokens[20:]))
    await settled(shadow_of(harness))
    (input_ids,) = [rows[0] for role, rows in harness.shadow_runner.calls if role == "advance"][1:]
    assert input_ids == list(tokens[4:])  # the last 16 stored tokens and the appended tokens


async def test_a_session_is_compared_at_the_position_of_the_sampled_answer(make_harness: MakeHarness) -> None:
    harness = make_harness(shadow_rate=1.0)
    harness.shadow_runner.gate.clear()
    tokens = list(range(2, 12))
    session, _ = await session_of(harness, *tokens)
    await harness.shadow_runner.until_busy()
    shadow_of(harness)._random = Random(0)
    shadow_of(harness)._rate = 0.0
    for token in (20, 21, 22):
        await harness.engine.submit(StepRequest(session, (token,)))
    harness.shadow_runner.gate.set()
    await settled(shadow_of(harness))
    agreement, _ = await report(harness)
    recurrent, window = harness.runner.logits([EOS, *tokens]), harness.runner.logits(tokens[-4:])
    assert agreement.compared == 1
    assert agreement.max_logit_difference == pytest.approx(float(np.abs(recurrent - window).max()))


async def test_a_sampled_answer_does_not_keep_its_batch(make_harness: MakeHarness) -> None:
    harness = make_harness(shadow_rate=1.0)
    harness.shadow_runner.gate.clear()
    await asyncio.gather(*(harness.engine.submit(PredictRequest((token,))) for token in range(2, 8)))
    await turn()
    queued = [getgeneratorlocals(cast(Any, work))["live"].result for _, work in shadow_of(harness)._queue]
    assert queued
    assert all(
        np.asarray(array.base).size == array.size for result in queued for array in (result.logits, result.hidden)
    )
    harness.shadow_runner.gate.set()
    await settled(shadow_of(harness))


async def test_the_rate_sets_the_share_of_sampled_answers(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MOST_CASES", 400)
    harness = make_harness(shadow_rate=0.25)
    shadow_of(harness)._random = Random(5)
    drawn = Random(5)
    expected = sum(drawn.random() < 0.25 for _ in range(400))
    for token in range(400):
        await harness.engine.submit(PredictRequest((2 + token % 90,)))
    await settled(shadow_of(harness))
    _, shadows = await report(harness)
    assert shadows.compared == expected
    assert 80 <= expected <= 120


async def test_answers_beyond_the_queue_are_dropped_and_counted(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MOST_CASES", 2)
    harness = make_harness(shadow_rate=1.0)
    harness.shadow_runner.gate.clear()
    session, _ = await session_of(harness, 2)
    await harness.shadow_runner.until_busy()
    for token in range(3, 8):
        await harness.engine.submit(StepRequest(session, (token,)))
    assert (await report(harness))[1].dropped == 3
    assert harness.sample("wane_shadow_total", outcome="dropped") == 3
    harness.shadow_runner.gate.set()
    await settled(shadow_of(harness))
    assert (await report(harness))[1].compared == 3


async def test_an_answer_over_the_token_limit_is_dropped(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MOST_TOKENS", 8)
    harness = make_harness(shadow_rate=1.0)
    await harness.engine.submit(PredictRequest(tuple(range(2, 10)), mode=Mode.WINDOW))
    await harness.engine.submit(PredictRequest(tuple(range(2, 10)), mode=Mode.RECURRENT))
    await settled(shadow_of(harness))
    _, shadows = await report(harness)
    assert (shadows.compared, shadows.dropped) == (1, 1)


async def test_no_shadow_starts_while_the_runner_is_busy(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, travel: Callable[[float], None]
) -> None:
    monkeypatch.setattr(shadow, "PAUSE_S", 3600.0)
    harness = make_harness(shadow_rate=1.0)
    session, _ = await session_of(harness, 2)
    harness.runner.gate.clear()
    harness.runner.busy.clear()
    live = asyncio.ensure_future(harness.engine.submit(StepRequest(session, (3,))))
    await harness.runner.until_busy()
    travel(3600.0)
    await turn()
    assert harness.shadow_runner.calls == []
    monkeypatch.setattr(shadow, "PAUSE_S", 0.0)
    harness.runner.gate.set()
    await live
    travel(7200.0)
    await settled(shadow_of(harness))
    assert len(harness.shadow_runner.calls) == 2


async def test_a_long_shadow_pauses_during_live_work(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "PIECE_TOKENS", 4)
    harness = make_harness(shadow_rate=1.0)
    harness.shadow_runner.gate.clear()
    await harness.engine.submit(PredictRequest(tuple(range(2, 13)), mode=Mode.WINDOW))
    await harness.shadow_runner.until_busy()
    harness.runner.gate.clear()
    harness.runner.busy.clear()
    live = asyncio.ensure_future(harness.engine.submit(PredictRequest((2,), mode=Mode.BOTH)))
    await harness.runner.until_busy()
    harness.shadow_runner.gate.set()
    running = shadow_of(harness)._running
    assert running is not None
    await asyncio.wait({running})
    await turn()
    assert harness.shadow_runner.roles() == ["advance"]
    harness.runner.gate.set()
    await live
    await settled(shadow_of(harness))
    assert harness.shadow_runner.roles() == ["advance", "advance", "advance", "head"]


async def test_live_work_does_not_wait_for_a_shadow(make_harness: MakeHarness) -> None:
    harness = make_harness(shadow_rate=1.0)
    harness.shadow_runner.gate.clear()
    session, _ = await session_of(harness, 2)
    await harness.shadow_runner.until_busy()
    answer = await harness.engine.submit(StepRequest(session, (3,)))
    assert answer.position == 2
    assert len(harness.shadow_runner.calls) == 1


async def test_shutdown_drops_shadows_without_waiting(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(shadow_rate=1.0)
    harness.shadow_runner.gate.clear()
    session, _ = await session_of(harness, 2)
    await harness.shadow_runner.until_busy()
    await harness.engine.submit(StepRequest(session, (3,)))
    await harness.engine.drain()
    await harness.engine.close()
    assert not harness.shadow_runner.gate.is_set()
    assert harness.sample("wane_shadow_total", outcome="dropped") == 2
    harness.shadow_runner.gate.set()
    await turn()
    assert harness.sample("wane_shadow_total", outcome="compared") == 0


async def test_an_answer_during_shutdown_is_not_sampled(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(shadow_rate=1.0)
    harness.runner.gate.clear()
    live = asyncio.ensure_future(harness.engine.submit(PredictRequest((2, 3))))
    await harness.runner.until_busy()
    drained = asyncio.create_task(harness.engine.drain())
    await turn()
    harness.runner.gate.set()
    await live
    await drained
    assert (await report(harness))[1] == ShadowReport(compared=0, dropped=0, failed=0, cpu_s=0.0)


async def test_a_comparison_over_its_bound_is_counted(
    make_harness: MakeHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness = make_harness(shadow_rate=1.0, certified=True)
    harness.shadow_runner.embedding = 2 * harness.shadow_runner.embedding
    await session_of(harness, 2, 3)  # the window covers all tokens, so the bound is 0
    await settled(shadow_of(harness))
    agreement, _ = await report(harness)
    assert agreement.sources[Source.SHADOW].bound_violations == agreement.bound_violations == 1
    assert harness.sample("wane_agreement_bound_violations_total") == 1
    assert "contradict their bound or proof" in caplog.text


@pytest.mark.parametrize("trouble", ["poison", "hot"])
async def test_a_failed_shadow_is_counted_and_the_next_one_runs(
    make_harness: MakeHarness, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    harness = make_harness(shadow_rate=1.0)
    setattr(harness.shadow_runner, trouble, 3)
    await harness.engine.submit(PredictRequest((2, 3)))
    await harness.engine.submit(PredictRequest((2, 4)))
    await settled(shadow_of(harness))
    _, shadows = await report(harness)
    assert (shadows.compared, shadows.failed) == (1, 1)
    assert "the repetition of a sampled answer in the other mode failed" in caplog.text


async def test_a_shadows_first_token_is_proved_by_its_margin(make_harness: MakeHarness) -> None:
    harness = make_harness(shadow_rate=1.0, certified=True, window=130, max_window=140)
    await harness.engine.submit(PredictRequest((5,) * 150, mode=Mode.RECURRENT))
    await settled(shadow_of(harness))
    agreement, _ = await report(harness)
    assert agreement.top1_proved_rate == 1.0
    assert agreement.error_bound.max == harness.manifest.certificate.error_bound_at(130)


async def test_a_shadow_uses_its_windows_radius(make_harness: MakeHarness) -> None:
    harness = make_harness(shadow_rate=1.0, certified=True, radius=1e-7, window=20, max_window=140)
    await harness.engine.submit(PredictRequest((5,) * 150, mode=Mode.RECURRENT))
    await settled(shadow_of(harness))
    epsilon = harness.manifest.certificate.error_bound_at(20)
    found = (await report(harness))[0].error_bound.max
    assert epsilon is not None and found is not None and 0 < found < epsilon


async def test_no_shadow_runs_if_the_rate_is_zero(make_harness: MakeHarness) -> None:
    harness = make_harness(shadow_rate=0.0)
    assert harness.engine.shadow is None
    assert harness.engine.answer_builder.sampler is None


async def test_a_served_model_has_shadows() -> None:
    (path,) = (path for path in PATHS if path.name == "rnn-stable")
    registry = ModelRegistry(Settings(bundles=path, shadow_rate=1.0), Metrics())
    await registry.load()
    engine = registry.get()
    found = engine.shadow
    assert found is not None
    tokens = tuple(range(2, 102))
    await engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT))
    await engine.submit(PredictRequest(tokens, mode=Mode.WINDOW))
    both = await engine.submit(PredictRequest(tokens, mode=Mode.BOTH))
    await settled(found)
    document = await engine.report()
    sources = document.agreement.sources
    assert both.agreement is not None
    assert sources[Source.SHADOW].compared == 2
    assert sources[Source.SHADOW].bound_violations == 0
    assert sources[Source.SHADOW].total_variation.max == pytest.approx(both.agreement.total_variation, abs=1e-6)
    assert document.shadow.cpu_s > 0
    await registry.close()
