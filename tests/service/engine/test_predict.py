from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import to_builtins

from tests.service.engine_harness import CONTRACTIVE, EngineHarness, MakeHarness
from wane.models.manifest import Certificate
from wane.service.errors import DeadlineExceeded, InvalidRequest, WaneError
from wane.service.types.answer import Answer
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import PredictRequest

EOS = 0
TOKENS = tuple(range(10, 20))
SIZE = 258


def top(harness: EngineHarness, input_ids: list[int]) -> int:
    return int(harness.runner.logits(input_ids).argmax())


async def test_recurrent_runs_all_tokens(harness: EngineHarness) -> None:
    answer = await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.RECURRENT))
    assert harness.runner.calls == [("window", [[EOS, *TOKENS]])]
    assert (answer.mode, answer.state, answer.window, answer.error_bound) == (
        Mode.RECURRENT,
        StateSource.FULL,
        None,
        0.0,
    )
    assert answer.predictions[0].token_id == top(harness, [EOS, *TOKENS])
    assert (answer.session, answer.position, answer.replayed) == (None, None, None)


@pytest.mark.parametrize(("window", "k"), [(None, 4), (1, 1), (9, 9)])
async def test_a_window_runs_the_last_k_tokens_from_zero(harness: EngineHarness, window: int | None, k: int) -> None:
    answer = await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.WINDOW, window=window))
    assert harness.runner.calls == [("window", [list(TOKENS[-k:])])]
    assert (answer.mode, answer.state, answer.window, answer.error_bound) == (
        Mode.WINDOW,
        StateSource.WINDOW,
        k,
        None,
    )


# Truncated sequences


@pytest.mark.parametrize(
    ("mode", "window", "tolerance", "used", "k"),
    [
        (Mode.RECURRENT, None, None, Mode.RECURRENT, None),
        (Mode.WINDOW, 60, None, Mode.WINDOW, 60),
        (Mode.WINDOW, None, None, Mode.WINDOW, 130),
        (Mode.WINDOW, 200, None, Mode.WINDOW, 150),
        (Mode.BOTH, 60, None, Mode.BOTH, 60),
        (Mode.BOTH, 200, None, Mode.BOTH, 150),
        (Mode.AUTO, None, None, Mode.WINDOW, 130),
        (Mode.AUTO, 60, None, Mode.WINDOW, 60),
        (Mode.AUTO, 200, None, Mode.RECURRENT, None),
        (Mode.AUTO, None, 1e-12, Mode.RECURRENT, None),
        (Mode.AUTO, 60, 1e-12, Mode.RECURRENT, None),
        (Mode.AUTO, None, 0.1, Mode.WINDOW, 66),
    ],
)
async def test_a_truncated_sequence_runs_without_a_start_token(
    make_harness: MakeHarness, mode: Mode, window: int | None, tolerance: float | None, used: Mode, k: int | None
) -> None:
    harness = make_harness(certified=True, window=130, max_window=200)
    certificate = harness.manifest.certificate
    assert certificate.smallest_window(0.1) == 66
    tokens = TOKENS * 15
    request = PredictRequest(tokens, mode=mode, window=window, tolerance=tolerance, truncated=True)
    answer = await harness.engine.submit(request)
    assert (answer.mode, answer.window) == (used, k)
    assert answer.state is (StateSource.WINDOW if used is Mode.WINDOW else StateSource.FULL)
    known = k if used is Mode.WINDOW and k is not None else 150
    assert answer.error_bound == certificate.error_bound_at(known)
    assert answer.state_error_bound == pytest.approx((certificate.state_error_at(known) or 0) + 1e-6)
    lengths = [150] if k is None else [k] if used is Mode.WINDOW else [150, k]
    assert harness.runner.calls == [("window", [list(tokens[-length:])]) for length in lengths]
    if answer.agreement is not None and k is not None:
        bound = certificate.error_bound_at(k)
        assert bound is not None and answer.agreement.error_bound == bound
        assert answer.agreement.total_variation <= bound


async def test_a_truncated_sequence_of_an_uncertified_model_has_no_bound(harness: EngineHarness) -> None:
    for mode in Mode:
        answer = await harness.engine.submit(PredictRequest(TOKENS, mode=mode, truncated=True))
        assert (answer.error_bound, answer.state_error_bound, answer.top1_proved) == (None, None, False)
        if answer.agreement is not None:
            assert answer.agreement.error_bound is None


