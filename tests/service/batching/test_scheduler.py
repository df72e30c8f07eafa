from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from wane.models.manifest import Role
from wane.service.batching.batch import Work
from wane.service.batching.cost_model import CostModel
from wane.service.batching.scheduler import ALONE_S, COLUMNS, SLICE_S, FairScheduler


@dataclass(eq=False)
class Waiting:
    work: Work
    left: bool = field(default=False)


class TenthOfASlice(CostModel):
    """A cost model in which a run of ten tokens takes a tenth of ALONE_S, the longest run time of a batch of sequences
    if no step has arrived."""

    def __init__(self) -> None:
        super().__init__(512)

    def run(self, role: Role, tokens: int) -> float:
        return ALONE_S * tokens / 100


def waiting(role: Role, tokens: int = 1, *, chunk: bool = False) -> Waiting:
    return Waiting(Work(role, np.zeros(tokens, np.int64), chunk=chunk))


def stays(item: Waiting) -> bool:
    return not item.left


def make(items: Sequence[Waiting] = (), cost_model: CostModel | None = None) -> FairScheduler[Waiting]:
    queue = FairScheduler[Waiting](8, cost_model)
    for item in items:
        queue.put(item)
    return queue


def taken(queue: FairScheduler[Waiting], step_s: float = SLICE_S, window_s: float = SLICE_S) -> tuple[Role, int]:
    """Takes the next batch from the queue, and reports `step_s` or `window_s` to the queue as the batch's run time.
    Returns the role and the size of the batch."""
    items = queue.take(stays)
    assert items and len({item.work.role for item in items}) == 1
    role = items[0].work.role
    queue.ran(role, step_s if role == "step" else window_s)
    return role, len(items)


def test_each_queue_is_first_in_first_out_and_an_empty_scheduler_has_no_batch() -> None:
    items = [waiting("step") for _ in range(10)]
    queue = make(items)
    assert [queue.take(stays), queue.take(stays), queue.take(stays)] == [items[:8], items[8:], []]


def test_steps_run_before_older_sequences() -> None:
    queue = make([*(waiting("window", 10) for _ in range(3)), waiting("step")])
    assert [taken(queue), taken(queue)] == [("step", 1), ("window", 3)]


def test_steps_and_sequences_share_the_runner_equally() -> None:
    windows, steps = [waiting("window", 10) for _ in range(400)], [waiting("step") for _ in range(800)]
    queue, spent_s = make([*windows, *steps], TenthOfASlice()), {"step": 0.0, "window": 0.0}
    for _ in range(60):
        role, _ = taken(queue, step_s=SLICE_S / 5)
        spent_s[role] += SLICE_S / 5 if role == "step" else SLICE_S
        assert abs(spent_s["step"] - spent_s["window"]) <= SLICE_S + SLICE_S / 5
    assert min(spent_s.values()) > 5 * SLICE_S


def test_at_most_one_slice_runs_between_two_batches_of_steps() -> None:
    queue = make([waiting("window", 10) for _ in range(100)], TenthOfASlice())
    roles: list[Role] = []
    for _ in range(20):  # queues a step after every batch
        roles.append(taken(queue, step_s=SLICE_S / 5)[0])
        queue.put(waiting("step"))
    assert "window window" not in " ".join(roles)


@pytest.mark.parametrize("role", ["step", "window"])
def test_a_queue_that_was_empty_gets_no_extra_share(role: Role) -> None:
    other: Role = "window" if role == "step" else "step"
    queue = make([waiting(other) for _ in range(8 * 9)])
    for _ in range(8):
        assert taken(queue, 100 * SLICE_S)[0] == other
    queue.put(waiting("step"))
    queue.put(waiting("window"))
    assert taken(queue)[0] == "step"
    assert taken(queue)[0] == "window"


def test_a_batch_of_sequences_takes_at_most_a_slice() -> None:
    queue = make([waiting("window", 20) for _ in range(12)], TenthOfASlice())
    assert [taken(queue) for _ in range(3)] == [("window", 5), ("window", 5), ("window", 2)]


def test_a_slice_is_shorter_after_a_step() -> None:
    queue = make([waiting("window", 20) for _ in range(16)], TenthOfASlice())
    assert taken(queue) == ("window", 5)
    queue.put(waiting("step"))
    assert [taken(queue) for _ in range(4)] == [("step", 1), ("window", 3), ("window", 5), ("window", 3)]


def test_the_longest_sequence_limits_its_batch() -> None:
    queue = make([waiting("advance", tokens) for tokens in (10, 20, 40, 30, 10)], TenthOfASlice())
    assert [[item.work.length for item in queue.take(stays)] for _ in range(3)] == [[10, 20, 30], [40, 10], []]


def test_a_sequence_longer_than_a_slice_runs_alone() -> None:
    queue = make([waiting("window", 1000), waiting("window", 1000)], TenthOfASlice())
    assert [taken(queue), taken(queue)] == [("window", 1), ("window", 1)]


def test_the_scheduler_does_not_split_batches_of_chunks_and_scans() -> None:
    chunks = [waiting("advance", 90, chunk=True) for _ in range(8)]
    scans = [waiting("scan", 90) for _ in range(8)]
    queue = make([*chunks, waiting("advance", 90), *scans], TenthOfASlice())
    assert [taken(queue), taken(queue), taken(queue)] == [("advance", 8), ("advance", 1), ("scan", 8)]


def test_a_cancelled_item_is_dropped_and_the_other_queue_runs() -> None:
    abandoned = Waiting(Work("step", np.zeros(1, np.int64)), left=True)
    queue = make([abandoned, waiting("window")])
    assert taken(queue) == ("window", 1)
    assert len(queue) == 0


def test_the_two_queues_are_counted_separately_and_cleared_together() -> None:
    items = [waiting("step"), waiting("head"), waiting("window")]
    queue = make(items)
    assert (queue.before("step"), queue.before("scan"), len(queue)) == (2, 1, 3)
    assert queue.clear() == items
    assert len(queue) == 0


def test_the_item_of_the_steps_in_columns_is_a_batch_of_its_own() -> None:
    before, columns, after = waiting("step"), Waiting(COLUMNS), waiting("step")
    queue = make([before, columns, after])
    assert [queue.take(stays), queue.take(stays), queue.take(stays)] == [[before, after], [columns], []]
    queue = make([columns, before, after])
    assert [queue.take(stays), queue.take(stays), queue.take(stays)] == [[columns], [before, after], []]
