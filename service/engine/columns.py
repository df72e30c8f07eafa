"""Runs steps of one token in columns. The data of a batch of steps, from the states to the answers, is in arrays with
one row for each step.

A step is taken in columns only if the session's state is resident, no other request holds the session's lock, and live
answers are not sampled for shadows. The step must have no idempotency key, must not be traced, must not set a mode
other than auto, and must not have a filter or unknown events. It must not ask for a proof, for logits, for the tokens'
log-probabilities or for an answer without the cache. A step in columns is passed to the general procedure (`step.py`)
if it is a replay or a conflict, if its state has been evicted, or if the run of its batch fails. The tests compare the
answers of steps in columns with those of the general procedure.

A step that has entered a batch is committed, even if its client has disconnected.
"""

from __future__ import annotations

import asyncio
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
from wane.models.manifest import Certificate
from wane.models.vocabulary import Vocabulary
from wane.service.batching.batch import ColumnBatch
from wane.service.batching.ticket import Ticket
from wane.service.deadline import TOO_LATE
from wane.service.engine import bounds
from wane.service.engine.bounds import Bound
from wane.service.engine.logits import Ranking, listed
from wane.service.engine.pending import STILL_COMMITS, Admission, Pending
from wane.service.engine.stats import Stats
from wane.service.engine.top1_proof import MarginProof
from wane.service.errors import DeadlineExceeded
from wane.service.observability.metrics import Metrics
from wane.service.runners.outputs import FEW, Largest, Outputs, TopColumns
from wane.service.runners.runner import HIDDEN, LOG_SUM_EXP, NORMS, TOP_IDS
from wane.service.sessions.lock import SessionLocks
from wane.service.sessions.resident import ResidentSessions
from wane.service.state.cache import StateCache
from wane.service.types import MAX_POSITION, Answer, Identity, Latency, Mode, Owner, StateSource, StepRequest, id_of

Float = TypeVar("Float", np.float32, np.float64)

NO_POSITION = -1  # the expected position of a step whose request has none
KNOWN_BOUNDS = 4096  # number of cached bounds, one for each number of tokens that a state has read


StepProcedure = Callable[[StepRequest, Ticket], Coroutine[Any, Any, Answer]]


class StepReceiver(Protocol):
    """Receives the results of one or several steps. The receiver identifies each step by a number that it chose."""

    creator: Owner | None
    """The `creator` of the steps whose results this receiver gets: see `StepRequest`."""

    def done(self) -> bool:
        """Returns whether the receiver has stopped waiting."""
        ...

    def step_ran(self, results: StepResults, row: int, number: int) -> None:
        """Receives the answer of a committed step, which is row `row` of `results`."""
        ...

    def step_failed(self, error: Exception, number: int) -> None:
        """Receives the error of a step that failed or missed its deadline."""
        ...

    def step_again(self, pending: Pending[Answer], number: int) -> None:
        """Receives the pending result of a step that had no effect in its batch and was passed to the general
        procedure."""
        ...


StepRow = tuple[str, int, int, int, int, float | None, StepReceiver, int, float]
"""A queued step: session, slot of the session's state, token, expected position (or NO_POSITION), top_k, deadline,
receiver, the number by which the receiver identifies the step, and the time of `time.perf_counter` when the step was
queued."""


class StepResults:
    """The answers to the steps of one batch. Most fields are lists of B rows. `compute_ms`, `batch_items`, `identity`
    and `vocabulary` are the same for all rows.

    ids, logprobs, probabilities: the most probable tokens, up to the largest `top_k` of the batch. cache_tokens: the
    number of tokens in each row's cache; None if the model has no cache.
    """

    __slots__ = (
        "batch_items",
        "bounds",
        "cache_tokens",
        "compute_ms",
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
            cache_tokens=None if self.cache_tokens is None else self.cache_tokens[row],
        )


class StepAnswer(Answer):
    """The answer to a step that ran in columns."""


