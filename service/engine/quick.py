"""Steps that need one run and nothing else, without a task of their own.

Most steps are of one token, of a session whose state is resident, in a store that answers at once, with nobody else at
that session. Such a step is checked out where it is asked for, stands in the batcher's queue as the future of its row,
and is committed and answered when that is there: all on the event loop's thread, with no switch between tasks on the
way. What a step means is the same as in `steps.py`, which takes all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from service.engine import routing
from service.engine.answering import Answering, Course
from service.engine.answers import Answer
from service.engine.batch import Row, Work
from service.engine.batcher import Batcher
from service.engine.forward import outcome
from service.engine.mode import Mode, Origin
from service.engine.requests import StepRequest
from service.engine.sessions import Place, Sessions, place
from service.engine.slab import Slab
from service.engine.ticket import Ticket
from service.stores.store import Record


class Quick:
    """Takes through those steps of one model that need one run; under the engine, beside `Steps`."""

    def __init__(
        self,
        slab: Slab,
        batcher: Batcher,
        sessions: Sessions,
        answering: Answering,
        *,
        on_found: Callable[[], object],
        on_begin: Callable[[], object],
        on_end: Callable[[], object],
    ) -> None:
        """`on_found` is told of every state that was needed and resident, `on_begin` of every step that is queued,
        and `on_end` when it is over."""
        self._slab = slab
        self._batcher = batcher
        self._sessions = sessions
        self._answering = answering
        self._on_found = on_found
        self._on_begin = on_begin
        self._on_end = on_end

    def begin(self, request: StepRequest, ticket: Ticket) -> QuickStep | None:
        """The step, in the batcher's queue; None, and nothing done, where it is none for here.

        Raises UnknownSession, PositionConflict, Overloaded, Unavailable.
        """
        sessions = self._sessions
        if len(request.tokens) > 1 or not sessions.at_once:
            return None
        if not sessions.take_turn(request.session):
            return None
        step: QuickStep | None = None
        try:
            step = self._check_out(request, ticket)
            return step
        finally:
            if step is None:
                sessions.leave_turn(request.session)

    def _check_out(self, request: StepRequest, ticket: Ticket) -> QuickStep | None:
        sessions = self._sessions
        record = sessions.read_at_once(request.session)
        if routing.of_session(request.mode, record.mode) is not Mode.RECURRENT or record.mode is Mode.WINDOW:
            return None
        if place(record, request) is Place.REPLAY:
            return None
        resident = sessions.resident(record)
        if resident is None:
            return None
        slot = self._slab.acquire()
        step = QuickStep(self, request, ticket, record, slot, resident.cut)
        work = Work("step", np.array(request.tokens, np.int64), read=resident.slot, write=slot, binding=True)
        try:
            self._batcher.enqueue(work, ticket, step)
        except BaseException:
            self._slab.release(slot)
            raise
        self._on_begin()
        if record.position:
            self._on_found()
        return step

    def finish(self, step: QuickStep, row: Row) -> Answer | None:
        """Commits and answers; None where the comparison was lost. The session is left in any case."""
        request, record = step.request, step.record
        try:
            committed = self._sessions.commit_at_once(record, request, step.slot, step.cut)
        finally:
            self.leave(step)
        if committed is None:
            return None
        position = committed.position
        course = Course(Mode.RECURRENT, position, None, Origin.RESIDENT, position - step.cut)
        return self._answering.of_step(
            course, committed.tail.ids, outcome(row), request.top_k, step.ticket, record.session
        )

    def leave(self, step: QuickStep) -> None:
        """The step is over, however it went."""
        self._slab.release(step.slot)
        self._sessions.leave_turn(step.record.session)
        self._on_end()


class QuickStep:
    """One step on its way: to the batcher the future of a row, to whoever asked that of an answer.

    The answer is None where the comparison was lost to another writer, and nothing was appended.
    """

    __slots__ = ("_over", "_quick", "answer", "cut", "record", "request", "slot", "ticket")

    def __init__(self, quick: Quick, request: StepRequest, ticket: Ticket, record: Record, slot: int, cut: int) -> None:
        """`slot` is where the next state goes, which knows all but `cut` tokens."""
        self._quick = quick
        self._over = False
        self.request = request
        self.ticket = ticket
        self.record = record
        self.slot = slot
        self.cut = cut
        self.answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()

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

    def done(self) -> bool:
        """Whether there is nothing to be told to it any more."""
        return self._over

    def set_result(self, row: Row) -> None:
        """Its run is over: commits, and answers whoever still waits."""
        self._over = True
        try:
            answer = self._quick.finish(self, row)
        except Exception as error:  # is this step's own, and no reason for others of its batch to fail
            self._fail(error)
        else:
            if not self.answer.done():
                self.answer.set_result(answer)

    def set_exception(self, error: BaseException) -> None:
        """It was not run, or in vain: nothing was changed."""
        self._end()
        self._fail(error)

    def _end(self) -> None:
        self._over = True
        self._quick.leave(self)

    def _fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