async def test_a_truncated_sequence_equals_a_window_of_the_whole(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(certified=True, window=130, max_window=200)
    window = await harness.engine.submit(PredictRequest(TOKENS * 15, mode=Mode.WINDOW, window=9))
    truncated = await harness.engine.submit(PredictRequest((TOKENS * 15)[-9:], mode=Mode.RECURRENT, truncated=True))
    assert (truncated.predictions, truncated.error_bound) == (window.predictions, window.error_bound)
    begun = await harness.engine.submit(PredictRequest((TOKENS * 15)[-9:], mode=Mode.RECURRENT))
    assert (begun.predictions == window.predictions, begun.error_bound) == (False, 0.0)


async def test_auto_of_a_certified_model_uses_its_own_window(make_harness: MakeHarness) -> None:
    harness = make_harness(certified=True, window=130, max_window=200, session_history_tokens=200)
    assert harness.manifest.certificate.certified
    tokens = TOKENS * 20
    answer = await harness.engine.submit(PredictRequest(tokens))
    assert (answer.mode, answer.window, answer.state) == (Mode.WINDOW, 130, StateSource.WINDOW)
    assert answer.error_bound == harness.manifest.certificate.error_bound_at(130)
    short = await harness.engine.submit(PredictRequest(tokens[:130]))
    assert (short.mode, short.window, short.state, short.error_bound) == (Mode.RECURRENT, None, StateSource.FULL, 0.0)


async def test_auto_runs_all_tokens_if_the_models_own_window_has_a_large_bound(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(certified=True, window=64, max_window=200)
    curve = harness.manifest.certificate.error_bound_at
    tokens = TOKENS * 30
    answer = await harness.engine.submit(PredictRequest(tokens))
    assert (curve(64) or 0) > 1e-3
    assert (answer.mode, answer.window, answer.state, answer.error_bound) == (
        Mode.RECURRENT,
        None,
        StateSource.FULL,
        0.0,
    )
    asked = await harness.engine.submit(PredictRequest(tokens, window=64))
    assert (asked.mode, asked.window, asked.error_bound) == (Mode.WINDOW, 64, curve(64))


@pytest.mark.parametrize("tolerance", [0.5, 0.1, 1e-3])
async def test_auto_takes_the_smallest_window_within_the_tolerance(make_harness: MakeHarness, tolerance: float) -> None:
    harness = make_harness(certified=True, window=4, max_window=200)
    answer = await harness.engine.submit(PredictRequest(TOKENS * 30, tolerance=tolerance))
    k = harness.manifest.certificate.smallest_window(tolerance)
    assert k is not None
    assert (answer.mode, answer.window) == (Mode.WINDOW, k)
    assert harness.runner.calls == [("window", [list((TOKENS * 30)[-k:])])]
    assert answer.error_bound is not None and answer.error_bound <= tolerance
    whole = await harness.engine.submit(PredictRequest(TOKENS * 30, tolerance=1e-12))
    assert (whole.mode, whole.state, whole.error_bound) == (Mode.RECURRENT, StateSource.FULL, 0.0)


async def test_auto_tries_the_models_own_window_if_runs_output_a_radius(make_harness: MakeHarness) -> None:
    harness = make_harness(certified=True, window=4, max_window=200, radius=1e-5)
    tokens = TOKENS * 30
    answer = await harness.engine.submit(PredictRequest(tokens, tolerance=1e-3))
    assert (answer.mode, answer.window, answer.state) == (Mode.WINDOW, 4, StateSource.WINDOW)
    assert harness.runner.roles() == ["window"]
    assert answer.error_bound is not None and answer.error_bound <= 1e-3
    assert answer.state_error_bound == pytest.approx(1e-5 + 1e-6)


async def test_a_failed_try_is_followed_by_a_window_within_the_tolerance(make_harness: MakeHarness) -> None:
    harness = make_harness(certified=True, window=4, max_window=200, radius=1.0)
    tokens = TOKENS * 30
    answer = await harness.engine.submit(PredictRequest(tokens, tolerance=1e-3))
    k = harness.manifest.certificate.smallest_window(1e-3)
    assert (answer.mode, answer.window) == (Mode.WINDOW, k)
    assert [len(rows[0]) for _, rows in harness.runner.calls] == [4, k]
    exact = await harness.engine.submit(PredictRequest(tokens, tolerance=0.0, window=9))
    assert (exact.mode, exact.error_bound) == (Mode.RECURRENT, 0.0)
    assert [len(rows[0]) for _, rows in harness.runner.calls[2:]] == [9, 301]
    report: Any = to_builtins(await harness.engine.report())
    assert {mode: part["requests"] for mode, part in report["modes"].items()} == {"recurrent": 1, "window": 1}


async def test_a_radius_never_enlarges_the_error_bound(make_harness: MakeHarness) -> None:
    tokens = TOKENS * 30
    plain = make_harness(certified=True, window=130, max_window=200)
    curve = await plain.engine.submit(PredictRequest(tokens))
    for radius in (1e-9, 1.0, 1e9, float("inf"), float("nan")):
        harness = make_harness(certified=True, window=130, max_window=200, radius=radius)
        answer = await harness.engine.submit(PredictRequest(tokens))
        assert answer.error_bound is not None and curve.error_bound is not None
        assert (answer.error_bound < curve.error_bound) is (radius == 1e-9)
        assert answer.error_bound <= curve.error_bound


@pytest.mark.parametrize(
    "request_",
    [
        PredictRequest(TOKENS),
        PredictRequest(TOKENS, window=8),
        PredictRequest(TOKENS, tolerance=0.5),
        PredictRequest(TOKENS, tolerance=0.5, window=8),
        PredictRequest(TOKENS, tolerance=0.0),
        PredictRequest(TOKENS[:4]),
    ],
    ids=["plain", "k", "tolerance", "tolerance-k", "exact", "short"],
)
@pytest.mark.parametrize("certificate", [CONTRACTIVE, Certificate(contractive=False, layers=())])
async def test_auto_runs_all_tokens_of_an_uncertified_model(
    make_harness: MakeHarness, certificate: Certificate, request_: PredictRequest
) -> None:
    harness = make_harness(certificate=certificate, radius=1e-9)
    answer = await harness.engine.submit(request_)
    assert (answer.mode, answer.state, answer.error_bound) == (Mode.RECURRENT, StateSource.FULL, 0.0)


async def test_a_radius_proves_nothing_without_a_certificate(make_harness: MakeHarness) -> None:
    harness = make_harness(certificate=Certificate(contractive=False, layers=()), radius=1e-9)
    answer = await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.BOTH))
    assert answer.agreement is not None
    assert (answer.error_bound, answer.top1_proved) == (0.0, False)
    assert answer.agreement.error_bound is answer.agreement.state_error_bound is None
    assert answer.agreement.top1_proved is False


