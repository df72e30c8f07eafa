"""Tests the first-come queue of `benchmarks.storm` and the summary of a round."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.storm import FirstCome, Round, summary, timeline
from wane.models.manifest import Role
from wane.service.batching.batch import Work
from wane.service.batching.scheduler import COLUMNS
from wane.service.batching.ticket import Ticket, WorkItem


async def test_a_batch_has_the_oldest_item_and_others_of_its_role() -> None:
    queue = FirstCome(max_batch_size=2)
    roles: tuple[Role, ...] = ("window", "step", "window", "window")
    items = [WorkItem(Work(role, np.ones(1, np.int64)), Ticket()) for role in roles]
    window, step, second, third = items
    for one in items:
        queue.put(one)
    assert queue.take(lambda _: True) == [window, second]
    assert [queue.take(lambda _: True) for _ in range(3)] == [[step], [third], []]


async def test_the_steps_in_columns_are_a_separate_batch() -> None:
    queue = FirstCome(max_batch_size=4)
    first, second = (WorkItem(Work("step", np.ones(1, np.int64)), Ticket()) for _ in range(2))
    columns = WorkItem(COLUMNS, Ticket())
    for one in (first, columns, second):
        queue.put(one)
    assert queue.take(lambda _: True) == [first, second]
    queue.put(first)
    assert [queue.take(lambda _: True) for _ in range(3)] == [[columns], [first], []]


def test_a_timeline_has_the_median_and_maximum_latency_of_every_slice_with_steps() -> None:
    found = timeline(Round([-0.01, 0.001, 0.02, 0.024, 0.06], [1.0, 4.0, 2.0, 9.0, 5.0], 0.07))
    assert found == {
        "at_s": [-0.0125, 0.0125, 0.0625],
        "p50_ms": [1.0, 4.0, 5.0],
        "max_ms": [1.0, 9.0, 5.0],
        "storm_s": 0.07,
    }


def test_a_summary_counts_the_steps_that_are_due_during_the_storm() -> None:
    rounds = [Round([-0.1, 0.0, 0.05, 0.2], [50.0, 1.0, 3.0, 70.0], 0.1), Round([0.0, 0.01], [2.0, 4.0], 0.3)]
    found = summary(rounds)
    assert (found["rounds"], found["steps"]) == (2, 4)
    assert found["p50_ms"] == pytest.approx({"median": 2.5, "least": 2.0, "most": 3.0})
    assert found["max_ms"] == pytest.approx({"median": 3.5, "least": 3.0, "most": 4.0})
    assert found["storm_s"] == pytest.approx({"median": 0.2, "least": 0.1, "most": 0.3})
