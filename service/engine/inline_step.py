"""Steps that need one run and nothing else, without a task of their own.

Most steps are of one token, of a session whose state is resident, in a store that answers at once, with nobody else at
that session. Such a step is checked out where it is asked for, stands in the batcher's queue itself, and is committed
and answered when its row is there, with the others of its batch: all on the event loop's thread, with no switch between
tasks on the way. What a step means is the same as in `step.py`, which takes all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from wane.service.batching.batch import Row, Work
from wane.service.batching.batcher import Batcher
from wane.service.batching.ticket import Ticket
from wane.service.engine import routing
from wane.service.engine.step_answers import StepAnswers
from wane.service.sessions.sessions import Sessions, StepKind, classify_step
from wane.service.sessions.stores.store import SessionRecord
from wane.service.state.pool import StatePool
from wane.service.types import Answer, Mode, StepRequest


class InlineRun:
    """Takes through those steps of one model that need one run; under the engine, beside `Steps`."""

    def __init__(
        self,
        pool: StatePool,
        batcher: Batcher,
        sessions: Sessions,
        answers: StepAnswers,
        *,
        on_state_hit: Callable[[], object],
        on_begin: Callable[[], object],
        on_end: Callable[[], object],
    ) -> None:
        """`on_state_hit` is told of every state that was needed and resident, `on_begin` of every step that is queued,
        and `on_end` when it is over."""
        self._pool = pool
        self._batcher = batcher
        self._sessions = sessions
        self._answers = answers
        self._on_found = on_state_hit
        self._on_begin = on_begin
        self._on_end = on_end
        self._given: list[tuple[InlineStep, Row]] = []
        batcher.on_handed_out = self._settle

    def begin(self, request: StepRequest, ticket: Ticket) -> InlineStep | None:
        """The step, in the batcher's queue; None, and nothing done, where it is none for here.

        Raises UnknownSession, PositionConflict, Overloaded, Unavailable.
        """
        sessions = self._sessions
        if len(request.tokens) > 1 or not sessions.at_once:
            return None
        if not sessions.take_turn(request.session):
            return None
        step: InlineStep | None = None
        try:
            step = self._check_out(request, ticket)
            return step
        finally:
            if step is None:
                sessions.leave_turn(request.session)

    def _check_out(self, request: StepRequest, ticket: Ticket) -> InlineStep | None:
        sessions = self._sessions
        record = sessions.read_at_once(request.session)
        if routing.of_session(request.mode, record.mode) is not Mode.RECURRENT or record.mode is Mode.WINDOW:
            return None
        if classify_step(record, request) is StepKind.REPLAY:
            return None
        resident = sessions.cached(record)
        if resident is None:
            return None
        slot = self._pool.acquire()
        step = InlineStep(self, request, ticket, record, resident.slot, slot, resident.dropped_tokens)
        try:
            self._batcher.enqueue(step)
        except BaseException:
            self._pool.release(slot)
            raise
        self._on_begin()
        if record.position:
            self._on_found()
        return step

    def resolve(self, step: InlineStep, row: Row) -> None:
        """A step was run; what follows waits for the others of its batch."""
        self._given.append((step, row))

    def _settle(self) -> None:
        """Commits the steps of a batch, and answers whoever still waits. What fails is a step's own, and no reason for
        others to fail."""
        given, self._given = self._given, []
        answers = self._answers.of_batch()
        for step, row in given:
            try:
                committed = self._commit(step)
                if committed is None:
                    step.tell(None)
                else:
                    step.tell(answers.of_step(step.request, committed, step.dropped_tokens, row, step.ticket))
            except Exception as error:
                step.tell(error)
        answers.count()

    def _commit(self, step: InlineStep) -> SessionRecord | None:
        """None where the comparison was lost. The session is left in any case."""
        try:
            return self._sessions.commit_at_once(step.record, step.request, step.slot, step.dropped_tokens)
        finally:
            self.leave(step)

    def leave(self, step: InlineStep) -> None:
        """The step is over, however it went."""
        self._pool.release(step.slot)
        self._sessions.leave_turn(step.record.session)
        self._on_end()


class InlineStep:
    """One step on its way: to the batcher an item, to whoever asked that the future of an answer.

    The answer is None where the comparison was lost to another writer, and nothing was appended.
    """

    __slots__ = (
        "_over",
        "_quick",
        "answer",
        "dropped_tokens",
        "given",
        "queued_s",
        "record",
        "request",
        "slot",
        "ticket",
        "work",
    )

    def __init__(
        self,
        quick: InlineRun,
        request: StepRequest,
        ticket: Ticket,
        record: SessionRecord,
        read: int,
        slot: int,
        dropped_tokens: int,
    ) -> None:
        """`slot` is where the next state goes, made from that in `read`; both know all but `dropped_tokens` tokens."""
        self._quick = quick
        self._over = False
        self.request = request
        self.ticket = ticket
        self.record = record
        self.slot = slot
        self.dropped_tokens = dropped_tokens
        self.queued_s = 0.0
        self.work = Work("step", request.tokens, None, read, slot, True)
        self.answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self.given: Answer | None = None  # once it is there

    def cancel(self) -> None:
        """Nobody waits any more. To be called before it enters a batch: then there is no trace of it."""
        if not self._over:  # else its deadline has passed in the queue
            self._end()

    def leave(self) -> None:
        """Nobody waits any more: it is taken back if it has not entered a batch."""
        if not self.ticket.entered:
            self.cancel()

    def cancelled(self) -> bool:
        """Whether the batcher may skip it."""
        return self._over

    def resolve(self, row: Row) -> None:
        """Its run is over."""
        self._over = True
        self._quick.resolve(self, row)

    def fail(self, error: Exception) -> None:
        """It was not run, or in vain: nothing was changed."""
        if not self._over:
            self._end()
            self.tell(error)

    def tell(self, answer: Answer | Exception | None) -> None:
        """Whoever still waits is answered."""
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.given = answer
            self.answer.set_result(answer)

    def _end(self) -> None:
        self._over = True
        self._quick.leave(self)
