"""Runs steps of one token in rows: the data of a batch of steps, from the states to the answers, is in arrays with one
row for each step.

Every step of one token is a row if its session's state is in memory and the step answers in recurrent mode, and so is
the last token of a longer step. What a step asks (a filter, a proof, a key, a trace) and where its session is stored
change how its row is committed and answered (`StepDetails`):

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
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from copy import copy
from functools import lru_cache, partial
from itertools import compress
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture, CacheShares
from wane.models.manifest import Manifest
from wane.models.vocabulary import Vocabulary
from wane.service.batching.batch import ANSWERS, ColumnBatch, Row
from wane.service.batching.ticket import Ticket
from wane.service.deadline import TOO_LATE
from wane.service.engine import bounds, routing
from wane.service.engine.answer import AnswerBuilder, AnswerPlan, ModeResult
from wane.service.engine.bounds import Bound
from wane.service.engine.forward import RunResult
from wane.service.engine.logits import listed
from wane.service.engine.pending import STILL_COMMITS, Admission, Pending
from wane.service.engine.stats import Stats
from wane.service.engine.top1_proof import MarginProof
from wane.service.errors import DeadlineExceeded, Overloaded, Unavailable, WaneError
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import Traced
from wane.service.runners.outputs import FEW, Largest, Outputs, TopColumns
from wane.service.runners.runner import HIDDEN, LOG_SUM_EXP, NORMS, TOP_IDS
from wane.service.sessions.resident import ResidentSessions
from wane.service.sessions.sessions import Commit, Sessions, StepKind
from wane.service.sessions.stores.store import Appended, SessionRecord
from wane.service.state.cache import StateCache
from wane.service.types import (
    MAX_POSITION,
    NO_FILTER,
    Answer,
    Identity,
    Latency,
    Mode,
    Owner,
    StateSource,
    StepRequest,
    id_of,
)

logger = logging.getLogger("wane.engine")

Float = TypeVar("Float", np.float32, np.float64)

NO_POSITION = -1  # the expected position of a step whose request has none, or whose position was checked before
NO_TOKENS = np.empty(0, np.int64)
KNOWN_BOUNDS = 4096  # number of cached bounds, one for each number of tokens that a state has read


StepProcedure = Callable[[StepRequest, Ticket], Coroutine[Any, Any, Answer]]


class StepReceiver(Protocol):
    """Receives the results of one or several steps. The receiver identifies each step by a number that it chose."""

    creator: Owner | None
    """The `creator` of the steps whose results this receiver gets: see `StepRequest`."""

    def done(self) -> bool:
        """Returns whether the receiver has stopped waiting."""
        ...

    def step_ran(self, answer: Answer, number: int) -> None:
        """Receives the answer of a committed step."""
        ...

    def step_failed(self, error: Exception, number: int) -> None:
        """Receives the error of a step that failed or missed its deadline."""
        ...

    def step_again(self, pending: Pending[Answer], number: int) -> None:
        """Receives the pending result of a step that was passed to the general procedure, or whose answer waits for a
        proof."""
        ...


class StoredStep:
    """The commit of a row whose session is not buffered, and the slots of its states.

    record: the session before the step. tokens: all tokens of the step, of which the row runs the last. read: the slot
    of the state before the last token. write: the slot of the next state. dropped_tokens: the number of the session's
    first tokens that the state has not read. was_rebuilt: whether the state was not in memory when the step began.
    ticket: the ticket of the step if the general procedure waits for the row. The procedure then keeps the session's
    lock and both slots until the row has its result. Otherwise it is None, and the row owns them.
    """

    __slots__ = ("dropped_tokens", "kind", "read", "record", "ticket", "tokens", "was_rebuilt", "write")

    def __init__(
        self,
        record: SessionRecord,
        tokens: tuple[int, ...],
        kind: StepKind,
        read: int,
        write: int,
        dropped_tokens: int,
        *,
        was_rebuilt: bool = False,
        ticket: Ticket | None = None,
    ) -> None:
        self.record = record
        self.tokens = tokens
        self.kind = kind
        self.read = read
        self.write = write
        self.dropped_tokens = dropped_tokens
        self.was_rebuilt = was_rebuilt
        self.ticket = ticket

    @property
    def position(self) -> int:
        """The session's position after the step."""
        return self.record.position + len(self.tokens)


class StepDetails:
    """What a row is besides its token.

    request: the step's request, if it asks anything. traced: the trace of the request. stored: see `StoredStep`; None
    if the session is buffered. token_logprobs: see `Answer`. runs_alone: the row ran in a batch that failed, and runs
    in a batch of its own. It then commits even if it is abandoned.
    """

    __slots__ = ("request", "runs_alone", "stored", "token_logprobs", "traced")

    def __init__(
        self, request: StepRequest | None = None, traced: Traced | None = None, stored: StoredStep | None = None
    ) -> None:
        self.request = request
        self.traced = traced
        self.stored = stored
        self.token_logprobs: tuple[float | None, ...] | None = None
        self.runs_alone = False

    @property
    def ticket(self) -> Ticket | None:
        """See `StoredStep`."""
        return None if self.stored is None else self.stored.ticket

    def asks(self, most_predictions: int) -> bool:
        """Returns whether the row's answer differs from that of a row that asks nothing, so that it is not answered by
        arrays. `most_predictions`: the largest top_k of rows that are answered by arrays."""
        stored, request = self.stored, self.request
        if stored is not None and (stored.was_rebuilt or stored.kind is not StepKind.NEXT):
            return True
        return request is not None and not (
            request.top_k <= most_predictions
            and request.cache
            and not request.prove
            and not request.logits
            and not request.token_logprobs
            and not request.unknown
            and request.filter == NO_FILTER
        )


StepRow = tuple[str, int, int, int, int, float | None, StepReceiver, int, float, StepDetails | None]
"""A queued step: session, slot of the session's state, token, expected position (or NO_POSITION), top_k, deadline,
receiver, the number by which the receiver identifies the step, the time of `time.perf_counter` when the step was
queued, and its details, if there are any."""


