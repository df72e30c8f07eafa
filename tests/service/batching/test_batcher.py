from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from tests.service.engine_harness import HIDDEN, TIMEOUT_S, Clock, FakeRunner, byte_vocabulary, make_manifest
from wane.models.manifest import Role
from wane.service.batching import batcher
from wane.service.batching.batch import Row, Work, fits
from wane.service.batching.batcher import ALONE, EMA_ALPHA, Batcher
from wane.service.batching.cost_model import RunTimeModel
from wane.service.batching.ticket import Ticket
from wane.service.errors import DeadlineExceeded, Overloaded, Unavailable, WaneError
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import CURRENT, Traced
from wane.service.runners.runner import Array
from wane.service.state.pool import RESERVED, StatePool

VOCABULARY = byte_vocabulary()


class ThreadedRunner(FakeRunner):
    """A fake runner that records in `inline` whether each run was on the event loop's thread."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__(vocabulary_size)
        self.inline: list[bool] = []

    def run(self, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self.inline.append(threading.current_thread() is threading.main_thread())
        return super().run(role, feeds)


class Rig:
    def __init__(self, max_batch_size: int = 8, max_queue: int = 16, inline_s: float = 0.0) -> None:
        self.runner = ThreadedRunner(VOCABULARY.size)
        self.pool = StatePool(make_manifest(VOCABULARY).state, HIDDEN, 1 << 16)
        self.metrics = Metrics()
        self.batcher = Batcher(
            self.runner,
            self.pool,
            self.metrics,
            "fake",
            max_batch_size=max_batch_size,
            max_queue=max_queue,
            inline_s=inline_s,
        )
        self.tickets: list[Ticket] = []

    def ask(self, *tokens: int, deadline: float | None = None, binding: bool = False) -> asyncio.Task[Row]:
        """Submits work for the graph "window" with these tokens."""
        self.tickets.append(Ticket(deadline))
        work = Work("window", np.array(tokens, np.int64), binding=binding)
        return asyncio.ensure_future(self.batcher.submit(work, self.tickets[-1]))

    def step(self, token: int) -> asyncio.Task[Row]:
        """Submits work for the graph "step" with this token and the zero state."""
        return asyncio.ensure_future(self.batcher.submit(Work("step", np.array([token])), Ticket()))

    async def hold(self) -> asyncio.Task[Row]:
        """Submits a request. The runner is busy with this request until the test sets the runner's `gate`."""
        self.runner.gate.clear()
        first = self.ask(1)
        await self.runner.until_busy()
        return first

    def sizes(self) -> list[int]:
        return [len(rows) for _, rows in self.runner.calls]

    def skipped(self, reason: str) -> float | None:
        return self.metrics.registry.get_sample_value("wane_queue_dropped_total", {"model": "fake", "reason": reason})

    def waited_s(self) -> dict[Role, float | None]:
        """Returns the total queue time of each role in seconds."""
        sample = self.metrics.registry.get_sample_value
        return {
            role: sample("wane_queue_wait_seconds_total", {"model": "fake", "role": role})
            for role in ("window", "step")
        }


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.runner.gate.set()
    await rig.batcher.close()
    rig.pool.check_integrity()
    assert rig.pool.used_bytes == 0


