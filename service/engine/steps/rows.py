"""The rows of a batch of steps: what each step asks, and how it is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import copy
from itertools import compress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wane.service.batching.batch import ColumnBatch
from wane.service.batching.ticket import Ticket
from wane.service.engine.pending import Pending
from wane.service.observability.tracing import Traced
from wane.service.sessions.sessions import Commit, StepKind
from wane.service.sessions.stores.store import SessionRecord
from wane.service.types.answer import Answer
from wane.service.types.request import NO_FILTER, Owner, StepRequest

NO_POSITION = -1  # the expected position of a step whose request has none


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

    @property
    def has_filter(self) -> bool:
        """Whether the row asks that some tokens are not listed."""
        return self.request is not None and self.request.filter != NO_FILTER

    def is_of_arrays(self, most_predictions: int) -> bool:
        """Returns whether the row may be answered by arrays: it asks nothing, or only that some tokens are not listed.
        `most_predictions`: the largest top_k of rows that are answered by arrays."""
        stored, request = self.stored, self.request
        if stored is not None and (stored.was_rebuilt or stored.kind is not StepKind.NEXT):
            return False
        return request is None or (
            request.top_k <= most_predictions
            and request.filter.candidates is None
            and not request.filter.unknown
            and request.cache
            and not (request.prove or request.logits or request.token_logprobs or request.unknown)
        )


StepRow = tuple[str, int, int, int, int, float | None, StepReceiver, int, float, StepDetails | None]
"""A queued step: session, slot of the session's state, token, expected position (or NO_POSITION), top_k, deadline,
receiver, the number by which the receiver identifies the step, the time of `time.perf_counter` when the step was
queued, and its details, if there are any."""


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

    __slots__ = ("deadlines", "details", "expected", "has_details", "numbers", "receivers", "sessions", "top_k")

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
        self.has_details = any(self.details)

    @property
    def stored(self) -> NDArray[np.bool_] | None:
        """For each row, whether it is committed by the store: bool (B). None if no row is."""
        flags = np.array([one is not None and one.stored is not None for one in self.details], np.bool_)
        return flags if flags.any() else None

    @property
    def traced(self) -> dict[Traced, float]:
        """The traces of the batch's requests, and when each was queued."""
        if not self.has_details:
            return {}
        found = zip(self.details, self.queued_s.tolist(), strict=True)
        return {one.traced: queued_s for one, queued_s in reversed([*found]) if one is not None and one.traced}

    @property
    def steps(self) -> list[StoredStep]:
        """The steps of a batch whose rows are all committed by the store."""
        return [one.stored for one in self.details if one is not None and one.stored is not None]

    @property
    def commits(self) -> list[Commit]:
        """The commits of a batch whose rows are all committed by the store."""
        keys = map(self.key, range(len(self)))
        creators = [receiver.creator for receiver in self.receivers]
        return [
            Commit(one.record, one.tokens, key, one.write, one.dropped_tokens, one.kind, creator)
            for one, key, creator in zip(self.steps, keys, creators, strict=True)
        ]

    def key(self, row: int) -> str | None:
        """Returns the idempotency key of a row."""
        details = self.details[row]
        return None if details is None or details.request is None else details.request.idempotency_key

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