class StepResults:
    """The answers to the steps of one batch. Most fields are lists of B rows. `compute_ms`, `batch_items`, `identity`,
    `vocabulary` and `durable` are the same for all rows.

    ids, logprobs, probabilities: the most probable tokens, up to the largest `top_k` of the batch. cache_tokens: the
    number of tokens in each row's cache; None if the model has no cache.
    """

    __slots__ = (
        "batch_items",
        "bounds",
        "cache_tokens",
        "compute_ms",
        "durable",
        "identity",
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
    cache_tokens: list[int] | None
    sessions: Sequence[str]
    top_k: Sequence[int]
    queue_ms: list[float]
    compute_ms: float
    total_ms: list[float]
    batch_items: int
    identity: Identity
    vocabulary: Vocabulary
    durable: bool | None

    def answer(self, row: int) -> StepAnswer:
        """Returns the answer to the step of a row."""
        bound = self.bounds[row]
        return StepAnswer(
            *self.identity,
            Mode.RECURRENT,
            None,
            listed(
                Largest(self.ids[row], [], self.logprobs[row], self.probabilities[row]),
                self.top_k[row],
                self.vocabulary,
            ),
            Latency(self.queue_ms[row], self.compute_ms, self.total_ms[row]).with_batch(self.batch_items),
            StateSource.RESIDENT,
            None if bound is None else bound.variation,
            None if bound is None else bound.state,
            self.proved[row],
            session=id_of(self.sessions[row]),
            position=self.positions[row],
            replayed=False,
            durable=self.durable,
            cache_tokens=None if self.cache_tokens is None else self.cache_tokens[row],
        )


class StepAnswer(Answer):
    """The answer to a step that was answered by arrays."""


class PendingStep(Pending[Answer]):
    """The pending result of a step that was taken as a row."""

    def __init__(self, creator: Owner | None = None) -> None:
        super().__init__()
        self.creator = creator
        self._general: Pending[Answer] | None = None

    def cancel(self, msg: object = None) -> bool:
        """See `Pending`."""
        if self._general is not None:
            self._general.cancel()
        return super().cancel(msg)

    def step_ran(self, answer: Answer, number: int) -> None:  # noqa: ARG002
        """See `StepReceiver`."""
        if not self.done():
            self.set_result(answer)

    def step_failed(self, error: Exception, number: int) -> None:  # noqa: ARG002
        """See `StepReceiver`."""
        self.fail(error)

    def step_again(self, pending: Pending[Answer], number: int) -> None:  # noqa: ARG002
        """See `StepReceiver`."""
        self._general = pending
        pending.add_done_callback(self._copy)

    def _copy(self, general: asyncio.Future[Answer]) -> None:
        self._general = None
        if general.cancelled():
            self.cancel()
        elif (error := general.exception()) is not None:
            self.fail(error)
        elif not self.done():
            self.set_result(general.result())


class Conflict(Exception):
    """Another writer committed to the session first, so that the row changed nothing."""


class StepBatch(ColumnBatch):
    """A batch of steps and their receivers: a column of B rows for each field of `StepRow`."""

    __slots__ = ("deadlines", "details", "expected", "numbers", "receivers", "sessions", "top_k")

    details: Sequence[StepDetails | None]

    def __init__(self, rows: Sequence[StepRow]) -> None:
        (
            self.sessions,
            slots,
            tokens,
            expected,
            self.top_k,
            self.deadlines,
            self.receivers,
            self.numbers,
            queued_s,
            self.details,
        ) = zip(*rows, strict=True)
        super().__init__(np.array(slots, np.intp), np.array(tokens, np.int64), np.array(queued_s, np.float64))
        self.expected: NDArray[np.int64] = np.array(expected, np.int64)

    @property
    def stored(self) -> NDArray[np.bool_] | None:
        """For each row, whether it is committed by the store: bool (B). None if no row is."""
        if not any(self.details):
            return None
        flags = np.array([one is not None and one.stored is not None for one in self.details], np.bool_)
        return flags if flags.any() else None

    @property
    def traced(self) -> dict[Traced, float]:
        """The traces of the batch's requests, and when each was queued."""
        if not any(self.details):
            return {}
        found = zip(self.details, self.queued_s.tolist(), strict=True)
        return {one.traced: queued_s for one, queued_s in reversed([*found]) if one is not None and one.traced}

    def commits(self, row: int) -> StoredStep:
        """Returns the commit of a row that the store commits."""
        details = self.details[row]
        assert details is not None and details.stored is not None, "a buffered row has no commit: this is a bug"
        return details.stored

    def request(self, row: int) -> StepRequest:
        """Returns the step of a row as a request."""
        details = self.details[row]
        if details is not None and details.request is not None:
            return details.request
        expected: int = self.expected.item(row)
        position = None if expected == NO_POSITION else expected
        return StepRequest(
            self.sessions[row],
            (self.tokens.item(row),),
            None,
            position,
            None,
            self.top_k[row],
            creator=self.receivers[row].creator,
        )

    def rows(self) -> list[StepRow]:
        """Returns the rows, as they were queued."""
        return [
            *zip(
                self.sessions,
                self.slots.tolist(),
                self.tokens.tolist(),
                self.expected.tolist(),
                self.top_k,
                self.deadlines,
                self.receivers,
                self.numbers,
                self.queued_s.tolist(),
                self.details,
                strict=True,
            )
        ]

    def part(self, rows: NDArray[np.bool_]) -> StepBatch:
        """Returns a batch of the selected rows and their outputs. rows: bool (B)."""
        part, flags = copy(self), rows.tolist()
        part.sessions, part.top_k, part.deadlines, part.receivers, part.numbers, part.details = (
            tuple(compress(column, flags))
            for column in (self.sessions, self.top_k, self.deadlines, self.receivers, self.numbers, self.details)
        )
        part.slots, part.tokens, part.queued_s = self.slots[rows], self.tokens[rows], self.queued_s[rows]
        part.expected = self.expected[rows]
        if len(self.outputs):
            part.outputs = self.outputs.part(rows)
        return part


class StepColumns:
    """Queues, runs, commits and answers one model's steps in rows.

    All methods must be called on the event loop's thread.
    """

    def __init__(
        self,
        manifest: Manifest,
        vocabulary: Vocabulary,
        state_cache: StateCache,
        resident: ResidentSessions,
        sessions: Sessions,
        margin: MarginProof,
        answer_builder: AnswerBuilder,
        admission: Admission,
        stats: Stats,
        metrics: Metrics,
        identity: Identity,
        procedure: StepProcedure,
        *,
        most_predictions: int,
        max_queue: int,
        queue_columns: Callable[[], None],
    ) -> None:
        """`procedure` is the general procedure: it runs any admitted step, and releases the session's lock.
        `most_predictions` is the largest top_k for which the step graph outputs enough tokens; if 0, no row is answered
        by arrays. `max_queue` limits the number of queued steps. `queue_columns` notifies the batcher that steps are
        queued.
        """
        self._identity = identity
        self._vocabulary = vocabulary
        self._starts_with_tokens = bool(manifest.start_tokens)
        self._size = vocabulary.size
        self._reserved = vocabulary.reserved
        self._unlisted = vocabulary.unlisted
        self._state_cache = state_cache
        self._slots = state_cache.order
        self._buffered = resident.buffered
        self._resident = resident
        self._builder = answer_builder
        self._cache = answer_builder.cache
        self._sessions = sessions
        self._locks = sessions.locks
        self._margin = margin
        self._admission = admission
        self._stats = stats
        self._procedure = procedure
        self._most_predictions = most_predictions
        self._max_queue = max_queue
        self._queue_columns = queue_columns
        self._abandoned = metrics.queue_dropped.labels(identity[0], "abandoned")
        self._conflicts = metrics.step_conflicts.labels(identity[0])
        self._too_late = metrics.queue_dropped.labels(identity[0], "deadline")
        self._failed = metrics.queue_failed.labels(identity[0])
        self._refused = metrics.queue_rejected.labels(identity[0])
        self._rows: list[StepRow] = []
        self._flushes = 0  # `ResidentSessions.flushes` when the first of the queued steps was queued
        self._held: list[StepBatch] = []  # batches that run on the runner's thread or are queued for it
        self._committing: list[StepBatch] = []  # batches that the store is committing
        self._tasks: set[asyncio.Task[None]] = set()  # their commits
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._certificate = certificate = manifest.certificate
        self.ran = 0
        """Number of rows committed since the start."""
        # The bound of an answer from a state that has read the whole sequence.
        self._bound_of_all = bounds.bound(certificate, 1, 1)
        self._bound_of = lru_cache(KNOWN_BOUNDS)(lambda known: bounds.bound(certificate, known, known + 1))

    def __len__(self) -> int:
        """Returns the number of queued steps."""
        return len(self._rows)

    def take(
        self,
        session: str,
        token: int,
        expected_position: int | None,
        top_k: int,
        deadline: float | None,
        receiver: StepReceiver,
        number: int = 0,
        request: StepRequest | None = None,
        traced: Traced | None = None,
    ) -> bool:
        """Queues a step. `request` is the whole request if it asks anything, and `traced` its trace. Returns False,
        without side effects, if the step needs the general procedure."""
        if (
            not 0 <= token < self._size
            or token in self._reserved
            or not 0 < top_k <= self._most_predictions
            or (expected_position is not None and not 0 <= expected_position <= MAX_POSITION)
            or len(self._rows) >= self._max_queue
            or self._admission.closed
            or not self._locks.take(session)
        ):
            return False
        slot = self._slots.get(session)
        details = None if request is None and traced is None else StepDetails(request, traced)
        key = None if request is None else request.idempotency_key
        if slot is None or not self._buffered[slot] or key is not None:
            stored = self._stored(session, token, expected_position, request, key)
            if stored is None:
                self._locks.leave(session)
                return False
            details = details or StepDetails()
            details.stored, slot = stored, stored.read
        self._put(session, slot, token, expected_position, top_k, deadline, receiver, number, details)
        self._admission.enter()
        if deadline is not None and (self._timer is None or deadline < self._timer_at):
            self._ring_at(deadline)
        return True

    def _stored(
        self, session: str, token: int, expected_position: int | None, request: StepRequest | None, key: str | None
    ) -> StoredStep | None:
        """Returns the commit of a step whose session is not buffered. Returns None if the session must be read from the
        store, if its state is not in memory, or if the step is not the session's next one in recurrent mode."""
        record = self._sessions.look(session, expected_position, key)
        if record is None:
            return None
        mode = routing.of_session(None if request is None else request.mode, record.mode)
        cached = self._sessions.cached(record)
        if cached is None or mode is not Mode.RECURRENT:
            return None
        self._state_cache.retain(cached.slot)
        try:
            write = self._state_cache.acquire()
        except Overloaded:
            self._state_cache.release(cached.slot)
            return None
        self._resident.hits += record.position > 0
        return StoredStep(record, (token,), StepKind.NEXT, cached.slot, write, cached.dropped_tokens)

    def _put(
        self,
        session: str,
        slot: int,
        token: int,
        expected_position: int | None,
        top_k: int,
        deadline: float | None,
        receiver: StepReceiver,
        number: int,
        details: StepDetails | None,
    ) -> None:
        position = NO_POSITION if expected_position is None else expected_position
        if not self._rows:
            self._flushes = self._resident.flushes
            self._queue_columns()
        self._rows.append(
            (session, slot, token, position, top_k, deadline, receiver, number, time.perf_counter(), details)
        )

    async def run(
        self, request: StepRequest, stored: StoredStep, token_logprobs: tuple[float | None, ...] | None
    ) -> Answer:
        """Runs the last token of a step as a row, commits the step, and returns its answer. The caller holds the
        session's lock and the slots of `stored`, whose ticket it has set.

        Raises Conflict, without side effects, if another writer changed the session. Raises Overloaded if the queue is
        full."""
        ticket = stored.ticket
        assert ticket is not None, "the step of the general procedure has no ticket: this is a bug"
        if not ticket.admitted:
            if len(self._rows) >= self._max_queue:
                self._refused.inc()
                raise Overloaded(f"the queue is full: {len(self._rows)} requests are waiting")
            ticket.admitted = True
        details = StepDetails(request, ticket.traced, stored)
        details.token_logprobs = token_logprobs
        pending = PendingStep(request.creator)
        token = request.tokens[-1]
        # The row has no deadline: that of the caller's `Pending` cancels this wait.
        self._put(request.session, stored.read, token, None, request.top_k, None, pending, 0, details)
        return await pending

    def begin(self, most: int) -> StepBatch | None:
        """Returns the next batch, of at most `most` rows; None if no queued step can be run."""
        most = self._until_alone(most)
        waiting, self._rows = self._rows[:most], self._rows[most:]
        if not waiting:
            return None
        batch, flushes = StepBatch(waiting), self._flushes
        now_s = asyncio.get_running_loop().time()
        if (
            True in [one.done() for one in batch.receivers]
            or min([one or now_s + 1 for one in batch.deadlines]) <= now_s
            or any(batch.details)
        ):
            batch = self._without_late(batch, now_s)
            if not len(batch):
                return None
        good = (batch.expected == NO_POSITION) | (batch.expected == self._state_cache.positions[batch.slots])
        good &= self._resident.alive(batch.slots)
        if self._resident.flushes != flushes:  # a flush may have been for the eviction of a queued step's state
            good &= self._resident_still(batch)
        if (stored := batch.stored) is not None:  # their sessions are locked, and their slots retained
            good |= stored
        if not good.all():
            # The general procedure starts in the next iteration of the event loop. By then, the batch has run, or the
            # slots of its states are retained. If the general procedure started now, it could evict these states.
            asyncio.get_running_loop().call_soon(partial(self._hand_back, batch.part(~good), entered=False))
            batch = batch.part(good)
            if not len(batch):
                return None
        if stored is not None:
            for details in batch.details:
                if details is not None and details.ticket is not None:
                    details.ticket.entered = True
        return batch

    def _until_alone(self, most: int) -> int:
        """Returns the size of the next batch, of at most `most` rows, such that a row that runs alone does."""
        for index, row in enumerate(self._rows[:most]):
            if row[9] is not None and row[9].runs_alone:
                return max(index, 1)
        return most

    def _without_late(self, batch: StepBatch, now_s: float) -> StepBatch:
        """Returns the batch without the steps that are abandoned or late, and withdraws those steps."""
        good = np.ones(len(batch), np.bool_)
        columns = zip(batch.receivers, batch.deadlines, batch.details, strict=True)
        for row, (receiver, deadline, details) in enumerate(columns):
            ticket = None
            if details is not None:
                if details.runs_alone:
                    continue
                ticket = details.ticket
            if ticket is not None:
                if ticket.entered:
                    continue
                deadline = ticket.deadline
            if receiver.done() or _has_passed(deadline, now_s) or (ticket is not None and ticket.abandoned):
                good[row] = False
                self._drop(batch.sessions[row], receiver, batch.numbers[row], details, batch.queued_s.item(row))
        return batch if good.all() else batch.part(good)

    def _resident_still(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Returns, for each step of the batch, whether the session's state is still in the same slot as when the step
        was queued: bool (B)."""
        slots = [self._resident.slot(session) for session in batch.sessions]
        return np.array([slot == now for slot, now in zip(batch.slots.tolist(), slots, strict=True)], np.bool_)

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
        good = np.ones(len(ran), np.bool_)
        if batch in self._held:
            self._held.remove(batch)
            self._state_cache.release_all(batch.slots.tolist())
            good = self._resident_still(batch)
            if stored is not None:
                good |= stored
            self._conflicts.inc(int(np.count_nonzero(~good)))
        if batch.failure is not None:
            batch.failed = len(batch)
            self._run_alone(batch, batch.failure)
            return
        finite = batch.outputs.finite
        if not finite.all():
            batch.failed = int(np.count_nonzero(~finite))
            self._fail(batch.part(~finite), FloatingPointError("the model's output is not finite"))
            good |= ~finite
        if not good.all():
            asyncio.get_running_loop().call_soon(partial(self._hand_back, batch.part(~good), entered=True))
        good &= finite
        if not good.all():
            batch = batch.part(good)
            if not len(batch):
                return
            stored = batch.stored
        times = started_s, compute_s, len(ran)
        if stored is not None:
            self._store(batch if stored.all() else batch.part(stored), *times)
            batch = batch.part(~stored)
        if len(batch):
            self._finish_buffered(batch, *times)

    def _finish_buffered(self, batch: StepBatch, started_s: float, compute_s: float, batch_items: int) -> None:
        """Commits the rows of buffered sessions by arrays, and answers them."""
        sampled, asks = self._sampled(batch), self._asking(batch)
        if sampled is not None:
            asks |= sampled
        singles = np.flatnonzero(asks).tolist()
        input_ids = {row: self._input_ids(batch, row, batch.request(row)) for row in singles}
        self._resident.commit(batch.slots, batch.sessions, batch.tokens, batch.outputs)
        self.ran += len(batch)
        positions = self._state_cache.positions[batch.slots]
        dropped_tokens = self._state_cache.dropped_tokens[batch.slots]
        results: StepResults | None = None
        others = batch
        if len(singles) < len(batch):
            others, kept = (batch, slice(None)) if not singles else (batch.part(~asks), ~asks)
            shares = None if self._cache is None else self._resident.shares(others.slots)
            times = started_s, compute_s, batch_items
            results = self._results(others, positions[kept], dropped_tokens[kept], shares, *times)
            self._count(results, others, range(len(others)))
        tickets = {row: self._ticket(batch, row, started_s, compute_s, batch_items) for row in singles}
        made = {
            row: self._part(batch, row, positions.item(row), dropped_tokens.item(row), input_ids[row], tickets[row])
            for row in singles
        }
        self._extend(batch, singles)
        self._locks.leave_all(batch.sessions)
        self._admission.leave(len(batch))
        if results is not None:
            self._answer_all(others, results)
        for row in singles:
            takes = sampled is not None and bool(sampled[row])
            self._answer_one(batch, row, *made[row], input_ids[row], tickets[row], None, sampled=takes)

    def _store(self, batch: StepBatch, started_s: float, compute_s: float, batch_items: int) -> None:
        """Starts the commit of rows by the store, and answers them when it has ended."""
        commits = [batch.commits(row) for row in range(len(batch))]
        self._state_cache.write(np.array([one.write for one in commits], np.intp), batch.outputs)
        positions = np.array([one.position for one in commits])
        dropped_tokens = np.array([one.dropped_tokens for one in commits])
        sampled, asks = self._sampled(batch), self._asking(batch)
        if sampled is not None:
            asks |= sampled
        singles = np.flatnonzero(asks).tolist()
        input_ids = {row: self._input_ids(batch, row, batch.request(row)) for row in singles}
        results: StepResults | None = None
        if len(singles) < len(batch):
            shares = None
            if self._cache is not None:
                shares = self._resident.shares_of([(one.record, one.tokens) for one in commits])
            results = self._results(batch, positions, dropped_tokens, shares, started_s, compute_s, batch_items)
        tickets = {row: self._ticket(batch, row, started_s, compute_s, batch_items) for row in singles}
        made = {
            row: self._part(batch, row, positions.item(row), dropped_tokens.item(row), input_ids[row], tickets[row])
            for row in singles
        }

        async def commit() -> None:
            try:
                committed: list[Appended] = await self._sessions.commit_many(
                    [
                        Commit(one.record, one.tokens, _key(details), one.write, one.dropped_tokens, one.kind, creator)
                        for one, details, creator in zip(
                            commits, batch.details, [one.creator for one in batch.receivers], strict=True
                        )
                    ]
                )
            except BaseException as error:
                stopped = Unavailable("the server is stopping")
                committed = [error if isinstance(error, Exception) else stopped] * len(batch)
            self._committing.remove(batch)
            good = np.array([isinstance(one, SessionRecord) for one in committed], np.bool_)
            if not good.all():
                self._uncommitted(batch, committed)
            kept = np.flatnonzero(good).tolist()
            self._extend(batch, [row for row in singles if good[row]])
            for row in kept:
                record = committed[row]
                assert isinstance(record, SessionRecord)
                if _key(batch.details[row]) is None and routing.of_session(None, record.mode) is Mode.RECURRENT:
                    self._resident.add(record)
                self._leave(batch, row)
            self.ran += len(kept)
            plain = kept if not singles else [row for row in kept if not asks[row]]
            if results is not None and plain:
                first = committed[plain[0]]
                assert isinstance(first, SessionRecord)
                results.durable = first.durable
                self._count(results, batch, plain)
                self._answer_all(batch, results, plain)
            for row in singles:
                record = committed[row]
                if isinstance(record, SessionRecord):
                    takes = sampled is not None and bool(sampled[row])
                    given = *made[row], input_ids[row], tickets[row], record.durable
                    self._answer_one(batch, row, *given, sampled=takes)

        self._committing.append(batch)
        task = asyncio.create_task(commit())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _uncommitted(self, batch: StepBatch, committed: Sequence[Appended]) -> None:
        """Fails the rows whose commit failed. Passes those whose session had changed to the general procedure."""
        conflicts = np.array([one is None for one in committed], np.bool_)
        if conflicts.any():
            self._hand_back(batch.part(conflicts), entered=True, conflicts=1)
        for row, error in enumerate(committed):
            if isinstance(error, Exception):
                self._leave(batch, row)
                batch.receivers[row].step_failed(error, batch.numbers[row])

    def close(self, error: Exception) -> None:
        """Fails the queued steps."""
        waiting, self._rows = self._rows, []
        for row in waiting:
            self._leave_row(row[0], row[9])
            row[6].step_failed(error, row[7])
        if self._timer is not None:
            self._timer.cancel()

    async def settled(self) -> None:
        """Waits for the commits in progress."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _run_alone(self, batch: StepBatch, failure: Exception) -> None:
        """Queues the rows of a batch whose run failed. Each runs alone, so that only rows with a fault fail."""
        if len(batch) == 1:
            self._fail(batch, failure)
            return
        rows = batch.rows()
        if not self._rows:
            self._flushes = self._resident.flushes
            self._queue_columns()
        for index, row in enumerate(rows):
            details = row[9] or StepDetails()
            details.runs_alone = True
            rows[index] = (*row[:9], details)
        self._rows[:0] = rows

    def _fail(self, batch: StepBatch, cause: Exception) -> None:
        """Fails rows whose run failed. They have no effect."""
        for row, (receiver, number) in enumerate(zip(batch.receivers, batch.numbers, strict=True)):
            self._failed.inc()
            logger.error("a run of the graph step failed", exc_info=cause)
            failure = WaneError("the model failed to run")
            failure.__cause__ = cause
            self._leave(batch, row)
            receiver.step_failed(failure, number)

    def _ring_at(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_at(deadline, self._ring)

    def _ring(self) -> None:
        """Fails the queued and running steps whose deadline has passed, and sets the next timer."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        late = [row for row in self._rows if _has_passed(row[5], now_s)]
        self._rows = [row for row in self._rows if not _has_passed(row[5], now_s)]
        late_running = list[tuple[StepReceiver, int]]()
        deadlines = [row[5] for row in self._rows]
        for running in [*self._held, *self._committing]:
            passed = [_has_passed(deadline, now_s) for deadline in running.deadlines]
            late_running += compress(zip(running.receivers, running.numbers, strict=True), passed)
            running.deadlines = tuple(
                None if is_late else deadline for is_late, deadline in zip(passed, running.deadlines, strict=True)
            )
            deadlines += running.deadlines
        if known := [deadline for deadline in deadlines if deadline is not None]:
            self._ring_at(min(known))
        # Receivers are notified last, because a notified receiver may submit another step immediately.
        for session, _, _, _, _, _, receiver, number, queued_s, details in late:
            self._drop(session, receiver, number, details, queued_s)
        for receiver, number in late_running:
            if not receiver.done():
                receiver.step_failed(DeadlineExceeded(STILL_COMMITS), number)

    def _drop(
        self, session: str, receiver: StepReceiver, number: int, details: StepDetails | None, queued_s: float
    ) -> None:
        """Withdraws a step that is abandoned or late. Notifies the step's receiver if the receiver still waits."""
        self._leave_row(session, details)
        is_late = not receiver.done()
        (self._too_late if is_late else self._abandoned).inc()
        if details is not None and details.traced is not None:
            details.traced.skipped(queued_s, time.perf_counter(), "deadline" if is_late else "abandoned")
        if is_late:
            receiver.step_failed(DeadlineExceeded(TOO_LATE), number)

    def _leave(self, batch: StepBatch, row: int) -> None:
        self._leave_row(batch.sessions[row], batch.details[row])

    def _leave_row(self, session: str, details: StepDetails | None) -> None:
        """Releases what a row that has ended owns: its slots, its session's lock, and its place among the requests."""
        if self._free(details):
            self._locks.leave(session)
            self._admission.leave()

    def _free(self, details: StepDetails | None) -> bool:
        """Releases a row's slots. Returns whether the row also owns the session's lock."""
        stored = None if details is None else details.stored
        if stored is None:
            return True
        if stored.ticket is not None:
            return False
        self._state_cache.release(stored.read)
        self._state_cache.release(stored.write)
        return True

    def _extend(self, batch: StepBatch, rows: Sequence[int]) -> None:
        """Keeps the requests whose answers wait for a proof counted as active."""
        for row in rows:
            if batch.request(row).prove:
                self._admission.extend()

    def _hand_back(self, batch: StepBatch, *, entered: bool, conflicts: int = 0) -> None:
        """Passes the steps to the general procedure, which takes over the locks of the steps' sessions. A request that
        waits for such a lock therefore runs after the step. A step for which the general procedure waits gets a
        `Conflict`.

        `entered` says whether the steps were in a batch that ran. Such steps commit even if they are abandoned.
        `conflicts`: see `Ticket`.
        """
        columns = zip(batch.receivers, batch.numbers, batch.deadlines, batch.details, strict=True)
        for row, (receiver, number, deadline, details) in enumerate(columns):
            if not self._free(details):
                receiver.step_failed(Conflict(), number)
                continue
            if receiver.done() and not entered:
                self._abandoned.inc()
                self._locks.leave(batch.sessions[row])
                self._admission.leave()
                continue
            ticket = Ticket(None if receiver.done() else deadline)
            # The current context may belong to another, traced request.
            ticket.admitted, ticket.traced = True, None if details is None else details.traced
            ticket.entered, ticket.abandoned = entered, receiver.done()
            ticket.conflicts = conflicts
            pending = Pending.of(self._procedure(batch.request(row), ticket), ticket)
            if not receiver.done():
                receiver.step_again(pending, number)

    # Answers

    def _sampled(self, batch: StepBatch) -> NDArray[np.bool_] | None:
        """Returns, for each row, whether its answer is sampled for a shadow: bool (B). None if no answers are."""
        sampler = self._builder.sampler
        if sampler is None:
            return None
        return np.array([sampler.chosen() for _ in batch.sessions], np.bool_)

    def _asking(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Returns, for each row, whether it is not answered by arrays: bool (B)."""
        if not any(batch.details):
            return np.zeros(len(batch), np.bool_)
        most = self._most_predictions
        return np.array([one is not None and one.asks(most) for one in batch.details], np.bool_)

    def _input_ids(self, batch: StepBatch, row: int, request: StepRequest) -> NDArray[np.int64]:
        """Returns the kept part of the model's input up to and including the row's token (see `SessionSteps`): int64
        (n). Returns an empty array if the row's answer does not depend on it. Must be called before the commit."""
        if self._builder.sampler is None and self._cache is None and not request.filter.exclude_seen:
            return NO_TOKENS
        details = batch.details[row]
        if details is not None and details.stored is not None:
            record = details.stored.record
            before, position, tokens = record.tail.ids(), record.position, details.stored.tokens
        else:
            before, position = self._resident.kept(batch.sessions[row], batch.slots.item(row))
            tokens = (batch.tokens.item(row),)
        if position <= len(before) and not self._starts_with_tokens:
            before = before[1:]  # without <eos>, which the model does not read
        return np.concatenate([before, np.array(tokens, np.int64)])

    def _ticket(self, batch: StepBatch, row: int, started_s: float, compute_s: float, batch_items: int) -> Ticket:
        """Returns the ticket of a row that is answered alone, with its latencies."""
        details, queued_s = batch.details[row], batch.queued_s.item(row)
        ticket = None if details is None else details.ticket
        if ticket is None:
            ticket = Ticket(batch.deadlines[row])
            ticket.admitted, ticket.traced = True, None if details is None else details.traced
            ticket.started_s, ticket.entered = queued_s, True
        ticket.queue_s += started_s - queued_s
        ticket.compute_s += compute_s
        ticket.batch_items = max(ticket.batch_items, batch_items)
        return ticket

    def _part(
        self,
        batch: StepBatch,
        row: int,
        position: int,
        dropped_tokens: int,
        input_ids: NDArray[np.int64],
        ticket: Ticket,
    ) -> tuple[AnswerPlan, ModeResult]:
        """Returns the plan and the result of a row that is answered alone."""
        request, outputs, details = batch.request(row), batch.outputs, batch.details[row]
        known: list[int] = []
        if request.filter.exclude_seen:
            known = input_ids[max(len(input_ids) - position, 0) :].tolist()
        stored = None if details is None else details.stored
        origin = StateSource.REBUILT if stored is not None and stored.was_rebuilt else StateSource.RESIDENT
        ranking = self._builder.rankings.of(request.filter, known)
        plan = AnswerPlan(Mode.RECURRENT, position, None, origin, position - dropped_tokens, ranking, request.cache)
        norms = outputs[NORMS][row].tolist() if NORMS in outputs else None
        result = RunResult(Row(outputs.only(ANSWERS), row, norms=norms))
        return plan, self._builder.part(plan, result, ticket.latency(), input_ids, recurrent=True)

    def _answer_one(
        self,
        batch: StepBatch,
        row: int,
        plan: AnswerPlan,
        part: ModeResult,
        input_ids: NDArray[np.int64],
        ticket: Ticket,
        durable: bool | None,
        *,
        sampled: bool,
    ) -> None:
        """Answers a committed row alone. A proof is searched only now, so that the step is committed even if the client
        cancels the request during a long search."""
        request, details, receiver, number = (
            batch.request(row),
            batch.details[row],
            batch.receivers[row],
            batch.numbers[row],
        )
        stored = None if details is None else details.stored
        is_counted = stored is None or stored.ticket is None

        def answer(part: ModeResult) -> Answer:
            made = self._builder.answer(
                plan,
                lambda: input_ids,
                part,
                None,
                request.top_k,
                ticket,
                prove=request.prove,
                session=batch.sessions[row],
                replayed=False,
                durable=durable,
                logits=request.logits,
                token_logprobs=None if details is None else details.token_logprobs,
                unknown=request.unknown + request.filter.unknown,
                sampled=sampled,
            )
            if stored is not None and stored.kind is StepKind.FIRST:
                made.created = True
            if is_counted:
                self._stats.made(made, None if receiver.done() else "step")
            return made

        async def prove() -> Answer:
            try:
                return answer(await self._builder.search(plan, part, ticket))
            finally:
                self._admission.leave()

        if request.prove:
            pending = Pending.of(prove(), ticket)
            if receiver.done():
                pending.cancel()
            else:
                receiver.step_again(pending, number)
            return
        try:
            made = answer(part)
        except Exception as error:  # the step is committed, but has no answer
            receiver.step_failed(error, number)
        else:
            _notify(receiver, made, number)

    def _answer_all(self, batch: StepBatch, results: StepResults, rows: Sequence[int] | None = None) -> None:
        """Answers the rows, or all rows, by arrays."""
        for row in range(len(batch)) if rows is None else rows:
            receiver = batch.receivers[row]
            if not receiver.done():
                _notify(receiver, results.answer(row), batch.numbers[row])

    def _results(
        self,
        batch: StepBatch,
        positions: NDArray[np.int64],
        dropped: NDArray[np.int64],
        shares: CacheShares | None,
        started_s: float,
        compute_s: float,
        batch_items: int,
    ) -> StepResults:
        """Returns the answers to the batch's steps. positions: the sessions' positions after the steps, int64 (B).
        dropped: the number of first tokens that each state has not read, int64 (B). shares: the cache's part of the
        answers, if the model has a cache."""
        results, outputs = StepResults(), batch.outputs
        results.top_k = batch.top_k
        results.durable = None
        results.positions = positions.tolist()
        if self._certificate.readout is not None and self._certificate.has_rounding:
            known = np.where(dropped, positions - dropped, 0).tolist()
            results.bounds = bounds.of_steps(self._certificate, known, outputs[NORMS])
        elif dropped.any():
            results.bounds = [
                self._bound_of(known) if lost else self._bound_of_all
                for known, lost in zip((positions - dropped).tolist(), dropped.tolist(), strict=True)
            ]
        else:
            results.bounds = [self._bound_of_all] * len(batch)
        width = min(max(FEW, max(batch.top_k) + len(self._unlisted)), outputs.most)
        if shares is None or self._cache is None:
            self._largest(results, outputs, width)
        else:
            self._largest_of_mixtures(results, self._cache, shares, outputs, width)
        results.sessions = batch.sessions
        results.compute_ms = 1e3 * compute_s
        results.queue_ms = (1e3 * (started_s - batch.queued_s)).tolist()
        results.total_ms = (1e3 * (time.perf_counter() - batch.queued_s)).tolist()
        results.batch_items = batch_items
        results.identity, results.vocabulary = self._identity, self._vocabulary
        return results

    def _largest(self, results: StepResults, outputs: Outputs, width: int) -> None:
        """Sets the fields of `results` for the most probable tokens and for the proof of the first of these tokens."""
        top = outputs.top(width)
        if self._unlisted:
            top = TopColumns(*self._without_unlisted(top.ids, top.logits), top.log_sum_exp)
        logprobs = top.logprobs
        results.ids, results.logprobs = top.ids.tolist(), logprobs.tolist()
        results.probabilities = np.exp(logprobs).tolist()
        results.cache_tokens = None
        results.proved = self._proved(results.bounds, top.ids, top.logits, outputs)

    def _largest_of_mixtures(
        self, results: StepResults, cache: CacheMixture, found: CacheShares, outputs: Outputs, width: int
    ) -> None:
        """Like `_largest`, for mixtures with a cache. Also replaces the bounds of the network's answers in `results` by
        the bounds of the mixtures. `found` holds the cache's part of each row's mixture."""
        logits, ids = outputs["logits"], outputs[TOP_IDS]
        sums = outputs[LOG_SUM_EXP].astype(np.float64).reshape(-1)
        top = cache.top(logits, sums, ids, found, width)
        probabilities, top_ids = top.probabilities, top.ids
        if self._unlisted:
            top_ids, probabilities = self._without_unlisted(top_ids, probabilities)
        results.ids, results.probabilities = top_ids.tolist(), probabilities.tolist()
        results.logprobs = np.log(probabilities).tolist()
        results.cache_tokens = found.tokens.tolist()
        unknown = [cache.unknown(*known) for known in zip(results.cache_tokens, results.positions, strict=True)]
        errors = [
            math.inf if one is None or one.runs is None or more else one.runs
            for one, more in zip(results.bounds, unknown, strict=True)
        ]
        results.bounds = [*map(bounds.of_mixture, results.bounds, found.network.tolist(), unknown)]
        if min(errors) == math.inf:
            results.proved = [False] * len(errors)
            return

        results.proved = self._margin.proves_mixtures(
            probabilities, outputs.lengths, found.network, np.array(errors)
        ).tolist()

    def _without_unlisted(
        self, ids: NDArray[np.int64], values: NDArray[Float]
    ) -> tuple[NDArray[np.int64], NDArray[Float]]:
        """Removes the U tokens that are never listed. `ids` and `values` have the K most probable tokens of each of B
        rows: (B, K). Returns the first K - U remaining tokens of each row, in the same order: (B, K - U)."""
        most = ids.shape[1] - len(self._unlisted)
        is_unlisted = ids == self._unlisted[0]
        for token in self._unlisted[1:]:  # faster than np.isin for the usual one or two tokens
            is_unlisted |= ids == token
        if not is_unlisted.any():
            return ids[:, :most], values[:, :most]
        if len(ids) == 1:
            kept = np.flatnonzero(~is_unlisted[0])[:most]
            return ids[:, kept], values[:, kept]
        changed = np.flatnonzero(is_unlisted.any(axis=1))
        order = np.argsort(is_unlisted[changed], axis=1, kind="stable")[:, :most]
        listed_ids, listed_values = ids[:, :most].copy(), values[:, :most].copy()
        listed_ids[changed], listed_values[changed] = ids[changed[:, None], order], values[changed[:, None], order]
        return listed_ids, listed_values

    def _proved(
        self,
        found: Sequence[Bound | None],
        ids: NDArray[np.int64],
        logits: NDArray[np.float64],
        outputs: Outputs,
    ) -> list[bool]:
        """Returns, for each row, whether the margin proof succeeds."""
        errors_known = [None if one is None else one.runs for one in found]
        if errors_known.count(None) == len(found):
            return [False] * len(found)
        lengths = outputs.lengths
        if len(found) <= bounds.FEW_ROWS:
            return self._proved_one_by_one(errors_known, ids, logits, lengths, outputs)
        known = np.array([error is not None for error in errors_known])
        errors = np.array([error or 0.0 for error in errors_known])
        settled = self._margin.settled(ids, logits, lengths, errors)
        proved = (settled == 1) & known
        for row in np.flatnonzero((settled < 0) & known).tolist():
            proved[row] = self._has_no_rival(outputs, row, ids.item(row, 0), errors.item(row))
        flags: list[bool] = proved.tolist()
        return flags

    def _proved_one_by_one(
        self,
        errors_known: Sequence[float | None],
        ids: NDArray[np.int64],
        logits: NDArray[np.float64],
        lengths: NDArray[np.float64],
        outputs: Outputs,
    ) -> list[bool]:
        """Like `_proved`, for few rows, for which Python is faster than some twenty numpy calls."""
        flags: list[bool] = []
        rows = zip(errors_known, ids[:, :2].tolist(), logits[:, :2].tolist(), lengths.tolist(), strict=True)
        for row, (error, (first, second), (highest, next_one), length) in enumerate(rows):
            if error is None:
                flags.append(False)
                continue
            settled = self._margin.settles(first, second, highest - next_one, length, error)
            if settled is None:
                at, errors = slice(row, row + 1), np.array([error])
                (sign,) = self._margin.settled(ids[at], logits[at], lengths[at], errors).tolist()
                settled = sign == 1 or (sign < 0 and self._has_no_rival(outputs, row, first, error))
            flags.append(settled)
        return flags

    def _has_no_rival(self, outputs: Outputs, row: int, first: int, error: float) -> bool:
        logits, hidden = outputs.row("logits", row), outputs.row(HIDDEN, row)
        return self._margin.has_no_rival(logits, hidden, error, first, among=self._builder.rankings.default.ids)

    def _count(self, results: StepResults, batch: StepBatch, rows: Sequence[int]) -> None:
        """Counts the answers of rows that the general procedure does not count."""
        if any(batch.details):
            rows = [row for row in rows if (one := batch.details[row]) is None or one.ticket is None]
        found = [results.bounds[row] for row in rows]
        self._stats.stepped(
            (
                [results.queue_ms[row] for row in rows],
                [results.compute_ms] * len(rows),
                [results.total_ms[row] for row in rows],
            ),
            [None if one is None else one.variation for one in found],
            sum([results.proved[row] for row in rows]),
            sum([not batch.receivers[row].done() for row in rows]),
        )


def _notify(receiver: StepReceiver, answer: Answer, number: int) -> None:
    """Passes an answer to a receiver. Its error must not keep the other receivers waiting."""
    try:
        receiver.step_ran(answer, number)
    except Exception as error:
        asyncio.get_running_loop().call_exception_handler({"message": "a step was not answered", "exception": error})


def _key(details: StepDetails | None) -> str | None:
    """Returns the idempotency key of a row."""
    return None if details is None or details.request is None else details.request.idempotency_key


def _has_passed(deadline: float | None, now_s: float) -> bool:
    return deadline is not None and deadline <= now_s