async def test_both_has_two_latencies_and_the_agreement(harness: EngineHarness) -> None:
    answer = await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.BOTH, window=2, top_k=3))
    assert answer.modes is not None
    assert answer.agreement is not None
    recurrent, window = harness.runner.logits([EOS, *TOKENS]), harness.runner.logits(TOKENS[-2:])
    assert answer.predictions == answer.modes[Mode.RECURRENT].predictions
    assert answer.modes[Mode.WINDOW].predictions[0].token_id == window.argmax()
    assert len(answer.modes[Mode.WINDOW].predictions) == 3
    p, q = (np.exp(x.astype(float)) / np.exp(x.astype(float)).sum() for x in (recurrent, window))
    assert answer.agreement.total_variation == pytest.approx(np.abs(p - q).sum() / 2)
    assert answer.agreement.top1_match == (recurrent.argmax() == window.argmax())
    assert answer.agreement.top1_proved is False
    parts = [part.latency for part in answer.modes.values()]
    assert all(part.compute_ms > 0 and part.total_ms >= part.compute_ms for part in parts)
    assert answer.latency.compute_ms == pytest.approx(sum(part.compute_ms for part in parts))
    assert answer.latency.total_ms >= max(part.total_ms for part in parts)


async def test_a_window_over_all_tokens_agrees_and_is_proved(harness: EngineHarness) -> None:
    answer = await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.BOTH, window=10))
    assert answer.agreement is not None
    assert answer.agreement.total_variation == 0.0
    assert answer.agreement.error_bound == answer.agreement.state_error_bound == 0.0
    assert answer.agreement.top1_match is answer.agreement.top1_proved is True


async def test_a_long_input_runs_in_pieces(harness: EngineHarness) -> None:
    tokens = tuple(10 + index % 97 for index in range(1200))
    answer = await harness.engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT))
    assert harness.runner.roles() == ["advance", "advance", "advance", "head"]
    assert answer.predictions[0].token_id == top(harness, [EOS, *tokens])
    assert answer.error_bound == 0.0


