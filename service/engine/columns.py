"""Steps of one token in columns: the rows of one batch are arrays from the state cache to the answers.

A step is taken in here if its session's state is resident, nobody else is at the session, and it needs nothing but the
next token: no idempotency key, no window, no trace. What turns out otherwise when its batch begins or has run (a
replay, a conflict, an evicted state, a failed run) is handed back to its receiver, for the general procedure
(`step.py`), which is also what these columns are tested against.

A step that is in a batch is committed, whether or not anybody waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import Certificate
from wane.models.vocabulary import Vocabulary
from wane.service.aio.deadline import TOO_LATE
from wane.service.aio.eager import Waiter
from wane.service.aio.timers import Timer, timers
from wane.service.batching.batch import FEW, ColumnBatch, Largest
from wane.service.batching.ticket import Ticket
from wane.service.engine import bounds
from wane.service.engine.bounds import Bound
from wane.service.engine.logits import listed
from wane.service.engine.pending import STILL_COMMITS, Admission, Pending
from wane.service.engine.stats import Stats
from wane.service.engine.top1_proof import MarginProof
from wane.service.errors import DeadlineExceeded
from wane.service.observability.metrics import Metrics
from wane.service.runners.runner import LOG_SUM_EXP, TOP_IDS, TOP_LOGITS, Array
from wane.service.sessions.lock import SessionLocks
from wane.service.sessions.resident import ResidentSessions
from wane.service.state.cache import StateCache
from wane.service.state.pool import HIDDEN
from wane.service.types import MAX_POSITION, Answer, Latency, Mode, StateSource, StepRequest

NO_POSITION = -1  # of a step that does not say where it starts
KNOWN_BOUNDS = 4096  # bounds that are remembered, by the number of tokens that a state knows


StepProcedure = Callable[[StepRequest, Ticket], Coroutine[Any, Any, Answer]]


class StepReceiver(Protocol):
    """Waits for one step, or for several, each with an index of the receiver's own."""

    done: bool
    """Nobody waits any more."""

    def step_ran(self, results: StepResults, row: int, index: int) -> None:
        """The step is committed; this row is its answer."""
        ...

    def step_failed(self, error: Exception, index: int) -> None:
        """The step is over, or nobody waits for it any longer."""
        ...

    def step_again(self, index: int) -> None:
        """Nothing was done: the step is to be taken by the general procedure."""
        ...


class StepRow(NamedTuple):
    """A step that waits for its batch. `expected_position` may be NO_POSITION; `queued_s` is by `time.perf_counter`."""

    session: str
    slot: int
    token: int
    expected_position: int
    top_k: int
    deadline: float | None
    receiver: StepReceiver
    number: int
    queued_s: float


class StepResults:
    """The answers to the steps of one batch: of B rows, a list for each field.

    ids, logprobs, probabilities: of the most probable tokens, as many as the step that asked for the most. `encoded`:
    each answer as JSON, made by whoever needs it first.
    """

    __slots__ = (
        "batch_items",
        "bounds",
        "compute_ms",
        "encoded",
        "ids",
        "logprobs",
        "positions",
        "probabilities",
        "proved",
        "queue_ms",
        "sessions",
        "top_k",
        "total_ms",
        "vocabulary",
    )

    ids: list[list[int]]
    logprobs: list[list[float]]
    probabilities: list[list[float]]
    proved: list[bool]
    positions: list[int]
    bounds: Sequence[Bound | None]
    sessions: Sequence[str]
    top_k: Sequence[int]
    queue_ms: list[float]
    compute_ms: float
    total_ms: list[float]
    batch_items: int
    vocabulary: Vocabulary
    encoded: list[bytes] | None


