"""The rows of a batch of steps: what each step asks, and how it is committed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from copy import copy
from itertools import compress
from operator import attrgetter, methodcaller

import numpy as np
from numpy.typing import NDArray

from wane.service.batching.batch import ColumnBatch
from wane.service.batching.ticket import Ticket
from wane.service.engine.pending import Pending
from wane.service.observability.tracing import Traced
from wane.service.sessions.stores.store import Commit
from wane.service.types.answer import Answer
from wane.service.types.request import NO_FILTER, Owner, StepRequest

NO_POSITION = -1  # the expected position of a step whose request has none


class StepRow(Pending[Answer]):
    """A step of one token, or the last token of a longer step, from its arrival to its answer, which is the result of
    this future.

    session: the key of the session. slot: the slot of its state before `token`. queued_s: when the step was queued, by
    `time.perf_counter`. request: the whole request, if it asks anything. traced: the trace of the request. creator: see
    `StepRequest`. stored: the commit by the store, whose slot is that of the next state; None if the session is
    buffered. was_rebuilt: whether the state was not in memory when the step began. waiting: the ticket of the step if
    the general procedure waits for the row. The procedure then keeps the session's lock and both slots until the row
    has its result. Otherwise it is None, and the row of a session that is not buffered owns them. token_logprobs: see
    `Answer`. runs_alone: the row ran in a batch that failed, and runs in a batch of its own. It then commits even if it
    is abandoned.
    position: the expected position of the session, or NO_POSITION. is_plain: whether the row has no request and no
    trace, and neither `stored` nor `runs_alone`.
    """

    slot = 0
    queued_s = 0.0
    stored: Commit | None = None
    was_rebuilt = False
    waiting: Ticket | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    runs_alone = False
    _general: Pending[Answer] | None = None

    def __init__(
        self,
        session: str,
        token: int,
        expected_position: int | None,
        top_k: int,
        deadline: float | None,
        request: StepRequest | None = None,
        traced: Traced | None = None,
        creator: Owner | None = None,
    ) -> None:
        super().__init__()
        self.session = session
        self.token = token
        self.position = NO_POSITION if expected_position is None else expected_position
        self.top_k = top_k
        self.deadline = deadline
        self.request = request
        self.traced = traced
        self.creator = creator
        self.is_plain = request is None and traced is None

    @property
    def expected_position(self) -> int | None:
        """See `StepRequest`."""
        return None if self.position == NO_POSITION else self.position

    @property
    def key(self) -> str | None:
        return None if self.request is None else self.request.idempotency_key

    @property
    def has_filter(self) -> bool:
        """Whether the row asks that some tokens are not listed."""
        return self.request is not None and self.request.filter is not NO_FILTER

    @property
    def filter_tokens(self) -> int:
        """The number of tokens in the lists of the row's filter."""
        if self.request is None:
            return 0
        return len(self.request.filter.exclude) + len(self.request.filter.candidates or ())

    def is_of_arrays(self, most_predictions: int) -> bool:
        """Returns whether the row may be answered by arrays: it asks nothing, or only that some tokens are not listed.
        `most_predictions`: the largest top_k of rows that are answered by arrays."""
        stored, request = self.stored, self.request
        if stored is not None and (self.was_rebuilt or stored.creator is not None):
            return False
        return request is None or (
            request.top_k <= most_predictions
            and request.filter.candidates is None
            and not request.filter.unknown
            and request.cache
            and not (request.prove or request.logits or request.token_logprobs or request.unknown_names)
        )

    @property
    def is_awaited(self) -> bool:
        """Whether the caller still waits for the answer."""
        return not self.done() and (self.waiting is None or not self.waiting.abandoned)

    def first_token(self, position: int) -> tuple[str, int, int]:
        """Returns the session, its position before the step, and the step's first token. `position`: the session's
        position after the step."""
        if self.stored is None:
            return self.session, position - 1, self.token
        return self.session, self.stored.record.position, self.stored.tokens[0]

    def as_request(self) -> StepRequest:
        """Returns the step as a request."""
        if self.request is not None:
            return self.request
        session, tokens, position = self.session, (self.token,), self.expected_position
        return StepRequest(session, tokens, None, position, None, self.top_k, creator=self.creator)

    def cancel(self, msg: object = None) -> bool:
        """See `Pending`."""
        if self._general is not None:
            self._general.cancel()
        return super().cancel(msg)

    def answer(self, answer: Answer) -> None:
        """Sets the answer, unless the caller has left."""
        if not self.done():
            self.set_result(answer)

    def follow(self, pending: Pending[Answer]) -> None:
        """Takes over the result of a step that was passed to the general procedure, or whose answer waits for a
        proof."""
        self._general = pending
        pending.add_done_callback(self._copy)

    def _copy(self, general: asyncio.Future[Answer]) -> None:
        self._general = None
        if general.cancelled():
            self.cancel()
        elif (error := general.exception()) is not None:
            self.fail(error)
        else:
            self.answer(general.result())


class Conflict(Exception):
    """Another writer committed to the session first, so that the row changed nothing."""


IS_DONE = methodcaller("done")
COLUMNS = attrgetter("slot", "token", "position", "queued_s", "top_k", "is_plain", "stored", "waiting", "deadline")


class StepBatch(ColumnBatch):
    """A batch of B rows. expected: int64 (B), the rows' expected positions; None if no row has one. stored: for each
    row, whether it is committed by the store: bool (B); None if no row is. top_k: at least that of each row. is_plain:
    whether all rows are plain. may_wait: whether the general procedure may wait for a row. deadline: no row has an
    earlier one."""

    __slots__ = ("deadline", "expected", "is_plain", "may_wait", "rows", "stored", "top_k")

    def __init__(self, rows: Sequence[StepRow]) -> None:
        self.rows = rows
        slots, tokens, expected, queued_s, top_k, plain, stored, waiting, deadlines = zip(
            *map(COLUMNS, rows), strict=True
        )
        super().__init__(np.array(slots, np.intp), np.array(tokens, np.int64), np.array(queued_s, np.float64))
        self.expected = np.array(expected, np.int64) if max(expected) != NO_POSITION else None
        self.top_k: int = max(top_k)
        self.is_plain = False not in plain
        self.stored = np.array([*map(bool, stored)]) if any(stored) else None
        self.may_wait = any(waiting)
        self.deadline: float = min(filter(None, deadlines), default=math.inf)

    @property
    def traced(self) -> dict[Traced, float]:
        """The traces of the batch's requests, and when each was queued."""
        return {} if self.is_plain else {row.traced: row.queued_s for row in reversed(self.rows) if row.traced}

    @property
    def commits(self) -> list[Commit]:
        """The commits of a batch whose rows are all committed by the store."""
        return [row.stored for row in self.rows if row.stored is not None]

    def part(self, rows: NDArray[np.bool_]) -> StepBatch:
        """Returns a batch of the selected rows and their outputs. rows: bool (B)."""
        part = copy(self)
        part.rows = [*compress(self.rows, rows.tolist())]
        part.slots, part.tokens, part.queued_s = self.slots[rows], self.tokens[rows], self.queued_s[rows]
        if self.expected is not None:
            part.expected = self.expected[rows]
        if self.stored is not None:
            stored = self.stored[rows]
            part.stored = stored if stored.any() else None
        if len(self.outputs):
            part.outputs = self.outputs.part(rows)
        return part
