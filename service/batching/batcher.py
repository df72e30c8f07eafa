"""Batches requests continuously: work that was queued while the runner was busy forms the next batch.

There is no batching timer. On an idle server work starts immediately. On a busy server batches grow with the queue
(`scheduler.py`), and several steps wait for more while each iteration of the event loop brings some. The queue is
bounded, and a request over the limit is rejected before any of its work runs. If an item's caller has left or its
deadline has passed when a batch is formed, the item is dropped. A dropped item has no effect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from wane.models.bundle_checks import ROLES
from wane.models.manifest import Role
from wane.service.batching import batch
from wane.service.batching.batch import ColumnBatch, Row, Work
from wane.service.batching.cost_model import CostModel, RunTimeModel
from wane.service.batching.scheduler import COLUMNS, ONE_TOKEN, FairScheduler
from wane.service.batching.ticket import Ticket, WorkItem
from wane.service.errors import DeadlineExceeded, Overloaded, Unavailable, WaneError
from wane.service.observability.metrics import COUNTED_TOGETHER, Metrics
from wane.service.observability.tracing import Traced, trace_batch
from wane.service.runners.runner import Runner
from wane.service.state.pool import StatePool

logger = logging.getLogger("wane.engine")

ALONE = 3
"""The factor of `inline_s` for a batch of one item. A batch of one means that few requests arrive. The processor is
then often idle, so the handover to the other thread and back is slow: it waits until the thread is woken up."""

EMA_ALPHA = 1 / 8
"""Weight of the latest batch of sequences in the average run time per item (`Batcher.sequence_s`)."""

IDLE_WAIT_S, IDLE_POLL_S = 0.02, 0.002
"""The longest time in seconds that `run_between` waits for an idle runner, and the interval in seconds at which it
checks the runner."""

T = TypeVar("T")


class Columns:
    """A queue of steps in columns (see `ColumnBatch`). This class is the queue of a batcher without such steps."""

    rows: Sequence[object] = ()
    """The queued steps."""

    def begin(self, most: int) -> ColumnBatch | None:
        """Returns the next batch of at most `most` steps. Returns None if no queued step can run. Calls
        `Batcher.queue_columns` if further steps are queued."""

    def hold(self, running: ColumnBatch) -> None:
        """Retains the states of a batch until it has run on the runner's thread."""

    def finish(self, ran: ColumnBatch, started_s: float, compute_s: float) -> None:
        """Answers the requests of a batch after its run. `started_s` is when the run started, by `time.perf_counter`.
        The run took `compute_s` seconds."""


class _Ran(NamedTuple):
    """A batch after its run. `items_run`: the number of items that ran. `started_s` is when the run started, by
    `time.perf_counter`."""

    role: Role
    items_run: int
    items: Sequence[WorkItem]
    rows: Sequence[Row | Exception]
    started_s: float
    seconds: float
    columns: ColumnBatch | None = None