class PendingStep(Pending[Answer]):
    """The pending result of a step that was taken in columns."""

    def __init__(self, creator: Owner | None = None) -> None:
        super().__init__()
        self.creator = creator
        self._general: Pending[Answer] | None = None

    def cancel(self, msg: object = None) -> bool:
        """See `Pending`."""
        if self._general is not None:
            self._general.cancel()
        return super().cancel(msg)

    def step_ran(self, results: StepResults, row: int, number: int) -> None:  # noqa: ARG002
        """See `StepReceiver`."""
        if not self.done():
            self.set_result(results.answer(row))

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


class StepBatch(ColumnBatch):
    """A batch of steps and their receivers: a column of B rows for each field of `StepRow`."""

    __slots__ = ("deadlines", "expected", "numbers", "receivers", "sessions", "top_k")

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
        ) = zip(*rows, strict=True)
        super().__init__(np.array(slots, np.intp), np.array(tokens, np.int64), np.array(queued_s, np.float64))
        self.expected: NDArray[np.int64] = np.array(expected, np.int64)

    def request(self, row: int) -> StepRequest:
        """Returns the step of a row as a request."""
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

    def part(self, rows: NDArray[np.bool_]) -> StepBatch:
        """Returns a batch of the selected rows and their outputs. rows: bool (B)."""
        part, flags = copy(self), rows.tolist()
        part.sessions, part.top_k, part.deadlines, part.receivers, part.numbers = (
            tuple(compress(column, flags))
            for column in (self.sessions, self.top_k, self.deadlines, self.receivers, self.numbers)
        )
        part.slots, part.tokens, part.queued_s = self.slots[rows], self.tokens[rows], self.queued_s[rows]
        part.expected = self.expected[rows]
        if len(self.outputs):
            part.outputs = self.outputs.part(rows)
        return part


