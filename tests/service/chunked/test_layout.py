from __future__ import annotations

import pytest

from wane.service.chunked.layout import FEWEST_STEPS, FEWEST_TOKENS, RUN_SECONDS, SEGMENT_TOKENS, lay_out

FLAT = {1: 1e-5, 8: 1e-5, 64: 1e-5}
STEEP = {1: 1e-5, 8: 2e-6, 64: 1e-6}


@pytest.mark.parametrize("tokens", [128, 1000, 4096, 65_536, 100_000])
@pytest.mark.parametrize("warm_up", [1, 16, 64, 300])
def test_a_layout_covers_the_segment_and_leaves_room_to_warm_up(tokens: int, warm_up: int) -> None:
    found = lay_out(tokens, warm_up, "scan", STEEP, STEEP)
    segment = min(tokens, SEGMENT_TOKENS)
    if found is None:
        assert segment < 8 * max(2 * warm_up, FEWEST_TOKENS)
        return
    assert found.length >= max(2 * warm_up, FEWEST_TOKENS)
    assert (found.chunks - 1) * found.length < segment <= found.chunks * found.length
    assert found.chunks > 1


def test_where_a_token_costs_the_same_side_by_side_it_is_run_in_order() -> None:
    assert lay_out(65_536, 16, "scan", FLAT, FLAT) is None


def test_what_warming_up_costs_is_counted() -> None:
    wide = lay_out(4096, 30, "scan", STEEP, STEEP)
    assert wide is not None and wide.chunks == 64
    narrow = lay_out(4096, 30, "scan", STEEP, {**STEEP, 64: 1e-4})
    assert narrow is not None and narrow.chunks == 8
    assert lay_out(4096, 30, "scan", STEEP, dict.fromkeys(STEEP, 0.001)) is None


def test_without_a_pace_everything_is_run_in_order() -> None:
    assert lay_out(65_536, 16, "scan", {}, {}) is None
    assert lay_out(65_536, 16, "scan", STEEP, {}) is None


def test_a_run_takes_no_longer_than_others_may_wait() -> None:
    quick = lay_out(65_536, 64, "scan", STEEP, STEEP)
    assert quick is not None and quick.steps * quick.chunks <= 4096
    slow = {width: 20 * pace for width, pace in STEEP.items()}
    steps = lay_out(65_536, 64, "scan", slow, slow)
    assert steps is not None and steps.chunks == 64
    assert steps.steps * steps.chunks * slow[64] <= RUN_SECONDS < 2 * steps.steps * steps.chunks * slow[64]
    crawling = {width: 1e4 * pace for width, pace in STEEP.items()}
    fewest = lay_out(65_536, 64, "scan", crawling, crawling)
    assert fewest is not None and fewest.steps == FEWEST_STEPS
