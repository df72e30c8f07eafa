from __future__ import annotations

import numpy as np
import pytest

from tests.service.engine_harness import EngineHarness
from wane.service.chunked import layout
from wane.service.chunked.layout import (
    FEWEST_STEPS,
    FEWEST_TOKENS,
    MARGIN,
    RUN_SECONDS,
    SEGMENT_TOKENS,
    ThroughputProfile,
    lay_out,
)

FLAT = {1: 1e-5, 8: 1e-5, 64: 1e-5}
STEEP = {1: 1e-5, 8: 2e-6, 64: 1e-6}


@pytest.mark.parametrize("tokens", [128, 1000, 4096, 65_536, 100_000])
@pytest.mark.parametrize("warm_up", [1, 16, 64, 300])
def test_a_layout_covers_the_segment_and_fits_the_warm_up(tokens: int, warm_up: int) -> None:
    found = lay_out(tokens, warm_up, "scan", STEEP, STEEP)
    segment = min(tokens, SEGMENT_TOKENS)
    if found is None:
        assert segment < 8 * max(2 * warm_up, FEWEST_TOKENS)
        return
    assert found.length >= max(2 * warm_up, FEWEST_TOKENS)
    assert (found.chunks - 1) * found.length < segment <= found.chunks * found.length
    assert found.chunks > 1


def test_sequences_run_in_order_if_chunks_are_no_quicker() -> None:
    assert lay_out(65_536, 16, "scan", FLAT, FLAT) is None


def test_the_layout_includes_the_cost_of_the_warm_up() -> None:
    wide = lay_out(4096, 30, "scan", STEEP, STEEP)
    assert wide is not None and wide.chunks == 64
    narrow = lay_out(4096, 30, "scan", STEEP, {**STEEP, 64: 1e-4})
    assert narrow is not None and narrow.chunks == 8
    assert lay_out(4096, 30, "scan", STEEP, dict.fromkeys(STEEP, 0.001)) is None


def test_all_sequences_run_in_order_if_no_pace_is_measured() -> None:
    assert lay_out(65_536, 16, "scan", {}, {}) is None
    assert lay_out(65_536, 16, "scan", STEEP, {}) is None


def test_a_run_takes_at_most_run_seconds() -> None:
    quick = lay_out(65_536, 64, "scan", STEEP, STEEP)
    assert quick is not None and quick.steps * quick.chunks <= 4096
    slow = {width: 20 * pace for width, pace in STEEP.items()}
    steps = lay_out(65_536, 64, "scan", slow, slow)
    assert steps is not None and steps.chunks == 64
    assert steps.steps * steps.chunks * slow[64] <= RUN_SECONDS < 2 * steps.steps * steps.chunks * slow[64]
    crawling = {width: 1e4 * pace for width, pace in STEEP.items()}
    fewest = lay_out(65_536, 64, "scan", crawling, crawling)
    assert fewest is not None and fewest.steps == FEWEST_STEPS


def test_the_warm_up_is_the_smallest_length_from_which_the_residual_stays_small() -> None:
    seen = ThroughputProfile([(16, 1e-1), (32, 1e-4), (64, 1e-3), (128, 1e-6), (256, 0.0)])
    assert seen.warm_up(1e-1) == 32
    # After 64 tokens the residual is again above MARGIN * 1e-3.
    assert seen.warm_up(1e-3) == 128
    assert seen.warm_up(0.0) == 256
    assert ThroughputProfile([(16, 0.0), (32, 1.0)]).warm_up(1.0) is None
    assert ThroughputProfile([]).warm_up(1.0) is None
    assert MARGIN == 0.25


@pytest.fixture
def measured(harness: EngineHarness) -> ThroughputProfile:
    """The profile of a measured model, up to batches of 8. By the clock, the first run of each width takes 1 s, 2 s or
    3 s, and all later runs take longer."""
    ticks = iter(np.cumsum([value for second in range(1, 100) for value in (0.0, float(second))]))
    profile, pool = ThroughputProfile(clock=lambda: next(ticks)), harness.engine.state_cache
    for _ in profile.measure(harness.runner, pool, harness.manifest, 8):
        pass
    return profile


def test_differences_are_measured_between_runs_over_the_same_tokens(
    harness: EngineHarness, measured: ThroughputProfile
) -> None:
    left = dict(measured._residuals)
    assert list(left) == list(layout.LENGTHS)
    assert left[32] == pytest.approx(left[16] * 0.9**16, rel=0.01)
    harness.runner.decay = np.float32(1.0)
    for _ in measured.measure(harness.runner, harness.engine.state_cache, harness.manifest, 1):
        pass
    assert measured.warm_up(1e-3) is None


def test_the_pace_of_a_width_comes_from_its_fastest_run(measured: ThroughputProfile) -> None:
    # The runs have 1, 4 and 8 rows, with 512, 128 and 64 tokens in each row. The clock of the runs of `scan` goes on.
    assert measured.pace("advance") == {1: 1 / 512, 4: 2 / 512, 8: 3 / 512}
    assert measured.pace("scan") == {1: 10 / 512, 4: 11 / 512, 8: 12 / 512}


def test_the_profile_is_empty_before_the_measurement(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "POSITIONS", 64)
    throughput = ThroughputProfile()
    assert (throughput.pace("scan"), throughput.pace("advance"), throughput.warm_up(1.0)) == ({}, {}, None)
    for _ in throughput.measure(harness.runner, harness.engine.state_cache, harness.manifest, 4):
        assert throughput.warm_up(1.0) is None
    assert set(throughput.pace("scan")) == set(throughput.pace("advance")) == {1, 4}
    assert throughput.warm_up(1.0) is not None