class Batcher:
    """Feeds one runner from a queue. Runs batches on a separate thread, and short batches on the event loop's thread.

    All methods must be called on the event loop's thread.
    """

    def __init__(
        self,
        runner: Runner,
        pool: StatePool,
        metrics: Metrics,
        model: str,
        *,
        max_batch_size: int,
        max_queue: int,
        cost_model: CostModel | None = None,
        inline_s: float = 0.0,
    ) -> None:
        """`max_queue`: the limit of items in each of the scheduler's two queues. `cost_model` learns from the time of
        every run. `inline_s`: a batch of steps or heads runs on the event loop's thread if its expected run time in
        seconds is at most this, or at most ALONE times this for a single item. For such a batch the handover to the
        other thread costs more than the run."""
        self._runner = runner
        self._pool = pool
        self._max_batch = max_batch_size
        self.max_queue = max_queue
        self._cost_model = cost_model
        self._inline_s = inline_s
        self._times = RunTimeModel()
        self._queue = FairScheduler[WorkItem](max_batch_size, cost_model)
        self.sequence_s = 0.0  # average run time per item of the latest batches of sequences
        self._starting = False
        self._running = False  # whether a batch is on the runner's thread
        self._gathered = 0  # the number of steps in columns when `_start` was called last, if it waits for more
        self._now = 0.0  # the event loop's clock when the latest batch was taken
        self._closed = False
        self.columns = Columns()
        # the item that stands in the queue for all steps in columns; it is made in the event loop, like every future
        self._columns_item: WorkItem | None = None
        self._columns_queued = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"runner-{model}")
        self._room = pool.memory.room(max_batch_size)
        self._items, self._padding, self._seconds = (
            {role: histogram.labels(model, role) for role in ROLES}
            for histogram in (metrics.batch_items, metrics.batch_padding_share, metrics.batch_seconds)
        )
        self._waited = {role: metrics.queue_wait_seconds.labels(model, role) for role in ROLES}
        # the size, the share of padding, the run time and the total queue time of batches that are not counted yet
        self._ran: defaultdict[Role, list[tuple[int, float, float, float]]] = defaultdict(list)
        self._late_counts = metrics.late.counts
        self._late_counts.append(self._count)
        self._abandoned = metrics.queue_dropped.labels(model, "abandoned")
        self._late = metrics.queue_dropped.labels(model, "deadline")
        self._refused = metrics.queue_rejected.labels(model)
        self._failed = metrics.queue_failed.labels(model)
        self._model = model

    @property
    def waiting(self) -> int:
        """The number of items that wait for the runner."""
        return len(self._queue) + self._in_columns

    @property
    def _in_columns(self) -> int:
        """The number of queued steps in columns that the scheduler's queue does not count: one item in it stands for
        all of them."""
        return len(self.columns.rows) - self._columns_queued

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing is queued."""
        return not self._running and not self._starting

    def submit(self, work: Work, ticket: Ticket) -> WorkItem:
        """Queues work and returns its item. Awaiting the item returns the item's row of the outputs. The item's state
        slots are retained until it has run or is dropped.

        Cancelling the wait before the work enters a batch withdraws the work. The wait raises DeadlineExceeded if the
        deadline passes in the queue, Unavailable after `close`, and WaneError if the run failed. `submit` raises
        Overloaded if the queue is full or the deadline cannot be met, and Unavailable after `close`.
        """
        if self._closed:
            raise Unavailable("the server is stopping")
        if not ticket.admitted:
            waiting = self._waiting(work.role)
            if waiting >= self.max_queue:
                self._refused.inc()
                raise Overloaded(f"the queue is full: {waiting} requests are waiting")
            if waiting >= self._max_batch and work.role not in ONE_TOKEN and ticket.deadline is not None:
                self._check_turn(waiting, ticket.deadline)
            ticket.admitted = True
        item = WorkItem(work, ticket)
        item.queued_s = time.perf_counter()
        self._pool.retain(work.read)
        if work.write is not None:
            self._pool.retain(work.write)
        self._put(item)
        return item

    async def submit_all(self, works: Sequence[Work], ticket: Ticket) -> list[Row]:
        """Runs work of one request concurrently, and returns the rows. Only the first item uses `ticket`, so the
        request is admitted and timed only once. Raises the errors of `submit`."""
        others = ticket.beside()
        items: list[WorkItem] = []
        try:
            for work in works:
                items.append(self.submit(work, others if items else ticket))
            return [await item for item in items]
        except BaseException:
            for item in items:
                item.cancel()
            raise

    def queue_columns(self) -> None:
        if not self._columns_queued:
            self._columns_queued = True
            if self._columns_item is None:
                self._columns_item = WorkItem(COLUMNS, Ticket())
            self._put(self._columns_item)

    def _put(self, item: WorkItem) -> None:
        self._queue.put(item)
        if not self._running:
            self._start_soon()

    def _check_turn(self, waiting: int, deadline: float) -> None:
        """Raises Overloaded if a sequence that is queued behind `waiting` items would start after `deadline`, as
        estimated from the average run time."""
        wait_s = waiting * self.sequence_s
        left_s = deadline - asyncio.get_running_loop().time()
        if 0 < left_s < wait_s:
            self._refused.inc()
            raise Overloaded(
                f"the {waiting} queued requests take about {wait_s:.1f} s; the request's deadline is in {left_s:.1f} s",
                wait_s - left_s,
            )

    async def run_between(self, call: Callable[[], T]) -> T:
        """Runs `call` on the runner's thread between two batches. Waits until the runner is idle, but at most
        `IDLE_WAIT_S`.

        Raises Unavailable after `close`, and the errors of `call`.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + IDLE_WAIT_S
        while not self.idle and loop.time() < until_s:  # noqa: ASYNC110  (an Event would add work to every batch)
            await asyncio.sleep(IDLE_POLL_S)
        if self._closed:
            raise Unavailable("the server is stopping")
        return await loop.run_in_executor(self._executor, call)

    async def close(self) -> None:
        """Rejects new work, fails queued work, and stops the runner's thread after its current batch."""
        self._closed = True
        for item in self._queue.clear():
            if item is not self._columns_item:
                self._drop(item, Unavailable("the server is stopping"))
        await asyncio.to_thread(self._executor.shutdown)
        self._count()
        if self._count in self._late_counts:
            self._late_counts.remove(self._count)

    def _waiting(self, role: Role) -> int:
        """See `FairScheduler.before`. Counts the steps in columns, too."""
        return self._queue.before(role) + (self._in_columns if role in ONE_TOKEN else 0)

    def _start(self) -> None:
        """Starts the next batch, if work is queued. Of several steps in columns, waits for more while each iteration of
        the event loop brings some. After a batch has run on the event loop's thread, a batch of the other queue may be
        handed over before the results are delivered."""
        waiting = len(self.columns.rows)
        if max(self._gathered, 1) < waiting < self._max_batch:
            self._gathered, self._starting = waiting, True
            asyncio.get_running_loop().call_soon(self._start)
            return
        self._gathered, self._starting = 0, False
        ran: _Ran | None = None
        queue = self._queue
        while not self._running:
            self._now = asyncio.get_running_loop().time()
            items = queue.take(self._runs)
            if not items:  # nothing is queued, or the callers of all items have left
                break
            columns: ColumnBatch | None = None
            if items[0] is self._columns_item:
                self._columns_queued = False
                columns = self.columns.begin(self._max_batch)
                if columns is None:
                    continue
            else:
                for item in items:
                    item.ticket.entered |= item.work.binding
            if not self._quick(items[0].work.role, len(items if columns is None else columns.tokens)):
                self._hand_over(items, columns)
                continue
            ran = self._run(items, columns)
            self._times.took(ran.role, ran.items_run, ran.seconds, on_loop=True)
            queue.ran(ran.role, ran.seconds)
            if not len(queue):
                break
            # the results are delivered before the queued items run, because these may run on this thread too
            if queue.before(ran.role):
                self._start_soon()
                break
        if ran is not None:
            self._hand_out(ran)

    def _start_soon(self) -> None:
        """Schedules `_start` for the event loop's next iteration, so that all work submitted in this iteration shares a
        batch."""
        if not self._starting:
            self._starting = True
            asyncio.get_running_loop().call_soon(self._start)

    def _quick(self, role: Role, count: int) -> bool:
        """Returns whether a batch should run on the event loop's thread."""
        limit_s = self._inline_s * ALONE if count == 1 else self._inline_s
        return role in ONE_TOKEN and self._times.expected(role, count) <= limit_s

    def _hand_over(self, items: list[WorkItem], columns: ColumnBatch | None) -> None:
        self._running = True
        if columns is not None:
            self.columns.hold(columns)
        loop = asyncio.get_running_loop()
        self._executor.submit(lambda: loop.call_soon_threadsafe(self._finish, self._run(items, columns)))

    def _run(self, items: list[WorkItem], columns: ColumnBatch | None) -> _Ran:
        started_s = time.perf_counter()
        if columns is not None:
            batch.run_columns(columns, self._pool, self._runner, self._room)
            return _Ran("step", len(columns.tokens), (), (), started_s, time.perf_counter() - started_s, columns)
        rows = batch.run([item.work for item in items], self._pool, self._runner, self._room)
        return _Ran(items[0].work.role, len(items), items, rows, started_s, time.perf_counter() - started_s)

    def _runs(self, item: WorkItem) -> bool:
        """Returns whether an item should run. Counts, traces and drops the item if its caller has left or its deadline
        has passed."""
        deadline = item.ticket.deadline
        late = deadline is not None and deadline <= self._now
        entered = item.ticket.entered
        # The client disconnected or the deadline has passed. The task of an abandoned ticket is cancelled in a later
        # callback.
        has_left = item.done() or (item.ticket.abandoned and not entered)
        if not has_left and (entered or not late):
            return True
        (self._late if late else self._abandoned).inc()
        skipped_s = time.perf_counter()
        self._waited[item.work.role].inc(skipped_s - item.queued_s)
        if item.ticket.traced is not None:
            item.ticket.traced.skipped(item.queued_s, skipped_s, "deadline" if late else "abandoned")
        self._drop(item, None if has_left else DeadlineExceeded("the deadline passed while the request was queued"))
        return False

    def _finish(self, ran: _Ran) -> None:
        """Starts the next batch, then delivers the results of a batch that ran on the runner's thread."""
        self._queue.ran(ran.role, ran.seconds)
        if ran.role in ONE_TOKEN:
            self._times.took(ran.role, ran.items_run, ran.seconds, on_loop=False)
        self._running = False
        self._start()
        self._hand_out(ran)

    def _hand_out(self, ran: _Ran) -> None:
        """Delivers the results of a batch to its items, and releases their slots."""
        role, count, items, rows, started_s, compute_s, columns = ran
        if columns is not None:
            self._observe(role, count, count, 1, columns.waited_s(started_s), compute_s)
            traced = columns.traced
            self.columns.finish(columns, started_s, compute_s)
            if traced:
                self._trace(traced, ran, columns.failed)
            return
        lengths = [item.work.length for item in items]
        waited_s = sum([started_s - item.queued_s for item in items])
        self._observe(role, count, sum(lengths), max(lengths), waited_s, compute_s)
        if role not in ONE_TOKEN:
            self.sequence_s += EMA_ALPHA * (compute_s / count - self.sequence_s)
        self._pool.release_all([item.work.read for item in items])
        self._pool.release_all([item.work.write for item in items if item.work.write is not None])
        for item, row in zip(items, rows, strict=True):
            ticket = item.ticket
            ticket.queue_s += started_s - item.queued_s
            ticket.compute_s += compute_s
            ticket.batch_items = max(ticket.batch_items, count)
            if isinstance(row, Row):
                if not item.done():
                    item.set_result(row)
            else:
                self._failed.inc()
                logger.error("a run of the graph %s failed", role, exc_info=row)
                failure = WaneError("the model failed to run")
                failure.__cause__ = row
                item.fail(failure)
        traced = {item.ticket.traced: item.queued_s for item in reversed(items) if item.ticket.traced is not None}
        if traced:
            self._trace(traced, ran, sum(isinstance(row, Exception) for row in rows))

    def _trace(self, traced: Mapping[Traced, float], ran: _Ran, failed: int) -> None:
        """Creates the spans of a batch. `failed`: the number of items that failed."""
        ended_s, device = ran.started_s + ran.seconds, self._runner.device
        trace_batch(traced, self._model, ran.role, device, ran.items_run, failed, ran.started_s, ended_s)

    def _observe(self, role: Role, items: int, tokens: int, longest: int, waited_s: float, compute_s: float) -> None:
        """Records a batch in the metrics and the cost model. `tokens`: the total length of its items, without padding.
        `longest`: the length of the longest. `waited_s`: the total queue time of its items."""
        self._ran[role].append((items, 1 - tokens / (longest * items), compute_s, waited_s))
        if len(self._ran[role]) >= COUNTED_TOGETHER:
            self._count()
        if self._cost_model is not None:
            self._cost_model.observe(role, items, tokens, compute_s)

    def _count(self) -> None:
        """Adds the batches that are not counted yet to the metrics (see `Late`)."""
        for role, ran in self._ran.items():
            items, padding, seconds, waited_s = zip(*ran, strict=True)
            self._items[role].observe_all(items)
            self._padding[role].observe_all(padding)
            self._seconds[role].observe_all(seconds)
            self._waited[role].inc(sum(waited_s))
        self._ran.clear()

    def _drop(self, item: WorkItem, error: WaneError | None) -> None:
        """Releases the slots of an item that will not run. Fails the item with `error` unless that is None."""
        self._pool.release(item.work.read)
        if item.work.write is not None:
            self._pool.release(item.work.write)
        if error is not None:
            # deferred, because the item's callback may queue more work while this class iterates over the queue
            asyncio.get_running_loop().call_soon(item.fail, error)
