"""Runs steps of one token in rows: the data of a batch of steps, from the states to the answers, is in arrays with one
row for each step.

Every step of one token is a row if its session's state is in memory and the step answers in recurrent mode, and so is
the last token of a longer step. What a step asks (a filter, a proof, a key, a trace) and where its session is stored
change how its row is committed and answered:

- The row of a session that `ResidentSessions` buffers is committed by arrays. Its next state replaces the state.
- The row of any other session is committed by `Store.append_many`. Its next state is in a slot of its own until then.
- A row that asks nothing is answered with the others of its batch, by arrays. Any other row is answered by
  `AnswerBuilder`.

A row is passed to the general procedure (`step.py`) if it is a replay or a conflict, or if its state has been evicted.
If the run of a batch fails, each of its rows runs again alone. A step that has entered a batch is committed, even if
its client has disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wane.service.batching.batch import ColumnBatch
from wane.service.batching.batcher import Batcher, Columns
from wane.service.batching.ticket import Ticket
from wane.service.deadline import TOO_LATE
from wane.service.engine import routing
from wane.service.engine.pending import STILL_COMMITS, Pending
from wane.service.engine.steps.answers import Prepared, StepAnswers, Times
from wane.service.engine.steps.rows import (
    IS_DONE,
    NO_POSITION,
    Conflict,
    StepBatch,
    StepRow,
)
from wane.service.errors import DeadlineExceeded, Overloaded, Unavailable, WaneError
from wane.service.observability.metrics import Metrics
from wane.service.sessions.sessions import Sessions
from wane.service.sessions.stores.store import Appended, Commit, SessionRecord
from wane.service.state.pool import ZERO
from wane.service.types.answer import Answer
from wane.service.types.common import Mode
from wane.service.types.request import MAX_POSITION, StepRequest

logger = logging.getLogger("wane.engine")

SESSION = attrgetter("session")
MIXED_AT_ONCE = 1 << 16
"""The caches of one batch add probabilities to at most so many tokens, unless it has one row. Mixing them takes at most
about 10 ms of the event loop."""
FILTERED_AT_ONCE = 1 << 13
"""The filters of one batch have at most so many tokens, unless it has one row. Applying them takes about 5 ms of the
event loop."""
NOT_COMMITTED = "the step could not be committed or answered"

StepProcedure = Callable[[StepRequest, Ticket], Coroutine[Any, Any, Answer]]


class StepColumns(Columns):
    """Queues, runs, commits and answers one model's steps in rows.

    All methods must be called on the event loop's thread.
    """

    def __init__(
        self,
        answers: StepAnswers,
        sessions: Sessions,
        batcher: Batcher,
        metrics: Metrics,
        procedure: StepProcedure,
    ) -> None:
        """`procedure` is the general procedure: it runs any admitted step, and releases the session's lock. The
        `batcher` runs the batches."""
        builder, model = answers.builder, answers.builder.manifest.name
        self._size = builder.vocabulary.size
        self._reserved = builder.vocabulary.reserved
        self._state_cache = builder.forward.pool
        self._slots = self._state_cache.order
        self.resident = answers.resident
        self._buffered = self.resident.buffered
        self.sessions = sessions
        self._locks = sessions.locks
        self.answers = answers
        cache = builder.cache
        self._most_rows = sys.maxsize if cache is None else max(1, MIXED_AT_ONCE // cache.most_added)
        self._admission = answers.admission
        self._procedure = procedure
        self._most_predictions = answers.most_predictions
        self._batcher = batcher
        batcher.columns = self
        self._abandoned = metrics.queue_dropped.labels(model, "abandoned")
        self._conflicts = metrics.step_conflicts.labels(model)
        self._too_late = metrics.queue_dropped.labels(model, "deadline")
        self._failed = metrics.queue_failed.labels(model)
        self._refused = metrics.queue_rejected.labels(model)
        self.rows: list[StepRow] = []
        self._flushes = 0  # `ResidentSessions.flushes` when the first of the queued steps was queued
        self._held: list[StepBatch] = []  # batches that run on the runner's thread or are queued for it
        self._committing: list[StepBatch] = []  # batches that the store is committing
        self._tasks: set[asyncio.Task[None]] = set()  # their commits
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closed = False
        self._is_uneven = False  # whether a queued row may be one that runs alone, or may have a filter with tokens
        self.ran = 0
        """Number of rows committed since the start."""

    def take(self, row: StepRow) -> bool:
        """Queues a step. Returns False, without side effects, if the step needs the general procedure."""
        session, deadline = row.session, row.deadline
        if (
            not 0 <= row.token < self._size
            or row.token in self._reserved
            or not 0 < row.top_k <= self._most_predictions
            or not NO_POSITION <= row.position <= MAX_POSITION
            or len(self.rows) >= self._batcher.max_queue
            or self._admission.closed
            or not self._locks.take(session)
        ):
            return False
        slot = self._slots.get(session)
        if slot is None or not self._buffered[slot] or (row.request is not None and row.key is not None):
            slot = self._check_out(row)
            if slot is None:
                self._locks.leave(session)
                return False
        self._put(row, slot)
        self._admission.enter()
        if deadline is not None and (self._timer is None or deadline < self._timer_at):
            self._ring_at(deadline)
        return True

    def _check_out(self, row: StepRow) -> int | None:
        """Sets the commit of a step whose session is not buffered, and returns the slot of its state. Returns None if
        the session must be read from the store, if its state is not in memory, or if the step is not the session's next
        one in recurrent mode."""
        request = row.request
        record = self.sessions.look(row.session, row.expected_position, row.key)
        if record is None:
            return None
        mode = routing.of_session(None if request is None else request.mode, record.mode)
        cached = self.sessions.cached(record)
        if cached is None or mode is not Mode.RECURRENT:
            return None
        self._state_cache.retain(cached.slot)
        try:
            write = self._state_cache.acquire()
        except Overloaded:
            self._state_cache.release(cached.slot)
            return None
        self.resident.hits += record.position > 0
        row.stored = Commit(record, (row.token,), row.key, write, cached.dropped_tokens)
        row.is_plain = False
        return cached.slot

    def _put(self, row: StepRow, slot: int) -> None:
        if not self.rows:
            self._flushes = self.resident.flushes
            self._batcher.queue_columns()
        row.slot, row.queued_s = slot, time.perf_counter()
        self.rows.append(row)
        if not row.is_plain and row.filter_tokens:
            self._is_uneven = True

    async def run(
        self,
        request: StepRequest,
        commit: Commit,
        ticket: Ticket,
        token_logprobs: tuple[float | None, ...] | None,
        *,
        read: int,
        was_rebuilt: bool,
    ) -> Answer:
        """Runs the last token of a step from the state in the slot `read`, commits the step, and returns its answer.
        The caller holds the session's lock, and the slots of both states. `was_rebuilt`: see `StepRow`.

        Raises Conflict, without side effects, if another writer changed the session. Raises Overloaded if the queue is
        full, and Unavailable after `close`."""
        if self._closed:
            raise Unavailable("the server is stopping")
        if not ticket.admitted:
            if len(self.rows) >= self._batcher.max_queue:
                self._refused.inc()
                raise Overloaded(f"the queue is full: {len(self.rows)} requests are waiting")
            ticket.admitted = True
        # The row has no deadline: that of the caller's `Pending` cancels this wait.
        token = request.tokens[-1]
        row = StepRow(request.session, token, None, request.top_k, None, request, ticket.traced, request.creator)
        row.stored, row.waiting, row.token_logprobs, row.was_rebuilt = commit, ticket, token_logprobs, was_rebuilt
        self._put(row, read)
        try:
            return await row
        finally:
            del row  # the row holds an error, whose traceback holds this frame

    def begin(self, most: int) -> StepBatch | None:
        """Returns the next batch, of at most `most` rows; None if no queued step can be run."""
        most = min(most, self._most_rows)
        if self._is_uneven:
            most = self._even(most)
        waiting, self.rows = self.rows[:most], self.rows[most:]
        if not waiting:
            return None
        if self.rows:
            self._batcher.queue_columns()
        batch, flushes = StepBatch(waiting), self._flushes
        now_s = asyncio.get_running_loop().time()
        if batch.may_wait or True in map(IS_DONE, waiting) or batch.deadline <= now_s:
            batch = self._without_late(batch, now_s)
            if not len(batch.rows):
                return None
        good = self.resident.alive(batch.slots)
        if (expected := batch.expected) is not None:
            good &= (expected == NO_POSITION) | (expected == self._state_cache.positions[batch.slots])
        if self.resident.flushes != flushes:  # a flush may have been for the eviction of a queued step's state
            good &= self._resident_still(batch)
        if (stored := batch.stored) is not None:  # their sessions are locked, and their slots retained
            good |= stored
        if np.count_nonzero(good) < len(good):
            # The general procedure starts in the next iteration of the event loop. By then, the batch has run, or the
            # slots of its states are retained. If the general procedure started now, it could evict these states.
            asyncio.get_running_loop().call_soon(partial(self._hand_back, batch.part(~good), entered=False))
            batch = batch.part(good)
            if not len(batch.rows):
                return None
        if batch.may_wait:
            for row in batch.rows:
                if row.waiting is not None:
                    row.waiting.entered = True
        return batch

    def _even(self, most: int) -> int:
        """Returns the size of the next batch, of at most `most` rows, such that a row that runs alone does, and the
        filters of several rows have at most FILTERED_AT_ONCE tokens."""
        tokens = 0
        for index, row in enumerate(self.rows[:most]):
            tokens += row.filter_tokens
            if row.runs_alone or tokens > FILTERED_AT_ONCE:
                return max(index, 1)
        self._is_uneven = len(self.rows) > most
        return most

    def _without_late(self, batch: StepBatch, now_s: float) -> StepBatch:
        """Returns the batch without the steps that are abandoned or late, and withdraws those steps."""
        good = np.ones(len(batch.rows), np.bool_)
        for index, row in enumerate(batch.rows):
            deadline, ticket = row.deadline, row.waiting
            if row.runs_alone or (ticket is not None and ticket.entered):
                continue
            if ticket is not None:
                deadline = ticket.deadline
            if row.done() or _has_passed(deadline, now_s) or (ticket is not None and ticket.abandoned):
                good[index] = False
                self._drop(row)
        return batch if good.all() else batch.part(good)

    def _resident_still(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Returns, for each step of the batch, whether the session's state is still in the same slot as when the step
        was queued: bool (B)."""
        return np.array([row.slot == self.resident.slot(row.session) for row in batch.rows], np.bool_)

    def hold(self, running: ColumnBatch) -> None:
        """Retains the slots of a batch's states until `finish`, because the batch runs on the runner's thread."""
        assert isinstance(running, StepBatch), "the batch is not a batch of steps in rows: this is a bug"
        self._held.append(running)
        for slot in running.slots.tolist():
            self._state_cache.retain(slot)

    def finish(self, ran: ColumnBatch, started_s: float, compute_s: float) -> None:
        """Commits and answers the steps of a batch. `started_s` is when the run of the batch started, by
        `time.perf_counter`."""
        assert isinstance(ran, StepBatch), "the batch is not a batch of steps in rows: this is a bug"
        batch, stored = ran, ran.stored
        good: NDArray[np.bool_] | None = None
        if batch in self._held:
            self._held.remove(batch)
            self._state_cache.release_all(batch.slots.tolist())
            good = self._resident_still(batch)
            if stored is not None:
                good |= stored
            self._conflicts.inc(len(good) - int(np.count_nonzero(good)))
        if (failure := batch.failure) is not None:
            batch.failed = len(batch.rows)
            if good is not None and np.count_nonzero(good) < len(good):
                asyncio.get_running_loop().call_soon(partial(self._hand_back, batch.part(~good), entered=True))
                batch = batch.part(good)
            if len(batch.rows):
                self._run_alone(batch, failure)
            return
        finite = batch.outputs.finite
        batch.failed = len(finite) - int(np.count_nonzero(finite))
        if batch.failed:
            self._fail(batch.part(~finite), FloatingPointError("the model's output is not finite"))
        if good is not None and not (good | ~finite).all():
            asyncio.get_running_loop().call_soon(partial(self._hand_back, batch.part(finite & ~good), entered=True))
        if batch.failed or (good is not None and not good.all()):
            batch = batch.part(finite if good is None else good & finite)
            if not len(batch.rows):
                return
            stored = batch.stored
        times = Times(started_s, compute_s, len(ran.rows))
        if stored is None:
            self._commit_buffered(batch, times)
        elif stored.all():
            self._start_commit(batch, times)
        else:
            self._start_commit(batch.part(stored), times)
            self._commit_buffered(batch.part(~stored), times)

    def _commit_buffered(self, batch: StepBatch, times: Times) -> None:
        """Commits the rows of buffered sessions by arrays, and answers them."""
        rows, sessions = range(len(batch.rows)), [*map(SESSION, batch.rows)]
        try:
            asking = self.answers.asking(batch)
            positions = self.resident.commit(batch.slots, sessions, batch.tokens, batch.outputs)
            self.ran += len(rows)
            dropped_tokens = self._state_cache.dropped_tokens[batch.slots]
            prepared = self.answers.prepare(batch, positions, dropped_tokens, asking, times)
        except Exception as error:
            self._fail(batch, error, NOT_COMMITTED)
            return
        self._locks.leave_all(sessions)
        try:
            self.answers.deliver(batch, prepared, rows)
        finally:
            self._admission.leave(len(rows))

    def _start_commit(self, batch: StepBatch, times: Times) -> None:
        """Starts the commit of rows by the store. They are answered when it has ended. The rows that create their
        sessions, which takes longer, are committed and answered by themselves."""
        commits = batch.commits
        creates = [commit.creator is not None for commit in commits]
        if True in creates and False in creates:
            flags = np.array(creates)
            self._start_commit(batch.part(~flags), times)
            self._start_commit(batch.part(flags), times)
            return
        try:
            self._state_cache.write(np.array([commit.slot for commit in commits], np.intp), batch.outputs)
            positions = np.array([commit.position for commit in commits])
            dropped_tokens = np.array([commit.dropped_tokens for commit in commits])
            prepared = self.answers.prepare(batch, positions, dropped_tokens, self.answers.asking(batch), times)
        except Exception as error:
            self._fail(batch, error, NOT_COMMITTED)
            return
        self._committing.append(batch)
        task = asyncio.create_task(self._commit(batch, prepared))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, batch: StepBatch, prepared: Prepared) -> None:
        """Commits rows by the store, and answers them."""
        committed: list[Appended]
        kept, durable = list[int](), list[bool | None]()
        try:
            committed = await self.sessions.commit_many(batch.commits)
            for row, record in enumerate(committed):
                durable.append(record.durable if isinstance(record, SessionRecord) else None)
                if isinstance(record, SessionRecord):
                    if (
                        self.resident.has_room
                        and batch.rows[row].key is None
                        and routing.of_session(None, record.mode) is Mode.RECURRENT
                    ):
                        self.resident.add(record)
                    kept.append(row)
        except Exception as error:
            kept, committed = [], [error] * len(batch.rows)
        self._committing.remove(batch)
        self.ran += len(kept)
        try:
            self.answers.deliver(batch, prepared, kept, durable)
        finally:
            self._leave([batch.rows[row] for row in kept])
        if len(kept) < len(batch.rows):
            self._uncommitted(batch, committed)

    def _uncommitted(self, batch: StepBatch, committed: Sequence[Appended]) -> None:
        """Fails the rows whose commit failed. Passes those whose session had changed to the general procedure."""
        conflicts = np.array([record is None for record in committed], np.bool_)
        if conflicts.any():
            self._hand_back(batch.part(conflicts), entered=True, conflicts=1)
        for row, error in zip(batch.rows, committed, strict=True):
            if isinstance(error, Exception):
                self._leave([row])
                row.fail(error)

    def close(self, error: Exception) -> None:
        """Fails the queued steps, and those that are queued later."""
        self._closed = True
        waiting, self.rows = self.rows, []
        self._leave(waiting)
        for row in waiting:
            row.fail(error)
        if self._timer is not None:
            self._timer.cancel()

    async def settled(self) -> None:
        """Waits for the commits in progress."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _run_alone(self, batch: StepBatch, failure: Exception) -> None:
        """Queues the rows of a batch whose run failed. Each runs alone, so that only rows with a fault fail."""
        if batch.failed == 1 or self._closed:
            self._fail(batch, failure)
            return
        if not self.rows:
            self._flushes = self.resident.flushes
            self._batcher.queue_columns()
        for row in batch.rows:
            row.runs_alone, row.is_plain = True, False
        self.rows[:0] = batch.rows
        self._is_uneven = True

    def _fail(self, batch: StepBatch, cause: Exception, message: str = "the model failed to run") -> None:
        """Fails rows whose run failed, which then have no effect, or whose commit or answer failed."""
        for row in batch.rows:
            self._failed.inc()
            logger.error("a batch of steps failed: %s", message, exc_info=cause)
            failure = WaneError(message)
            failure.__cause__ = cause
            self._leave([row])
            row.fail(failure)

    def _ring_at(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_at(deadline, self._ring)

    def _ring(self) -> None:
        """Fails the queued and running steps whose deadline has passed, and sets the next timer."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        late = [row for row in self.rows if _has_passed(row.deadline, now_s)]
        self.rows = [row for row in self.rows if not _has_passed(row.deadline, now_s)]
        running = [row for batch in (*self._held, *self._committing) for row in batch.rows]
        for row in running:
            if _has_passed(row.deadline, now_s):
                row.deadline = None
                row.fail(DeadlineExceeded(STILL_COMMITS))
        if known := [row.deadline for row in (*self.rows, *running) if row.deadline is not None]:
            self._ring_at(min(known))
        for row in late:
            self._drop(row)

    def _drop(self, row: StepRow) -> None:
        """Withdraws a step that is abandoned or late."""
        self._leave([row])
        is_late, ticket = not row.done(), row.waiting
        if ticket is not None:  # its deadline also cancels the row
            is_late = _has_passed(ticket.deadline, asyncio.get_running_loop().time())
        (self._too_late if is_late else self._abandoned).inc()
        if row.traced is not None:
            row.traced.skipped(row.queued_s, time.perf_counter(), "deadline" if is_late else "abandoned")
        row.fail(DeadlineExceeded(TOO_LATE))

    def _leave(self, rows: Sequence[StepRow]) -> None:
        """Releases what rows that have ended own: their slots, their sessions' locks, and their places among the
        requests."""
        owners = [row for row in rows if self._free(row)]
        self._locks.leave_all([*map(SESSION, owners)])
        self._admission.leave(len(owners))

    def _free(self, row: StepRow) -> bool:
        """Releases a row's slots. Returns whether the row also owns the session's lock."""
        if row.waiting is not None:
            return False
        if row.stored is not None:
            self._state_cache.release_all((row.slot, row.stored.slot or ZERO))
        return True

    def _hand_back(self, batch: StepBatch, *, entered: bool, conflicts: int = 0) -> None:
        """Passes the steps to the general procedure, which takes over the locks of the steps' sessions. A request that
        waits for such a lock therefore runs after the step. A step for which the general procedure waits gets a
        `Conflict`.

        `entered` says whether the steps were in a batch that ran. Such steps, and those that run alone, commit even if
        they are abandoned.
        `conflicts`: see `Ticket`.
        """
        for row in batch.rows:
            if not self._free(row):
                row.fail(Conflict())
                continue
            has_entered = entered or row.runs_alone
            if row.done() and not has_entered:
                self._abandoned.inc()
                self._locks.leave(row.session)
                self._admission.leave()
                continue
            ticket = Ticket(None if row.done() else row.deadline)
            # The current context may belong to another, traced request.
            ticket.admitted, ticket.traced = True, row.traced
            ticket.entered, ticket.abandoned = has_entered, row.done()
            ticket.conflicts = conflicts
            pending = Pending.of(self._procedure(row.as_request(), ticket), ticket)
            if not row.done():
                row.follow(pending)


def _has_passed(deadline: float | None, now_s: float) -> bool:
    return deadline is not None and deadline <= now_s