class StepAnswer(Answer):
    """One row of the results, as an `Answer` whose fields are made when one of them is asked for."""

    __slots__ = ("results", "row")

    def __init__(self, results: StepResults, row: int) -> None:
        self.results = results
        self.row = row

    def __getattr__(self, name: str) -> object:
        results, row = self.results, self.row
        found = results.bounds[row]
        super().__init__(
            mode=Mode.RECURRENT,
            predictions=listed(
                Largest(results.ids[row], [], results.logprobs[row], results.probabilities[row]),
                results.top_k[row],
                results.vocabulary,
            ),
            latency=Latency(results.queue_ms[row], results.compute_ms, results.total_ms[row], results.batch_items),
            state=StateSource.RESIDENT,
            error_bound=None if found is None else found.variation,
            state_error_bound=None if found is None else found.state,
            top1_proved=results.proved[row],
            session=results.sessions[row],
            position=results.positions[row],
            replayed=False,
        )
        return object.__getattribute__(self, name)


class PendingStep(Pending[Answer]):
    """A step that was submitted: a row of a batch, or its general procedure's result."""

    __slots__ = ("_procedure", "_request")

    def __init__(
        self,
        ticket: Ticket,
        procedure: Callable[[StepRequest, Ticket], Coroutine[Any, Any, Answer]],
        request: StepRequest,
    ) -> None:
        """`procedure`: takes any step."""
        super().__init__(ticket)
        self._procedure = procedure
        self._request = request

    def step_ran(self, results: StepResults, row: int, index: int) -> None:  # noqa: ARG002
        """See `StepReceiver`. Calls back at once: all steps of the batch are committed."""
        if not self.done:
            self._result = StepAnswer(results, row)
            Waiter._finish(self)

    def step_failed(self, error: Exception, index: int) -> None:  # noqa: ARG002
        """See `StepReceiver`."""
        self.fail(error)

    def step_again(self, index: int = 0) -> None:  # noqa: ARG002
        """See `StepReceiver`."""
        if not self.done:
            self.start(self._procedure(self._request, self.ticket))


class StepBatch(ColumnBatch):
    """Steps that are run together, and who waits for them."""

    __slots__ = ("rows",)

    def __init__(self, rows: Sequence[StepRow], slots: NDArray[np.intp]) -> None:
        super().__init__(
            slots, np.array([row.token for row in rows], np.int64), np.array([row.queued_s for row in rows])
        )
        self.rows = rows


