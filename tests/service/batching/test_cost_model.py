from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from tests.service.engine_harness import HIDDEN, EngineHarness, FakeRunner, InOrder, byte_vocabulary, make_manifest
from wane.service.batching.cost_model import RUN_EMA_ALPHA, CostModel, RunTimeModel
from wane.service.chunked.layout import SEGMENT_TOKENS
from wane.service.state.pool import StatePool
from wane.service.types.common import Mode
from wane.service.types.request import PredictRequest

PIECE = 512


def test_costs_are_linear_between_measured_lengths_and_proportional_beyond_them() -> None:
    cost_model = CostModel(PIECE)
    cost_model.observe("window", 1, 16, 2.0)
    cost_model.observe("window", 1, 64, 5.0)
    assert [cost_model.window(k) for k in (1, 16, 40, 64, 128)] == [2.0, 2.0, 3.5, 5.0, 10.0]


def test_an_item_of_a_batch_costs_its_share_of_the_batch() -> None:
    cost_model = CostModel(PIECE)
    cost_model.observe("window", 4, 64, 2.0)
    assert cost_model.window(16) == 0.5


def test_costs_follow_a_change_of_load() -> None:
    cost_model = CostModel(PIECE)
    cost_model.observe("step", 1, 1, 1.0)
    cost_model.observe("step", 1, 1, 17.0)
    assert cost_model.run("step", 1) == 2.0
    for _ in range(200):
        cost_model.observe("step", 1, 1, 17.0)
    assert cost_model.run("step", 1) == pytest.approx(17.0, rel=1e-4)


def test_a_long_sequence_costs_the_sum_of_its_pieces_and_a_head() -> None:
    cost_model = CostModel(PIECE)
    cost_model.observe("window", 1, PIECE, 7.0)
    cost_model.observe("advance", 1, PIECE, 5.0)
    cost_model.observe("advance", 1, 100, 1.0)
    cost_model.observe("head", 1, 1, 0.25)
    assert cost_model.full(PIECE) == 7.0
    assert cost_model.full(2 * PIECE) == 10.25
    assert cost_model.full(2 * PIECE + 100) == 11.25


def test_a_sequence_in_parallel_chunks_costs_their_expected_time() -> None:
    cost_model = CostModel(PIECE)
    cost_model.observe("advance", 1, PIECE, 5.0)
    cost_model.observe("head", 1, 1, 0.25)
    cost_model.parallel_cost = {2 * PIECE: None, 4 * PIECE: 3.0}.__getitem__
    assert cost_model.full(2 * PIECE) == 10.25
    assert cost_model.full(4 * PIECE) == 3.25


def test_a_role_without_runs_costs_nothing() -> None:
    assert CostModel(PIECE).full(10_000) == 0.0


def test_measure_uses_the_fastest_run_of_every_role() -> None:
    vocabulary = byte_vocabulary()
    runner, cost_model = FakeRunner(vocabulary.size), CostModel(PIECE)
    pool = StatePool(make_manifest(vocabulary).state, HIDDEN, 1 << 16)
    ticks = itertools.accumulate(itertools.chain([0], itertools.cycle((3, 1, 2, 1, 5, 1))))
    cost_model.measure(runner, pool, vocabulary.eos_id, (2, 4, 4), clock=lambda: float(next(ticks)))
    assert {role for role, _ in runner.calls} == {"step", "head", "window", "advance"}
    assert {len(rows) for role, rows in runner.calls if role != "head"} == {1}
    assert cost_model.run("step", 1) == cost_model.run("head", 1) == cost_model.window(2) == cost_model.window(4) == 2.0


def test_a_failed_measurement_raises_its_error() -> None:
    vocabulary = byte_vocabulary()
    runner = FakeRunner(vocabulary.size)
    runner.poison = vocabulary.eos_id
    pool = StatePool(make_manifest(vocabulary).state, HIDDEN, 1 << 16)
    with pytest.raises(RuntimeError, match="poisoned"):
        CostModel(PIECE).measure(runner, pool, vocabulary.eos_id, (2,))


async def test_an_engine_reports_its_measured_costs() -> None:
    harness = EngineHarness(cost_model=CostModel(PIECE))
    await harness.engine.submit(PredictRequest(tuple(range(2, 12))))
    report = await harness.engine.report()
    costs = report.costs
    assert set(costs) == {"step", "head", "window", "advance"}
    assert [point.tokens for point in costs["window"]] == [1, 4, 11, 16]
    assert all(point.compute_ms > 0 for points in costs.values() for point in points)
    await harness.engine.close()


class Quick(InOrder):
    """A throughput profile. A token in four parallel chunks takes a tenth of the time that it takes in a sequential
    run. Each chunk begins with a warm-up of 300 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._paces = {"advance": {1: 1e-6, 4: 1e-7}}

    def warm_up(self, residual: float) -> int | None:
        return 300


@pytest.mark.parametrize(("throughput", "mode"), [(None, Mode.WINDOW), (Quick(), Mode.RECURRENT)])
async def test_auto_runs_all_tokens_if_chunks_cost_less_than_a_window(
    make_harness: Callable[..., EngineHarness], throughput: Quick | None, mode: Mode
) -> None:
    harness = make_harness(
        certified=True, window=400, max_window=400, session_history_tokens=400, throughput=throughput
    )
    answer = await harness.engine.submit(PredictRequest((5,) * 2700))
    assert (answer.mode, answer.error_bound == 0.0) == (mode, mode is Mode.RECURRENT)


def test_the_expected_time_of_chunks_covers_every_segment() -> None:
    harness = EngineHarness(throughput=Quick())
    parallel = harness.engine.forward.parallel
    segment = 1e-7 * (SEGMENT_TOKENS + 3 * 300)
    assert parallel.seconds(600) is None
    assert parallel.seconds(2700) == pytest.approx(1e-7 * (2700 + 900))
    assert parallel.seconds(2 * SEGMENT_TOKENS) == pytest.approx(2 * segment)
    assert parallel.seconds(SEGMENT_TOKENS * 3 // 2) == pytest.approx(1.5 * segment)


def test_a_batch_size_without_runs_has_no_expected_time() -> None:
    times = RunTimeModel()
    times.took("step", 1, 0.001, on_loop=True)
    assert times.expected("step", 2) == math.inf
    assert times.expected("head", 1) == math.inf


@pytest.mark.parametrize(("items", "like"), [(1, 1), (3, 4), (33, 64), (64, 64)])
def test_a_batch_size_is_rounded_up_to_a_power_of_two(items: int, like: int) -> None:
    times = RunTimeModel()
    times.took("step", like, 0.001, on_loop=True)
    assert times.expected("step", items) == 0.001
    assert times.expected("step", like + 1) == math.inf


def test_the_expected_time_on_the_event_loop_is_an_average() -> None:
    times = RunTimeModel()
    times.took("step", 8, 0.001, on_loop=True)
    times.took("step", 8, 0.009, on_loop=True)
    assert times.expected("step", 8) == pytest.approx(0.001 + RUN_EMA_ALPHA * 0.008)


def test_the_expected_time_on_the_runner_s_thread_is_the_fastest_run() -> None:
    times = RunTimeModel()
    for seconds in (0.004, 0.002, 0.009):
        times.took("step", 8, seconds, on_loop=False)
    assert times.expected("step", 8) == 0.002