async def turn() -> None:
    """Runs all ready tasks until each waits again."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_requests_of_one_turn_of_the_event_loop_share_a_batch(rig: Rig) -> None:
    await asyncio.gather(*(rig.ask(token) for token in range(2, 7)))
    assert rig.sizes() == [5]


async def test_an_item_in_a_batch_has_the_same_row_as_alone(rig: Rig) -> None:
    questions = [(2,), (3, 4), (5,), (6, 7)]
    rows = await asyncio.gather(*(rig.ask(*tokens) for tokens in questions))
    assert rig.sizes() == [4]
    for tokens, row in zip(questions, rows, strict=True):
        assert row.logits is not None
        assert row.logits.tolist() == rig.runner.logits(tokens).tolist()


async def test_a_batch_has_at_most_max_batch_items_oldest_first(rig: Rig) -> None:
    first = await rig.hold()
    others = [rig.ask(token) for token in range(2, 13)]
    await turn()
    rig.runner.gate.set()
    await asyncio.gather(first, *others)
    assert rig.sizes() == [1, 8, 3]
    assert rig.runner.calls[1][1] == [[token] for token in range(2, 10)]


async def test_a_full_queue_refuses_without_running(rig: Rig) -> None:
    first = await rig.hold()
    waiting = [rig.ask(token) for token in range(2, 18)]
    await turn()
    with pytest.raises(Overloaded, match="the queue is full: 16 requests are waiting") as caught:
        await rig.ask(99)
    assert caught.value.retry_after_s > 0
    rig.runner.gate.set()
    await asyncio.gather(first, *waiting)
    assert all([99] not in rows for _, rows in rig.runner.calls)


async def test_a_sequence_that_cannot_run_before_its_deadline_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(batcher, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))  # a run takes 1 s
    await rig.ask(1)
    each_s = EMA_ALPHA * 1.0
    now = asyncio.get_running_loop().time()
    first = await rig.hold()
    in_time, too_late = now + 9 * each_s + 3600, now + 3600
    waiting = [rig.ask(token, deadline=now + TIMEOUT_S) for token in range(2, 10)]  # a full batch
    await turn()
    rig.batcher.sequence_s *= 3600
    with pytest.raises(Overloaded, match=r"the 8 queued requests take about 3600\.0 s; .* is in 3") as caught:
        await rig.ask(98, deadline=too_late - 60)
    assert 59 < caught.value.retry_after_s < 62
    waiting += [rig.ask(97, deadline=in_time), rig.ask(96), rig.ask(95, deadline=now - 1)]
    await turn()
    step = rig.step(2)
    rig.runner.gate.set()
    with pytest.raises(DeadlineExceeded):
        await waiting.pop()
    await asyncio.gather(first, step, *waiting)
    assert all([98] not in rows for _, rows in rig.runner.calls)


async def test_a_queue_full_of_sequences_refuses_no_steps(rig: Rig) -> None:
    first = await rig.hold()
    waiting = [rig.ask(token) for token in range(2, 18)]
    await turn()
    step = rig.step(2)
    await turn()
    assert not step.done()
    rig.runner.gate.set()
    await asyncio.gather(first, step, *waiting)
    assert rig.runner.roles()[:3] == ["window", "step", "window"]


async def test_a_batch_grows_until_the_running_batch_ends(rig: Rig) -> None:
    first = await rig.hold()
    some = [rig.ask(token) for token in range(2, 6)]
    await turn()
    more = [rig.ask(token) for token in range(6, 9)]
    await turn()
    rig.runner.gate.set()
    await asyncio.gather(first, *some, *more)
    assert rig.sizes() == [1, 7]


async def test_a_step_runs_before_a_full_batch_of_older_sequences(rig: Rig) -> None:
    first = await rig.hold()
    others = [rig.ask(token) for token in range(2, 13)]
    await turn()
    step = rig.step(2)
    await turn()
    rig.runner.gate.set()
    await asyncio.gather(first, step, *others)
    assert rig.runner.roles() == ["window", "step", "window", "window"]
    assert rig.sizes() == [1, 1, 8, 3]
    assert rig.runner.calls[2][1] == [[token] for token in range(2, 10)]


async def test_work_queued_at_shutdown_is_not_run(rig: Rig) -> None:
    first = await rig.hold()
    others = [rig.ask(token) for token in range(2, 13)]
    await turn()
    closing = asyncio.create_task(rig.batcher.close())
    await turn()
    rig.runner.gate.set()
    await closing
    await first
    for refused in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(refused, Unavailable)
    assert rig.sizes() == [1]


async def test_items_that_are_cancelled_during_a_run_are_not_in_the_next_batch(rig: Rig) -> None:
    first = await rig.hold()
    others = [rig.ask(token) for token in range(2, 10)]
    await turn()
    for left in others[:7]:
        left.cancel()
    await turn()
    rig.runner.gate.set()
    await asyncio.gather(first, others[7])
    assert rig.runner.calls[1][1] == [[9]]
    assert rig.skipped("abandoned") == 7


async def test_committing_work_in_the_queue_has_not_entered_a_batch(rig: Rig) -> None:
    first = await rig.hold()
    others = [rig.ask(token, binding=True) for token in range(2, 10)]
    await turn()
    step = rig.step(2)
    await turn()
    entered = [ticket.entered for ticket in rig.tickets[1:]]
    rig.runner.gate.set()
    await asyncio.gather(first, step, *others)
    assert entered == [False] * 8


async def test_a_full_queue_accepts_more_work_of_an_admitted_request(rig: Rig) -> None:
    first = await rig.hold()
    waiting = [rig.ask(token) for token in range(2, 18)]
    await turn()
    ticket = rig.tickets[0]
    assert ticket.admitted
    more = asyncio.ensure_future(rig.batcher.submit(Work("window", np.array([50])), ticket))
    await turn()
    assert not more.done()
    rig.runner.gate.set()
    await asyncio.gather(first, more, *waiting)


async def test_a_cancelled_item_is_skipped_and_counted(rig: Rig) -> None:
    first = await rig.hold()
    left, stays = rig.ask(2), rig.ask(3)
    await turn()
    left.cancel()
    await turn()
    rig.runner.gate.set()
    await asyncio.gather(first, stays)
    assert left.cancelled()
    assert [[2]] not in [rows for _, rows in rig.runner.calls]
    assert rig.runner.calls[1][1] == [[3]]
    assert rig.skipped("abandoned") == 1


async def test_an_item_whose_deadline_passed_in_the_queue_is_not_run(rig: Rig) -> None:
    first = await rig.hold()
    now = asyncio.get_running_loop().time()
    late, early = rig.ask(2, deadline=now), rig.ask(3, deadline=now + 3600)
    await turn()
    rig.runner.gate.set()
    with pytest.raises(DeadlineExceeded):
        await late
    await asyncio.gather(first, early)
    assert rig.runner.calls[1][1] == [[3]]
    assert rig.skipped("deadline") == 1


async def test_work_of_a_request_that_will_be_committed_runs_after_its_deadline(rig: Rig) -> None:
    first = await rig.hold()
    late = rig.ask(2, deadline=asyncio.get_running_loop().time())
    rig.tickets[-1].entered = True
    await turn()
    rig.runner.gate.set()
    await asyncio.gather(first, late)
    assert rig.runner.calls[1][1] == [[2]]


async def test_committing_work_marks_its_ticket_when_it_enters_a_batch(rig: Rig) -> None:
    first = await rig.hold()
    second = rig.ask(2, binding=True)
    await turn()
    assert not rig.tickets[1].entered
    rig.runner.gate.set()
    await asyncio.gather(first, second)
    assert rig.tickets[1].entered
    assert not rig.tickets[0].entered


async def test_an_invalid_item_fails_alone(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.runner.poison = 3
    rows = await asyncio.gather(*(rig.ask(token) for token in (2, 3, 4)), return_exceptions=True)
    assert isinstance(rows[0], Row)
    assert isinstance(rows[2], Row)
    assert isinstance(rows[1], WaneError)
    assert rows[1].message == "the model failed to run"
    assert "a poisoned token" in caplog.text


async def test_an_item_with_a_nan_output_fails_alone(rig: Rig) -> None:
    rig.runner.hot = 3
    rows = await asyncio.gather(*(rig.ask(token) for token in (2, 3, 4)), return_exceptions=True)
    assert rig.sizes() == [3]
    assert [isinstance(row, Row) for row in rows] == [True, False, True]


async def test_a_batch_has_items_of_one_role(rig: Rig) -> None:
    first = await rig.hold()
    others = [rig.ask(2), rig.step(3), rig.ask(4), rig.step(5)]
    await turn()
    rig.runner.gate.set()
    await asyncio.gather(first, *others)
    assert rig.runner.calls[1:] == [("step", [[3], [5]]), ("window", [[2], [4]])]


async def test_sequences_of_very_different_lengths_are_not_in_one_batch(rig: Rig) -> None:
    first = await rig.hold()
    others = [rig.ask(*range(2, 42)), rig.ask(2), rig.ask(3), rig.ask(*range(3, 41))]
    await turn()
    rig.runner.gate.set()
    await asyncio.gather(first, *others)
    assert [[len(row) for row in rows] for _, rows in rig.runner.calls] == [[1], [40, 1, 38], [1]]


@pytest.mark.parametrize("role", ["window", "advance", "scan"])
def test_padding_is_at_most_half_of_a_batch(role: Role) -> None:
    assert fits(role, longest=40, total=41, items=2)
    assert not fits(role, longest=40, total=42, items=3)


def test_positions_limit_a_batch_before_max_batch() -> None:
    assert fits("scan", 256, 8 * 256, 8)
    assert not fits("scan", 256, 9 * 256, 9)
    assert fits("step", 1, 4096, 4096)


async def test_queued_work_keeps_its_slots_after_its_owner_released_them(rig: Rig) -> None:
    first = await rig.hold()
    slot = rig.pool.acquire()
    work = Work("window", np.array([2]), write=slot)
    waiting = asyncio.ensure_future(rig.batcher.submit(work, Ticket()))
    await turn()
    rig.pool.release(slot)
    waiting.cancel()
    await turn()
    assert rig.pool.used_bytes == rig.pool.slot_bytes
    rig.runner.gate.set()
    await first
    await turn()
    assert rig.pool.used_bytes == 0
    assert slot >= RESERVED


async def test_a_closed_batcher_refuses_new_work_and_fails_queued_work(rig: Rig) -> None:
    first = await rig.hold()
    queued = rig.ask(2)
    await turn()
    closing = asyncio.create_task(rig.batcher.close())
    await turn()
    with pytest.raises(Unavailable):
        await queued
    with pytest.raises(Unavailable):
        await rig.ask(3)
    rig.runner.gate.set()
    assert (await first).logits is not None
    await closing


async def test_a_ticket_splits_its_time_into_queue_and_compute(rig: Rig) -> None:
    first = await rig.hold()
    second = rig.ask(2)
    await turn()
    rig.runner.gate.set()
    await asyncio.gather(first, second)
    latency = rig.tickets[1].latency()
    assert latency.queue_ms > 0
    assert latency.compute_ms > 0
    assert latency.queue_ms + latency.compute_ms <= latency.total_ms


async def test_the_queue_time_of_run_and_skipped_items_is_counted_for_each_role(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    rig = Rig(max_batch_size=2, max_queue=4)
    assert rig.waited_s() == {"window": 0, "step": 0}
    first = await rig.hold()
    windows = [rig.ask(token) for token in range(2, 6)]
    await turn()
    with pytest.raises(Overloaded):
        await rig.ask(99)
    clock.now_s += 2
    steps = [rig.step(token) for token in range(2, 5)]
    await turn()
    for left in (windows[3], steps[2]):
        left.cancel()
    clock.now_s += 5
    rig.runner.gate.set()
    await asyncio.gather(first, *windows[:3], *steps[:2])
    await rig.batcher.close()
    assert rig.skipped("abandoned") == 2
    assert rig.waited_s() == {"window": 4 * 7, "step": 3 * 5}


async def test_fast_steps_run_on_the_event_loop() -> None:
    rig = Rig(inline_s=60.0)
    try:
        for _ in range(3):
            row = await rig.step(2)
            assert row.logits is not None
            assert row.logits.tolist() == rig.runner.logits([2]).tolist()
        # The first batch of two steps runs on the runner's thread, because the run time of such a batch is not known
        # yet.
        for _ in range(2):
            await asyncio.gather(rig.step(2), rig.step(3))
        await rig.ask(2)  # the run of a window is never on the event loop's thread, because it may take long
        await rig.ask(2)
        rig.runner.poison = 5
        with pytest.raises(WaneError):
            await rig.step(5)
        await rig.step(2)
    finally:
        await rig.batcher.close()
    assert rig.runner.inline == [False, True, True, False, True, False, False, True, True]
    assert rig.pool.used_bytes == 0


async def test_slow_steps_do_not_run_on_the_event_loop() -> None:
    rig = Rig(inline_s=1e-9)
    try:
        for _ in range(3):
            await rig.step(2)
    finally:
        await rig.batcher.close()
    assert rig.runner.inline == [False, False, False]


async def test_a_single_step_may_take_longer_on_the_event_loop_than_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(inline_s=1.0)
    monkeypatch.setattr(RunTimeModel, "expected", lambda *_: float(ALONE))
    try:
        await rig.step(2)
        await asyncio.gather(rig.step(2), rig.step(3))
        monkeypatch.setattr(RunTimeModel, "expected", lambda *_: ALONE + 1.0)
        await rig.step(2)
    finally:
        await rig.batcher.close()
    assert rig.runner.inline == [True, False, False]


async def test_steps_wait_for_a_running_window() -> None:
    rig = Rig(inline_s=60.0)
    try:
        await rig.step(2)
        first = await rig.hold()
        step = rig.step(3)
        await turn()
        assert not step.done()
        rig.runner.gate.set()
        await asyncio.gather(first, step)
    finally:
        await rig.batcher.close()
    assert rig.runner.roles() == ["step", "window", "step"]
    assert rig.runner.inline == [False, False, True]


async def test_a_window_starts_before_the_results_of_earlier_steps_are_delivered() -> None:
    rig = Rig(inline_s=60.0)
    try:
        await rig.step(2)
        idle: list[bool] = []
        step = rig.batcher.submit(Work("step", np.array([3])), Ticket())
        window = rig.batcher.submit(Work("window", np.array([2])), Ticket())
        for item in (step, window):
            item.add_done_callback(lambda _: idle.append(rig.batcher.idle))
        while len(idle) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    finally:
        await rig.batcher.close()
    assert rig.runner.roles() == ["step", "step", "window"]
    assert idle == [False, True]


async def test_the_event_loop_runs_one_batch_of_steps_in_each_turn() -> None:
    rig = Rig(max_batch_size=2, inline_s=60.0)
    try:
        await asyncio.gather(rig.step(2), rig.step(3))
        steps = [rig.step(token) for token in range(2, 8)]
        await turn()
        await asyncio.gather(*steps)
    finally:
        await rig.batcher.close()
    assert rig.sizes() == [2, 2, 2, 2]
    assert rig.runner.inline == [False, True, True, True]


def test_concurrent_work_of_a_request_belongs_to_the_trace_of_the_request() -> None:
    traced = cast(Traced, object())
    token = CURRENT.set(traced)
    ticket = Ticket()
    CURRENT.reset(token)
    other = ticket.beside()
    assert (other.traced, other.admitted) == (traced, True)