class StepColumns:
    """The steps of one model that wait, run and are answered in columns.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        certificate: Certificate,
        vocabulary: Vocabulary,
        state_cache: StateCache,
        resident: ResidentSessions,
        locks: SessionLocks,
        margin: MarginProof,
        admission: Admission,
        stats: Stats,
        metrics: Metrics,
        model: str,
        *,
        most_predictions: int,
        max_queue: int,
        queue_columns: Callable[[], None],
    ) -> None:
        """`most_predictions`: that the graph of a step puts out and a request may ask for; 0: no step is taken in.
        `max_queue`: steps that may wait. `queue_columns` tells the batcher that steps wait."""
        self._vocabulary = vocabulary
        self._size = vocabulary.size
        self._state_cache = state_cache
        self._resident = resident
        self._locks = locks
        self._margin = margin
        self._admission = admission
        self._stats = stats
        self._most_predictions = most_predictions
        self._max_queue = max_queue
        self._queue_columns = queue_columns
        self._abandoned = metrics.queue_dropped.labels(model, "abandoned")
        self._too_late = metrics.queue_dropped.labels(model, "deadline")
        self._rows: list[StepRow] = []
        self._running: StepBatch | None = None  # on the runner's thread
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._bound_of_all = bounds.bound(certificate, 1, 1)  # of a state that knows all of its sequence
        self._bound_of = lru_cache(KNOWN_BOUNDS)(lambda known: bounds.bound(certificate, known, known + 1))

    def __len__(self) -> int:
        """How many steps wait."""
        return len(self._rows)

    def take(
        self,
        session: str,
        token: int,
        expected_position: int | None,
        top_k: int,
        deadline: float | None,
        receiver: StepReceiver,
        index: int = 0,
    ) -> bool:
        """Takes in a step. False, and nothing was done, if it is one for the general procedure."""
        slot = self._resident.slot(session)
        if (
            slot is None
            or not 0 <= token < self._size
            or not 0 < top_k <= self._most_predictions
            or (expected_position is not None and not 0 <= expected_position <= MAX_POSITION)
            or len(self._rows) >= self._max_queue
            or self._admission.closed
            or not self._locks.take(session)
        ):
            return False
        position = NO_POSITION if expected_position is None else expected_position
        self._queue_columns()
        self._rows.append(
            StepRow(session, slot, token, position, top_k, deadline, receiver, index, time.perf_counter())
        )
        self._admission.enter()
        return True

    def begin(self, most: int) -> StepBatch | None:
        """The next batch, of at most so many rows; None if no step that waits can be run."""
        waiting, self._rows = self._rows[:most], self._rows[most:]
        now_s = asyncio.get_running_loop().time()
        rows: list[StepRow] = []
        again: list[StepRow] = []
        for row in waiting:
            if row.receiver.done:
                self._abandoned.inc()
                self._leave(row)
            elif row.deadline is not None and row.deadline <= now_s:
                self._late(row)
            elif self._resident.slot(row.session) == row.slot:
                rows.append(row)
            else:
                again.append(row)
        batch: StepBatch | None = None
        if rows:
            slots = np.array([row.slot for row in rows], np.intp)
            expected = np.array([row.expected_position for row in rows], np.int64)
            good = (expected == NO_POSITION) | (expected == self._state_cache.positions[slots])
            good &= self._resident.alive(slots)
            if not good.all():
                flags = good.tolist()
                again += [row for row, is_good in zip(rows, flags, strict=True) if not is_good]
                rows = [row for row, is_good in zip(rows, flags, strict=True) if is_good]
                slots = slots[good]
            if rows:
                batch = StepBatch(rows, slots)
        self._hand_back(again)
        return batch

    def hold(self, running: ColumnBatch) -> None:
        """The batch is run on the runner's thread: until `finish`, no state of it goes."""
        assert isinstance(running, StepBatch), "a batch of others: this is a bug"
        self._running = running
        for slot in running.slots.tolist():
            self._state_cache.retain(slot)
        self.watch()

    def finish(self, ran: ColumnBatch, started_s: float, compute_s: float) -> None:
        """Commits and answers the steps of a batch that was run from `started_s` on, by `time.perf_counter`."""
        assert isinstance(ran, StepBatch), "a batch of others: this is a bug"
        batch = ran
        rows, slots = batch.rows, batch.slots
        if self._running is batch:
            self._running = None
            self._state_cache.release_all(slots.tolist())
            good = np.array([self._resident.slot(row.session) == row.slot for row in rows])
        else:
            good = np.ones(len(rows), np.bool_)
        if batch.failure is not None:
            self._hand_back(rows)
            return
        outputs, tokens = batch.outputs, batch.tokens
        for name in ("logits", HIDDEN):
            finite = np.isfinite(outputs[name])
            if not finite.all():
                good &= finite.all(axis=1)
        if not good.all():
            flags = good.tolist()
            self._hand_back([row for row, is_good in zip(rows, flags, strict=True) if not is_good])
            rows = [row for row, is_good in zip(rows, flags, strict=True) if is_good]
            if not rows:
                return
            slots, tokens = slots[good], tokens[good]
            outputs = {name: values[good] for name, values in outputs.items()}
        sessions = [row.session for row in rows]
        self._resident.commit(slots, sessions, tokens, outputs)
        results = self._results(rows, slots, outputs, started_s, compute_s, len(batch))
        self._count(results, rows)
        leave, admission = self._locks.leave, self._admission
        for session in sessions:
            leave(session)
            admission.leave()
        for at, row in enumerate(rows):
            row.receiver.step_ran(results, at, row.number)

    def watch(self) -> None:
        """The runner is busy: tells those whose deadline passes meanwhile."""
        rows = [*self._rows, *(() if self._running is None else self._running.rows)]
        deadlines = [row.deadline for row in rows if row.deadline is not None and not row.receiver.done]
        if deadlines and (self._timer is None or min(deadlines) < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = min(deadlines)
            self._timer = timers().at(self._timer_at, self._ring)

    def close(self, error: Exception) -> None:
        """Fails what waits, and writes all tokens to the store."""
        waiting, self._rows = self._rows, []
        for row in waiting:
            self._leave(row)
            row.receiver.step_failed(error, row.number)
        if self._timer is not None:
            self._timer.cancel()
        self._resident.close()

    def _ring(self) -> None:
        """A deadline has passed."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        waiting, self._rows = self._rows, []
        for row in waiting:
            if row.deadline is not None and row.deadline <= now_s and not row.receiver.done:
                self._late(row)
            else:
                self._rows.append(row)
        for row in () if self._running is None else self._running.rows:
            if row.deadline is not None and row.deadline <= now_s and not row.receiver.done:
                row.receiver.step_failed(DeadlineExceeded(STILL_COMMITS), row.number)
        self.watch()

    def _late(self, row: StepRow) -> None:
        self._too_late.inc()
        self._leave(row)
        row.receiver.step_failed(DeadlineExceeded(TOO_LATE), row.number)

    def _leave(self, row: StepRow) -> None:
        self._locks.leave(row.session)
        self._admission.leave()

    def _hand_back(self, rows: Sequence[StepRow]) -> None:
        """Gives these to the general procedure; they take their sessions' locks again at once, in their order."""
        for row in rows:
            self._leave(row)
        for row in rows:
            row.receiver.step_again(row.number)

    def _results(
        self,
        rows: Sequence[StepRow],
        slots: NDArray[np.intp],
        outputs: Mapping[str, Array],
        started_s: float,
        compute_s: float,
        batch_items: int,
    ) -> StepResults:
        """The answers of rows that are committed."""
        results = StepResults()
        results.top_k = [row.top_k for row in rows]
        width = max(FEW, *results.top_k)
        ids = outputs[TOP_IDS][:, :width]
        logits = outputs[TOP_LOGITS][:, :width].astype(np.float64)
        # The sum is rounded: of a token that is all but certain the difference may be above 0.
        logprobs = np.minimum(logits - outputs[LOG_SUM_EXP].astype(np.float64).reshape(-1, 1), 0.0)
        results.ids, results.logprobs = ids.tolist(), logprobs.tolist()
        results.probabilities = np.exp(logprobs).tolist()
        positions = self._state_cache.positions[slots]
        results.positions = positions.tolist()
        dropped = self._state_cache.dropped_tokens[slots]
        if dropped.any():
            results.bounds = [
                self._bound_of(known) if lost else self._bound_of_all
                for known, lost in zip((positions - dropped).tolist(), dropped.tolist(), strict=True)
            ]
        else:
            results.bounds = [self._bound_of_all] * len(rows)
        results.proved = self._proved(results.bounds, ids, logits, outputs)
        results.sessions = [row.session for row in rows]
        results.compute_ms = 1e3 * compute_s
        ended_s = time.perf_counter()
        results.queue_ms = [1e3 * (started_s - row.queued_s) for row in rows]
        results.total_ms = [1e3 * (ended_s - row.queued_s) for row in rows]
        results.batch_items = batch_items
        results.vocabulary = self._vocabulary
        results.encoded = None
        return results

    def _proved(
        self,
        found: Sequence[Bound | None],
        ids: NDArray[np.int64],
        logits: NDArray[np.float64],
        outputs: Mapping[str, Array],
    ) -> list[bool]:
        """Of each row, whether the margin proves the first token."""
        known = np.array([one is not None and one.runs is not None for one in found])
        if not known.any():
            return [False] * len(found)
        errors = np.array([0.0 if one is None or one.runs is None else one.runs for one in found])
        hidden = outputs[HIDDEN].astype(np.float64)
        lengths = np.sqrt(np.einsum("bh,bh->b", hidden, hidden))
        settled = self._margin.settled(ids, logits, lengths, errors)
        proved = (settled == 1) & known
        for row in np.flatnonzero((settled < 0) & known).tolist():
            proved[row] = self._margin.proves(outputs["logits"][row], outputs[HIDDEN][row], errors.item(row))
        flags: list[bool] = proved.tolist()
        return flags

    def _count(self, results: StepResults, rows: Sequence[StepRow]) -> None:
        waited_for = sum([not row.receiver.done for row in rows])
        variations = [None if one is None else one.variation for one in results.bounds]
        self._stats.stepped(
            (results.queue_ms, [results.compute_ms] * len(rows), results.total_ms),
            variations,
            sum(results.proved),
            waited_for,
        )
