from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import numpy as np
import pytest

from tests.service.engine_harness import EngineHarness
from wane.service.chunked import layout
from wane.service.chunked.layout import MARGIN, DecayProfile, ThroughputProfile

T = TypeVar("T")


def result(measuring: Generator[None, None, T]) -> T:
    """What a measurement ends in."""
    while True:
        try:
            next(measuring)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def test_the_warm_up_is_the_fewest_tokens_after_which_little_was_left_for_good() -> None:
    seen = DecayProfile([(16, 1e-1), (32, 1e-4), (64, 1e-3), (128, 1e-6), (256, 0.0)])
    assert seen.warm_up(1e-1) == 32
    assert seen.warm_up(1e-3) == 128  # a quarter of it was passed at 64 once more
    assert seen.warm_up(0.0) == 256
    assert DecayProfile([(16, 0.0), (32, 1.0)]).warm_up(1.0) is None
    assert DecayProfile([]).warm_up(1.0) is None
    assert MARGIN == 0.25


def test_what_is_left_is_measured_between_runs_over_the_same_tokens(harness: EngineHarness) -> None:
    pool, size = harness.engine._pool, harness.vocabulary.size
    measured = result(layout.measure_forgetting(harness.runner, pool, size))
    left = dict(measured._residuals)
    assert list(left) == list(layout.LENGTHS)
    assert left[32] == pytest.approx(left[16] * 0.9**16, rel=0.01)
    harness.runner.decay = np.float32(1.0)
    assert result(layout.measure_forgetting(harness.runner, pool, size)).warm_up(1e-3) is None


@pytest.mark.parametrize("role", ["advance", "scan"])
def test_paces_are_the_quickest_of_every_width_that_a_batch_holds(
    harness: EngineHarness, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "POSITIONS", 64)
    ticks = iter(np.cumsum([value for second in range(1, 100) for value in (0.0, float(second))]))
    measuring = layout.measure_pace(
        "scan" if role == "scan" else "advance", harness.runner, harness.engine._pool, 0, 8, lambda: next(ticks)
    )
    found = result(measuring)
    # Runs take 1, 2, 3 s, ..., in turn: 1 x 64 tokens, 4 x 16, 8 x 16.
    assert found == {1: 1 / 64, 4: 2 / 64, 8: 3 / 128}
    assert {ran for ran, _ in harness.runner.calls} == {role}


def test_nothing_is_known_before_it_is_measured(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "POSITIONS", 64)
    throughput = ThroughputProfile()
    assert (throughput.pace("scan"), throughput.pace("advance"), throughput.warm_up(1.0)) == ({}, {}, None)
    for _ in throughput.measure(harness.runner, harness.engine._pool, harness.manifest, 4):
        assert throughput.warm_up(1.0) is None
    assert set(throughput.pace("scan")) == set(throughput.pace("advance")) == {1, 4}
    assert throughput.warm_up(1.0) is not None
