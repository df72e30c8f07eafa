"""Windows that are all that is asked for, without a task of their own.

Such a request needs one run of tokens that it brings along, and no state. It stands in the batcher's queue, and is
answered when its row is there, on the event loop's thread, with no switch between tasks on the way. Only where a proof
of its first token is sought, which takes a thread of its own, a task waits for that. What an answer means is the same
as in `predict.py`, which takes all other requests that bring everything along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from wane.service.batching.batch import Row, Work
from wane.service.batching.batcher import Batcher
from wane.service.batching.ticket import Ticket
from wane.service.engine.answer import AnswerBuilder, AnswerPlan, ModeResult
from wane.service.engine.forward import run_result, sequence
from wane.service.engine.limits import Limits
from wane.service.errors import Unavailable
from wane.service.types import Answer, Mode, PredictRequest


class InlineWindows:
    """Takes the windows of one model through; under the engine, beside `Predictor`."""

    def __init__(
        self,
        eos_id: int,
        limits: Limits,
        batcher: Batcher,
        answer_builder: AnswerBuilder,
        *,
        on_begin: Callable[[], object],
        on_end: Callable[[], object],
    ) -> None:
        """`on_begin` is told of every window that is queued, and `on_end` when it is over."""
        self.eos_id = eos_id
        self.answer_builder = answer_builder
        self.on_end = on_end
        self._limits = limits
        self._batcher = batcher
        self._on_begin = on_begin

    def begin(self, request: PredictRequest, ticket: Ticket) -> InlineWindow | None:
        """The window, in the batcher's queue; None, and nothing done, where something else is asked for.

        Raises Overloaded, Unavailable.
        """
        if request.mode is not Mode.WINDOW or request.session is not None:
            return None
        k, tokens = request.window or self._limits.window, request.tokens
        whole = k >= len(tokens) and not request.truncated
        context_ids = np.array((self.eos_id, *tokens) if whole else tokens[-k:], np.int64)
        course = AnswerPlan.of_prompt(Mode.WINDOW, len(tokens), k, truncated=request.truncated)
        window = InlineWindow(self, request, ticket, course, Work("window", context_ids))
        self._batcher.enqueue(window)
        self._on_begin()
        return window


class InlineWindow:
    """One window on its way: to the batcher an item, to whoever asked that the future of an answer."""

    __slots__ = ("_course", "_over", "_proof", "_windows", "answer", "queued_s", "request", "ticket", "work")

    def __init__(
        self, windows: InlineWindows, request: PredictRequest, ticket: Ticket, course: AnswerPlan, work: Work
    ) -> None:
        self._windows = windows
        self._course = course
        self._over = False
        self._proof: asyncio.Task[Answer] | None = None
        self.request = request
        self.ticket = ticket
        self.queued_s = 0.0
        self.work = work
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        """Nobody waits any more: it leaves no trace, wherever it is."""
        if self._proof is not None:
            self._proof.cancel()
        if not self._over:
            self._end()

    leave = cancel

    def cancelled(self) -> bool:
        """Whether the batcher may skip it."""
        return self._over

    def resolve(self, row: Row) -> None:
        """Its run is over: it is answered, at once or when a proof was sought."""
        if self._over:
            return
        answer_builder, course = self._windows.answer_builder, self._course
        try:
            part = answer_builder.part(course, run_result(row), self.ticket.latency(), recurrent=False)
            if answer_builder.seeks(part, part.bound):
                self._proof = asyncio.create_task(self._prove(part))
                self._proof.add_done_callback(self._proved)
            else:
                self._succeed(answer_builder.of_window(course, self._fed, part, row, self.request.top_k))
        except Exception as error:  # is this window's own, and no reason for others of its batch to fail
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """It was not run, or in vain."""
        if self._over:
            return
        self._end()
        if not self.answer.done():
            self.answer.set_exception(error)

    async def _prove(self, part: ModeResult) -> Answer:
        return await self._windows.answer_builder.answer(
            self._course, self._fed(), None, part, self.request.top_k, self.ticket
        )

    def _proved(self, proof: asyncio.Task[Answer]) -> None:
        self._proof = None
        if self._over:
            return
        error = Unavailable("the server is stopping") if proof.cancelled() else proof.exception()
        if error is None:
            self._succeed(proof.result())
        else:
            self.fail(error)

    def _fed(self) -> NDArray[np.int64]:
        return sequence(self._windows.eos_id, self.request.tokens, truncated=self.request.truncated)

    def _succeed(self, answer: Answer) -> None:
        self._end()
        if not self.answer.done():
            self.answer.set_result(answer)

    def _end(self) -> None:
        self._over = True
        self._windows.on_end()
