from __future__ import annotations

import pytest

from tests.service.engine_harness import EngineHarness
from wane.service.errors import InvalidRequest
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import CompareRequest

EOS = 0
TOKENS = tuple(range(10, 20))


async def test_recurrent_and_window_runs_alternate(harness: EngineHarness) -> None:
    comparison = await harness.engine.compare(CompareRequest(TOKENS, windows=(2, 16), repeat=3))
    turn = [("step", [[19]]), ("window", [[18, 19]]), ("window", [[EOS, *TOKENS]])]
    assert harness.runner.calls == [("window", [[EOS, *TOKENS[:-1]]]), *turn * 3]
    assert comparison.repeat == 3
    recurrent = comparison.recurrent
    assert (recurrent.mode, recurrent.window, recurrent.state) == (Mode.RECURRENT, None, StateSource.RESIDENT)
    assert (recurrent.error_bound, recurrent.agreement) == (0.0, None)
    assert [line.window for line in comparison.windows] == [2, 16]
    assert {line.state for line in comparison.windows} == {StateSource.WINDOW}


async def test_every_window_has_its_agreement_with_recurrent(harness: EngineHarness) -> None:
    short, whole = (await harness.engine.compare(CompareRequest(TOKENS, windows=(1, 10), repeat=1))).windows
    assert short.agreement is not None
    assert whole.agreement is not None
    assert short.agreement.total_variation > 1e-3
    assert whole.agreement.total_variation < 1e-6
    assert (short.error_bound, whole.error_bound) == (None, 0.0)
    assert whole.predictions[0].token_id == harness.runner.logits([EOS, *TOKENS]).argmax()


async def test_each_phase_has_its_latency(harness: EngineHarness) -> None:
    comparison = await harness.engine.compare(CompareRequest(TOKENS, windows=(4,), repeat=5))
    for line in (comparison.recurrent, *comparison.windows):
        queue, compute, total = line.latency.queue, line.latency.compute, line.latency.total
        assert 0 < compute.p50_ms <= compute.p99_ms
        assert total.p50_ms >= compute.p50_ms
        assert queue.p50_ms >= 0


async def test_the_report_counts_one_comparison_for_each_window(harness: EngineHarness) -> None:
    await harness.engine.compare(CompareRequest(TOKENS, windows=(1, 2, 10), repeat=7))
    report = await harness.engine.report()
    assert report.agreement.compared == 3
    assert harness.sample("wane_agreement_compared_total") == 3


async def test_one_token_can_be_compared(harness: EngineHarness) -> None:
    comparison = await harness.engine.compare(CompareRequest((10,), windows=(1,), repeat=1))
    assert comparison.windows[0].error_bound == 0.0


async def test_an_error_names_the_index_of_the_window(harness: EngineHarness) -> None:
    with pytest.raises(InvalidRequest, match=r"windows\[1\] is 17, but model fake takes windows of 1 to 16 tokens"):
        await harness.engine.compare(CompareRequest(TOKENS, windows=(8, 17)))