async def test_many_inputs_form_one_batch_and_each_has_its_own_answer_or_error(harness: EngineHarness) -> None:
    requests = [PredictRequest((token,), mode=Mode.RECURRENT) for token in (10, 11, SIZE, 12)]
    answers = await harness.engine.predict_many(requests)
    assert [len(rows) for _, rows in harness.runner.calls] == [3]
    assert isinstance(answers[2], InvalidRequest)
    for request, answer in zip(requests, answers, strict=True):
        if isinstance(answer, Answer):
            assert answer.predictions[0].token_id == top(harness, [EOS, *request.tokens])


async def test_an_unexpected_error_fails_one_input_but_not_its_batch(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = ZeroDivisionError("a bug")

    class Broken(tuple[str, ...]):
        def __getitem__(self, index: Any) -> Any:
            if index == unlucky:
                raise fail
            return super().__getitem__(index)

    requests = [PredictRequest((token,), mode=Mode.RECURRENT, top_k=1) for token in (10, 11, 12)]
    firsts = [top(harness, [EOS, *request.tokens]) for request in requests]
    assert len(set(firsts)) == 3
    unlucky = firsts[1]
    monkeypatch.setattr(harness.vocabulary, "texts", Broken(harness.vocabulary.texts))
    answers = await harness.engine.predict_many(requests)
    assert [isinstance(answer, Answer) for answer in answers] == [True, False, True]
    assert answers[1] is fail


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.WINDOW, Mode.BOTH])
async def test_a_window_over_the_models_limit_is_refused_with_the_limit(harness: EngineHarness, mode: Mode) -> None:
    with pytest.raises(InvalidRequest, match="window is 17, but model fake takes windows of 1 to 16"):
        await harness.engine.submit(PredictRequest(TOKENS, mode=mode, window=17))


async def test_the_servers_limit_on_windows_can_be_lower_than_the_models(make_harness: MakeHarness) -> None:
    harness = make_harness(window=8, settings_max_window=6)
    assert (await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.WINDOW))).window == 6
    with pytest.raises(InvalidRequest, match="1 to 6 tokens"):
        await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.WINDOW, window=7))


async def test_more_predictions_than_the_server_lists_are_refused(harness: EngineHarness) -> None:
    with pytest.raises(InvalidRequest, match="top_k is 101, but must be at most 100"):
        await harness.engine.submit(PredictRequest(TOKENS, top_k=101))


async def test_predictions_are_sorted_and_their_probabilities_are_the_models(harness: EngineHarness) -> None:
    answer = await harness.engine.submit(PredictRequest(TOKENS, mode=Mode.RECURRENT, top_k=100))
    logprobs = [one.logprob for one in answer.predictions]
    assert logprobs == sorted(logprobs, reverse=True)
    assert len({one.token_id for one in answer.predictions}) == 100
    assert [one.probability for one in answer.predictions] == pytest.approx(np.exp(logprobs))


async def test_a_predicted_token_that_is_not_a_whole_character_has_its_bytes(harness: EngineHarness) -> None:
    answer = await harness.engine.submit(PredictRequest(TOKENS, top_k=100))
    for one in answer.predictions:
        raw = harness.vocabulary.token_bytes(one.token_id)
        assert one.bytes == (None if raw.isascii() else tuple(raw))
    assert any(one.bytes for one in answer.predictions)


async def test_a_deadline_applies_while_the_runner_is_busy(
    harness: EngineHarness, travel: Callable[[float], None]
) -> None:
    harness.runner.gate.clear()
    first = asyncio.ensure_future(harness.engine.submit(PredictRequest((5,))))
    await harness.runner.until_busy()
    deadline = asyncio.get_running_loop().time() + 3600
    late = asyncio.ensure_future(harness.engine.submit(PredictRequest((6,), deadline=deadline)))
    await asyncio.sleep(0)
    travel(2 * 3600)
    with pytest.raises(DeadlineExceeded):
        await late
    harness.runner.gate.set()
    await first
    assert harness.runner.calls == [("window", [[EOS, 5]])]
    assert harness.sample("wane_queue_dropped_total", reason="deadline") == 1
    assert harness.sample("wane_queue_dropped_total", reason="abandoned") == 0


async def test_a_failed_run_has_a_fixed_message(harness: EngineHarness, caplog: pytest.LogCaptureFixture) -> None:
    harness.runner.poison = 66
    with pytest.raises(WaneError) as caught:
        await harness.engine.submit(PredictRequest((66,)))
    assert (caught.value.message, caught.value.http_status) == ("the model failed to run", 500)
    assert "poisoned" in caplog.text