class StepColumns:
    """Queues, runs and answers one model's steps in columns.

    All methods must be called on the event loop's thread.
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
        identity: Identity,
        procedure: StepProcedure,
        *,
        most_predictions: int,
        max_queue: int,
        queue_columns: Callable[[], None],
        ranking: Ranking,
        cache: CacheMixture | None = None,
    ) -> None:
        """`procedure` is the general procedure: it runs any admitted step, and releases the session's lock.
        `most_predictions` is the largest top_k for which the step graph outputs enough tokens; if 0, no step is taken
        in columns. `max_queue` limits the number of queued steps. `queue_columns` notifies the batcher that steps are
        queued. `ranking` selects the tokens that answers may list. `cache` is the model's cache, if it has one.
        """
        self._identity = identity
        self._vocabulary = vocabulary
        self._ranking = ranking
        self._size = vocabulary.size
        self._reserved = vocabulary.reserved
        self._unlisted = vocabulary.unlisted
        self._state_cache = state_cache
        self._slots = state_cache.order
        self._buffered = resident.buffered
        self._resident = resident
        self._cache = cache
        self._locks = locks
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
        self._rows: list[StepRow] = []
        self._flushes = 0  # `ResidentSessions.flushes` when the first of the queued steps was queued
        self._held: list[StepBatch] = []  # batches that run on the runner's thread or are queued for it
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._certificate = certificate
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
    ) -> bool:
        """Queues a step. Returns False, without side effects, if the step needs the general procedure."""
        slot = self._slots.get(session)
        if (
            slot is None
            or not self._buffered[slot]
            or not 0 <= token < self._size
            or token in self._reserved
            or not 0 < top_k <= self._most_predictions
            or (expected_position is not None and not 0 <= expected_position <= MAX_POSITION)
            or len(self._rows) >= self._max_queue
            or self._admission.closed
            or not self._locks.take(session)
        ):
            return False
        position = NO_POSITION if expected_position is None else expected_position
        if not self._rows:
            self._flushes = self._resident.flushes
            self._queue_columns()
        self._rows.append((session, slot, token, position, top_k, deadline, receiver, number, time.perf_counter()))
        self._admission.enter()
        if deadline is not None and (self._timer is None or deadline < self._timer_at):
            self._ring_at(deadline)
        return True

    def begin(self, most: int) -> StepBatch | None:
        """Returns the next batch, of at most `most` rows; None if no queued step can be run."""
        waiting, self._rows = self._rows[:most], self._rows[most:]
        if not waiting:
            return None
        batch, flushes = StepBatch(waiting), self._flushes
        now_s = asyncio.get_running_loop().time()
        if (
            True in [one.done() for one in batch.receivers]
            or min([one or now_s + 1 for one in batch.deadlines]) <= now_s
        ):
            batch = self._without_late(batch, now_s)
            if not len(batch):
                return None
        good = (batch.expected == NO_POSITION) | (batch.expected == self._state_cache.positions[batch.slots])
        good &= self._resident.alive(batch.slots)
        if self._resident.flushes != flushes:  # a flush may have been for the eviction of a queued step's state
            good &= self._resident_still(batch)
        if good.all():
            return batch
        # The general procedure starts in the next iteration of the event loop. By then, the batch has run, or the slots
        # of its states are retained. If the general procedure started now, it could evict these states.
        asyncio.get_running_loop().call_soon(partial(self._hand_back, batch.part(~good), entered=False))
        batch = batch.part(good)
        return batch if len(batch) else None

    def _without_late(self, batch: StepBatch, now_s: float) -> StepBatch:
        """Returns the batch without the steps that are abandoned or late, and withdraws those steps."""
        good = np.ones(len(batch), np.bool_)
        for row, (receiver, deadline) in enumerate(zip(batch.receivers, batch.deadlines, strict=True)):
            if receiver.done() or _has_passed(deadline, now_s):
                good[row] = False
                self._drop(batch.sessions[row], receiver, batch.numbers[row])
        return batch.part(good)

    def _resident_still(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Returns, for each step of the batch, whether the session's state is still in the same slot as when the step
        was queued: bool (B)."""
        slots = [self._resident.slot(session) for session in batch.sessions]
        return np.array([slot == now for slot, now in zip(batch.slots.tolist(), slots, strict=True)], np.bool_)

    def hold(self, running: ColumnBatch) -> None:
        """Retains the slots of a batch's states until `finish`, because the batch runs on the runner's thread."""
        assert isinstance(running, StepBatch), "the batch is not a batch of steps in columns: this is a bug"
        self._held.append(running)
        for slot in running.slots.tolist():
            self._state_cache.retain(slot)

    def finish(self, ran: ColumnBatch, started_s: float, compute_s: float) -> None:
        """Commits and answers the steps of a batch. `started_s` is when the run of the batch started, by
        `time.perf_counter`."""
        assert isinstance(ran, StepBatch), "the batch is not a batch of steps in columns: this is a bug"
        batch, good = ran, np.ones(len(ran), np.bool_)
        if batch in self._held:
            self._held.remove(batch)
            self._state_cache.release_all(batch.slots.tolist())
            good = self._resident_still(batch)
            self._conflicts.inc(int(np.count_nonzero(~good)))
        if batch.failure is not None:
            self._hand_back(batch, entered=True)
            return
        good &= batch.outputs.finite
        if not good.all():
            asyncio.get_running_loop().call_soon(partial(self._hand_back, batch.part(~good), entered=True))
            batch = batch.part(good)
            if not len(batch):
                return
        self._resident.commit(batch.slots, batch.sessions, batch.tokens, batch.outputs)
        results = self._results(batch, started_s, compute_s, len(ran))
        self._count(results, batch)
        self._leave_all(batch.sessions)
        for row, (receiver, number) in enumerate(zip(batch.receivers, batch.numbers, strict=True)):
            try:
                receiver.step_ran(results, row, number)
            except Exception as error:  # one receiver's error must not keep the other receivers waiting
                loop = asyncio.get_running_loop()
                loop.call_exception_handler({"message": "a step was not answered", "exception": error})

    def close(self, error: Exception) -> None:
        """Fails the queued steps."""
        waiting, self._rows = self._rows, []
        for session, _, _, _, _, _, receiver, number, _ in waiting:
            self._leave(session)
            receiver.step_failed(error, number)
        if self._timer is not None:
            self._timer.cancel()

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
        for running in self._held:
            passed = [_has_passed(deadline, now_s) for deadline in running.deadlines]
            late_running += compress(zip(running.receivers, running.numbers, strict=True), passed)
            running.deadlines = tuple(
                None if is_late else deadline for is_late, deadline in zip(passed, running.deadlines, strict=True)
            )
            deadlines += running.deadlines
        if known := [deadline for deadline in deadlines if deadline is not None]:
            self._ring_at(min(known))
        # Receivers are notified last, because a notified receiver may submit another step immediately.
        for session, _, _, _, _, _, receiver, number, _ in late:
            self._drop(session, receiver, number)
        for receiver, number in late_running:
            if not receiver.done():
                receiver.step_failed(DeadlineExceeded(STILL_COMMITS), number)

    def _drop(self, session: str, receiver: StepReceiver, number: int) -> None:
        """Withdraws a step that is abandoned or late. Notifies the step's receiver if the receiver still waits."""
        self._leave(session)
        if receiver.done():
            self._abandoned.inc()
        else:
            self._too_late.inc()
            receiver.step_failed(DeadlineExceeded(TOO_LATE), number)

    def _leave(self, session: str) -> None:
        self._locks.leave(session)
        self._admission.leave()

    def _leave_all(self, sessions: Sequence[str]) -> None:
        waiting = self._locks.waiting
        for session in sessions:
            if waiting[session] is None:  # the code of `SessionLocks.leave`, inlined for speed
                del waiting[session]
            else:
                self._locks.leave(session)
        self._admission.leave(len(sessions))

    def _hand_back(self, batch: StepBatch, *, entered: bool) -> None:
        """Passes the steps to the general procedure, which takes over the locks of the steps' sessions. A request that
        waits for such a lock therefore runs after the step.

        `entered` says whether the steps were in a batch that ran. Such steps commit even if they are abandoned.
        """
        columns = zip(batch.receivers, batch.numbers, batch.deadlines, strict=True)
        for row, (receiver, number, deadline) in enumerate(columns):
            if receiver.done() and not entered:
                self._abandoned.inc()
                self._leave(batch.sessions[row])
                continue
            ticket = Ticket(None if receiver.done() else deadline)
            ticket.admitted, ticket.traced = True, None  # the current context may belong to another, traced request
            ticket.entered, ticket.abandoned = entered, receiver.done()
            pending = Pending.of(self._procedure(batch.request(row), ticket), ticket)
            if not receiver.done():
                receiver.step_again(pending, number)

    def _results(self, batch: StepBatch, started_s: float, compute_s: float, batch_items: int) -> StepResults:
        """Returns the answers to the batch's steps, which are committed already."""
        results, outputs = StepResults(), batch.outputs
        results.top_k = batch.top_k
        positions = self._state_cache.positions[batch.slots]
        results.positions = positions.tolist()
        dropped = self._state_cache.dropped_tokens[batch.slots]
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
        if self._cache is None:
            self._largest(results, outputs, width)
        else:
            self._largest_of_mixtures(results, self._cache, self._resident.shares(batch.slots), outputs, width)
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
        return self._margin.has_no_rival(logits, hidden, error, first, among=self._ranking.ids)

    def _count(self, results: StepResults, batch: StepBatch) -> None:
        self._stats.stepped(
            (results.queue_ms, [results.compute_ms] * len(batch), results.total_ms),
            [None if one is None else one.variation for one in results.bounds],
            sum(results.proved),
            len(batch) - sum([receiver.done() for receiver in batch.receivers]),
        )


def _has_passed(deadline: float | None, now_s: float) -> bool:
    return deadline is not None and deadline <= now_s
