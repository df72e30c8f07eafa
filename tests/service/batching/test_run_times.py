"""What batches of one token each are expected to take."""

from __future__ import annotations

import math

import pytest

from wane.service.batching.cost_model import RUN_EMA_ALPHA, RunTimeModel


def test_of_a_size_that_was_never_run_nothing_is_known() -> None:
    times = RunTimeModel()
    times.took("step", 1, 0.001, here=True)
    assert times.expected("step", 2) == math.inf
    assert times.expected("head", 1) == math.inf


@pytest.mark.parametrize(("items", "like"), [(1, 1), (3, 4), (33, 64), (64, 64)])
def test_a_batch_counts_as_one_of_the_next_power_of_two(items: int, like: int) -> None:
    times = RunTimeModel()
    times.took("step", like, 0.001, here=True)
    assert times.expected("step", items) == 0.001
    assert times.expected("step", like + 1) == math.inf


def test_runs_of_the_event_loop_are_averaged() -> None:
    times = RunTimeModel()
    times.took("step", 8, 0.001, here=True)
    times.took("step", 8, 0.009, here=True)
    assert times.expected("step", 8) == pytest.approx(0.001 + RUN_EMA_ALPHA * 0.008)


def test_of_runs_on_the_other_thread_which_may_have_waited_the_quickest_counts() -> None:
    times = RunTimeModel()
    for seconds in (0.004, 0.002, 0.009):
        times.took("step", 8, seconds, here=False)
    assert times.expected("step", 8) == 0.002
