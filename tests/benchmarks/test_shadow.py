from __future__ import annotations

import pytest

from benchmarks.shadow import OfRate, Round
from benchmarks.summary import Spread


def figures(p99_ms: float, shadow_cpu_s: float = 0.0, requests: int = 1000) -> Round:
    return Round(requests, 1.0, p99_ms, 9.0, 1.0, shadow_cpu_s, compared=90, dropped=10)


def test_latencies_are_compared_with_those_of_the_same_round_without_shadows() -> None:
    found = OfRate.of([figures(3), figures(5)], [figures(2), figures(3)])
    assert (found.p99_ms, found.p99_over_none_ms) == (Spread.of([3, 5]), Spread.of([1, 2]))
    assert (found.requests, found.compared, found.dropped) == (2000, 180, 20)


def test_cpu_time_is_given_for_a_thousand_live_answers() -> None:
    assert OfRate.of([figures(1, 0.25, requests=500)], None).shadow_cpu_s_per_1000.median == pytest.approx(0.5)
