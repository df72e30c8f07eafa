"""Answers requests to sessions in four stages: check out, run, commit, answer. A step that continues a state ends as a
row (`steps/columns.py`), which runs its last token, commits it and answers it.

All stages run under the session's lock. The session's record is read first, from the store or a cache, and written
last. In between, the next state is computed in a new slot. A failure before the commit therefore changes nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial

import numpy as np
from numpy.typing import NDArray

from wane.service.batching.ticket import Ticket
from wane.service.engine import routing
from wane.service.engine.answer import AnswerPlan, ModeResult
from wane.service.engine.bounds import Bound, expected, meets
from wane.service.engine.forward import RunResult, tail
from wane.service.engine.generate import NOTHING_TO_CONTINUE, Prompt, RecurrentSource, Source, WindowSource
from wane.service.engine.limits import Limits
from wane.service.engine.live_accuracy import SKIPPED, LiveAccuracy
from wane.service.engine.logits import Ranking, log_softmax
from wane.service.engine.steps.columns import StepColumns
from wane.service.engine.steps.continuations import TOKENS_OF_A_SCORE, mixed
from wane.service.engine.steps.rows import Conflict
from wane.service.errors import InvalidRequest, PositionConflict
from wane.service.observability.metrics import Metrics
from wane.service.sessions.sessions import conflict
from wane.service.sessions.stores.store import Commit, SessionRecord, is_first
from wane.service.state.pool import ZERO, CachedState
from wane.service.types.answer import Answer, SessionState, SessionView
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import NO_FILTER, Filter, GenerateRequest, Owner, PredictRequest, StepRequest, id_of

RETRIES = 3  # largest number of retries of a step whose commit failed because another writer changed the session
NO_TOKENS = np.empty(0, np.int64)
REBUILD_EMA_ALPHA = 1 / 64  # weight of the latest request in the moving average `SessionSteps.share_found`
MOST_USES = 1e3  # upper limit of the expected number of later steps that use a rebuilt state


class SessionSteps:
    """Answers requests to sessions. No other class of the engine both accesses sessions and runs the model."""

    def __init__(
        self,
        limits: Limits,
        columns: StepColumns,
        metrics: Metrics,
        live: LiveAccuracy | None,
    ) -> None:
        """`live` counts the accuracy of the answers; None without the setting `live_accuracy`."""
        self._answer_builder = columns.answers.builder
        self._manifest = manifest = self._answer_builder.manifest
        self._forward = self._answer_builder.forward
        self._pool = self._forward.pool
        self._limits = limits
        self._columns = columns
        self._sessions = columns.sessions
        self._resident = columns.resident
        self._cost_model = self._forward.cost_model
        self._live = live
        self.share_found = 1.0
        self._replayed = metrics.steps_replayed.labels(manifest.name)

    async def predict(self, request: PredictRequest, session: str, ticket: Ticket) -> Answer:
        """Predicts the session's next token without appending. Raises UnknownSession, InvalidRequest."""
        async with self._sessions.locks.held(session):
            record = await self._sessions.read(session)
            await self._sessions.touch(session)
            mode = routing.of_session(request.mode, record.mode)
            if request.window is not None and mode is Mode.RECURRENT:
                raise InvalidRequest(
                    "window is given, but the session answers in mode recurrent; "
                    "window is only for the modes window and both",
                    "window",
                )
            return await self._answer_again(record, mode, request, ticket)

    async def step(self, request: StepRequest, ticket: Ticket, *, is_locked: bool = False) -> Answer:
        """Appends the step's tokens and predicts the next token. If the step is a retry of the session's last step,
        answers it again without appending. A step without tokens appends nothing, and does not become the session's
        last step. If another writer commits first, the step runs again with the new record. `is_locked` says whether
        the caller holds the session's lock. The step releases the lock in either case.

        Raises UnknownSession, PositionConflict."""
        sessions = self._sessions
        if not is_locked:
            await sessions.locks.wait(request.session)
        try:
            while ticket.conflicts <= RETRIES:
                # The record of `look` may be outdated, which only the commit detects. A step without tokens has no
                # commit, so it reads the session from the store.
                record, creator, replayed = None, None, False
                if request.tokens:
                    record = sessions.look(request.session, request.expected_position, request.idempotency_key)
                if record is None:
                    record, creator, replayed = await sessions.check_out(request)
                if creator is not None and not request.tokens:
                    created = await sessions.commit(Commit(record, (), creator=creator))
                    if created is None:
                        ticket.conflicts += 1
                        continue
                    record = created
                mode = routing.of_session(request.mode, record.mode)
                if replayed or not request.tokens:
                    if replayed:
                        self._replayed.inc()
                    elif self._live is not None:
                        self._live.judge([(request.session, record.position, SKIPPED)])
                    await sessions.touch(request.session)
                    token_logprobs: tuple[float | None, ...] | None = None
                    if request.token_logprobs:
                        token_logprobs = await self._replayed_logprobs(record, request, ticket) if replayed else ()
                    answer = await self._answer_again(record, mode, request, ticket)
                    answer.replayed = replayed
                    answer.with_details(answer.logits, token_logprobs)
                    # A step that creates its session is stored with the session, so no append has followed.
                    of_first = replayed and record.last is not None and is_first(record.revision)
                    if creator is not None or (request.creator is not None and of_first):
                        answer.created = True
                    return answer
                appended = await self._append(record, request, mode, ticket, creator)
                if appended is not None:
                    return appended
                ticket.conflicts += 1
            raise conflict(await sessions.read(request.session), request.expected_position)
        finally:
            sessions.locks.leave(request.session)

    async def begin(
        self, request: GenerateRequest, session: str, ticket: Ticket, held: ExitStack
    ) -> tuple[Source, RunResult]:
        """Prepares a generation that continues a session. Returns the source of the generation's distributions and the
        first result. Closing `held` releases the slots of the states. Appends no token to the session. A rebuilt state
        becomes resident.

        Raises UnknownSession, PositionConflict, InvalidRequest."""
        async with self._sessions.locks.held(session):
            record = await self._sessions.read(session)
            if request.position not in (None, record.position):
                raise PositionConflict(
                    f"the session is at position {record.position}, but the request expects {request.position}",
                    record.position,
                )
            await self._sessions.touch(session)
            mode = routing.of_session(request.mode, record.mode)
            input_ids = context_ids = self._input_ids(record)
            if not len(input_ids):
                raise InvalidRequest(NOTHING_TO_CONTINUE, "session")
            history: list[int] = input_ids[max(len(input_ids) - record.position, 0) :].tolist()
            if mode is Mode.WINDOW:
                held_tokens, known = len(input_ids), record.position - record.dropped_tokens
                plan = self._plan(mode, record.position, request.window, held_tokens, False, record.dropped_tokens)
                assert plan.window is not None, "the plan of a window part has no k: this is a bug"
                start = Prompt(history, record.position, known, StateSource.WINDOW, session)
                window = WindowSource(self._forward, input_ids, start, plan.window, ticket)
                return await window.begin()
            base, rebuilt = self._base(record, needed=True)
            dropped_tokens = record.dropped_tokens if base is None else base.dropped_tokens
            if base is None and routing.is_free(request.mode, record.mode):
                context_ids, dropped_tokens = self._rebuilding(record.position, input_ids, dropped_tokens)
            result, read = await self._catch_up(record, base, rebuilt, context_ids, dropped_tokens, ticket, held)
        origin = StateSource.REBUILT if rebuilt else StateSource.RESIDENT
        start = Prompt(history, record.position, record.position - dropped_tokens, origin, session)
        slot = held.enter_context(self._pool.lease())
        return RecurrentSource(self._forward, input_ids, start, slot, ticket, read=read), result

    async def state(self, session: str, ticket: Ticket) -> SessionState:
        """Returns the output layer's input after the session's tokens, from a run in the session's own mode. Does not
        change the session. Raises UnknownSession. Raises InvalidRequest if the model has a zero start and the session
        has no token."""
        async with self._sessions.locks.held(session):
            record = await self._sessions.read(session)
            if not len(self._input_ids(record)):
                raise InvalidRequest(
                    f"session {id_of(session)!r} has no token, and its model reads no start token, so it has no state",
                    "session",
                )
            request = PredictRequest(session=session, cache=False)
            mode = routing.of_session(request.mode, record.mode)
            plan, _, recurrent, window = await self._run_again(record, mode, request, ticket)
        answered = recurrent or window
        assert answered is not None, "neither mode ran: this is a bug"
        return SessionState(
            *self._answer_builder.identity,
            session=id_of(session),
            position=record.position,
            state=plan.state,
            hidden=tuple(answered.result.hidden.tolist()),
            state_error_bound=None if answered.bound is None else answered.bound.state,
            durable=record.durable,
        )

    def view(self, record: SessionRecord) -> SessionView:
        """Returns the session as its owner sees it."""
        resident = self._sessions.cached(record, behind=True, use=False)
        mode = routing.of_session(None, record.mode)
        kept = resident or self._sessions.kept(record)
        dropped_tokens = record.dropped_tokens if kept is None else kept.dropped_tokens
        if kept is None and routing.is_free(None, record.mode):
            _, dropped_tokens = self._rebuilding(record.position, self._input_ids(record), dropped_tokens)
        plan = self._plan(mode, record.position, None, len(record.tail), resident is None, dropped_tokens)
        norms, has_run = None, record.position or self._manifest.start_tokens
        if has_run and self._manifest.certificate.readout and resident and resident.position == record.position:
            norms = self._sessions.norms(resident)
        bound = plan.bound_of(self._manifest.certificate, mode is not Mode.WINDOW, None, norms)
        cache = self._answer_builder.cache
        if bound is not None and cache is not None:
            unknown = cache.unknown(len(record.tail), record.position)
            bound = bound._replace(variation=min(bound.variation + unknown, 1.0))
        return SessionView(
            *self._answer_builder.identity,
            session=id_of(record.session),
            mode=record.mode,
            position=record.position,
            state=plan.state,
            error_bound=None if bound is None else bound.variation,
            idle_s=record.idle_s,
            durable=record.durable,
        )

    async def _append(
        self, record: SessionRecord, request: StepRequest, mode: Mode, ticket: Ticket, creator: Owner | None
    ) -> Answer | None:
        """Runs a new step, and commits it. Returns None if another writer committed first. `creator`: see `Commit`."""
        position = record.position + len(request.tokens)
        own = routing.of_session(None, record.mode)
        base, rebuilt = self._base(record, needed=mode is not Mode.WINDOW)
        if base is not None and mode is Mode.RECURRENT:
            return await self._append_row(record, request, ticket, creator, base, rebuilt=rebuilt)
        dropped_tokens = record.dropped_tokens if base is None else base.dropped_tokens
        builder, wanted = self._answer_builder, request.filter
        if wanted is not NO_FILTER:
            await builder.turns.take(len(wanted.exclude) + len(wanted.candidates or ()))
        input_ids = context_ids = np.concatenate([self._input_ids(record), np.array(request.tokens, np.int64)])
        if base is None and routing.is_free(request.mode, record.mode):
            context_ids, dropped_tokens = self._rebuilding(position, input_ids, dropped_tokens)
        held = len(record.tail) + len(request.tokens)
        ranking = self._ranking(wanted, input_ids, position)
        plan = self._plan(mode, position, None, held, rebuilt, dropped_tokens, ranking, cache=request.cache)
        # A step in mode window also advances an existing state, unless window is the session's own mode.
        keeps = base is not None and own is not Mode.WINDOW
        recurrent: ModeResult | None = None
        window: ModeResult | None = None
        read = ZERO if base is None else base.slot
        write: int | None = None
        self._pool.retain(read)
        try:
            token_logprobs = await self._own_logprobs(record, base, request, ticket)
            if mode is not Mode.WINDOW or keeps:
                write = self._pool.acquire()
                self._record_hit(record, is_resident=not rebuilt)
                if base is None:
                    result = await self._forward.full(context_ids, ticket, write=write, binding=True)
                else:
                    new = self._unseen(record, base, request)
                    result = await self._forward.append(new, ticket, read=read, write=write, binding=True)
                if rebuilt:
                    self._sessions.count_rebuilt()
                if mode is not Mode.WINDOW:
                    recurrent = await builder.made(plan, result, input_ids, ticket)
            if plan.window is not None:
                window = await builder.window(plan, input_ids, ticket, prove=False, binding=True)
            committed = await self._sessions.commit(
                Commit(record, request.tokens, request.idempotency_key, write, dropped_tokens, creator)
            )
        finally:
            self._pool.release(read)
            if write is not None:
                self._pool.release(write)
        if committed is None:
            return None
        ticket.answering = True
        if own is Mode.RECURRENT:
            self._resident.add(committed)
        if self._live is not None:
            self._live.judge([(record.session, record.position, request.tokens[0])])
        if ticket.abandoned:
            raise asyncio.CancelledError  # no answer is made
        # A proof is searched only after the commit, so that the step is committed even if the client cancels the
        # request during a long search.
        if request.prove:
            recurrent = None if recurrent is None else await builder.search(plan, recurrent, ticket)
            window = None if window is None else await builder.search(plan, window, ticket)
        await builder.take_turn(plan, request, recurrent or window)
        answer = builder.answer(plan, input_ids, recurrent, window, request, ticket)
        answer.replayed, answer.durable = False, committed.durable
        answer.created = None if creator is None else True
        answer.with_details(answer.logits, token_logprobs)
        if self._live is not None and not ticket.abandoned:
            self._live.answered(record.session, position, answer)
        return answer

    async def _append_row(
        self,
        record: SessionRecord,
        request: StepRequest,
        ticket: Ticket,
        creator: Owner | None,
        base: CachedState,
        *,
        rebuilt: bool,
    ) -> Answer | None:
        """Like `_append`, for a step that continues the state `base` in mode recurrent: runs the tokens that the state
        has not read, except the last, as a sequence, and the last token as a row."""
        with ExitStack() as held:
            held.enter_context(self._pool.hold(base.slot))
            token_logprobs = await self._own_logprobs(record, base, request, ticket)
            read, write = base.slot, held.enter_context(self._pool.lease())
            self._record_hit(record, is_resident=not rebuilt)
            earlier_ids = self._unseen(record, base, request)[:-1]
            if len(earlier_ids):
                read = held.enter_context(self._pool.lease())
                await self._forward.parallel.advance(earlier_ids, ticket, read=base.slot, write=read, binding=True)
            if rebuilt:
                self._sessions.count_rebuilt()
            commit = Commit(record, request.tokens, request.idempotency_key, write, base.dropped_tokens, creator)
            try:
                return await self._columns.run(request, commit, ticket, token_logprobs, read=read, was_rebuilt=rebuilt)
            except Conflict:
                return None

    async def _answer_again(
        self, record: SessionRecord, mode: Mode, request: PredictRequest | StepRequest, ticket: Ticket
    ) -> Answer:
        """Answers with the session's next-token prediction, without appending. See `_run_again`. Returns an answer
        without predictions if the model has a zero start and the session has no token."""
        builder = self._answer_builder
        input_ids = self._input_ids(record)
        if not len(input_ids):
            window = request.window if isinstance(request, PredictRequest) else None
            ranking = self._ranking(request.filter, input_ids, 0)
            answer = builder.nothing(self._plan(mode, 0, window, 0, False, 0, ranking), request, ticket)
        else:
            plan, input_ids, recurrent, part = await self._run_again(record, mode, request, ticket)
            await builder.take_turn(plan, request, recurrent or part)
            answer = builder.answer(plan, input_ids, recurrent, part, request, ticket)
        answer.durable = record.durable
        return answer

    async def _run_again(
        self,
        record: SessionRecord,
        mode: Mode,
        request: PredictRequest | StepRequest,
        ticket: Ticket,
    ) -> tuple[AnswerPlan, NDArray[np.int64], ModeResult | None, ModeResult | None]:
        """Runs the parts of a session's answer without appending. Returns the plan, the session's model input
        (`_input_ids`), and the recurrent and the window part (None for a part that the mode does not need). If the
        request's mode is free (`routing.is_free`), a state is rebuilt from the number of tokens that `_rebuilding`
        chooses by cost, otherwise from all kept tokens. A rebuilt state stays resident.

        Raises InvalidRequest if the answer's bound does not meet the tolerance. This happens before the run if the
        bound is already known.
        """
        window, tolerance = (request.window, request.tolerance) if isinstance(request, PredictRequest) else (None, None)
        free = routing.is_free(request.mode, record.mode)
        input_ids = context_ids = self._input_ids(record)
        base, rebuilt = self._base(record, needed=mode is not Mode.WINDOW)
        if base is not None and free and tolerance is not None and record.dropped_tokens < base.dropped_tokens:
            known = record.position - base.dropped_tokens
            if not meets(expected(self._manifest.certificate, known, record.position), tolerance):
                # The record holds more tokens than the state has read, so a rebuilt state may meet the tolerance.
                base, rebuilt = None, True
        dropped_tokens = record.dropped_tokens if base is None else base.dropped_tokens
        if base is None and free:
            context_ids, dropped_tokens = self._rebuilding(record.position, input_ids, dropped_tokens, tolerance)
        ranking = self._ranking(request.filter, input_ids, record.position)
        plan = self._plan(
            mode, record.position, window, len(input_ids), rebuilt, dropped_tokens, ranking, cache=request.cache
        )
        mixes = request.cache and self._answer_builder.cache is not None
        # The bound is checked before the run only if the run cannot make it smaller. A run can make it smaller if it
        # outputs a radius, or if the answer is a mixture with a cache, in which the network's weight is below 1.
        if not mixes and (not self._forward.has_radius_output or plan.state is StateSource.RESIDENT):
            _check(plan.bound(self._manifest.certificate), tolerance)
        recurrent: ModeResult | None = None
        if mode is not Mode.WINDOW:
            with ExitStack() as held:
                result, _ = await self._catch_up(record, base, rebuilt, context_ids, dropped_tokens, ticket, held)
            recurrent = await self._answer_builder.made(plan, result, input_ids, ticket, prove=request.prove)
        part: ModeResult | None = None
        if plan.window is not None:
            part = await self._answer_builder.window(plan, input_ids, ticket, prove=request.prove)
        answered = recurrent or part
        assert answered is not None, "neither mode ran: this is a bug"
        _check(answered.bound, tolerance)
        return plan, input_ids, recurrent, part

    async def _catch_up(
        self,
        record: SessionRecord,
        base: CachedState | None,
        rebuilt: bool,
        context_ids: NDArray[np.int64],
        dropped_tokens: int,
        ticket: Ticket,
        held: ExitStack,
    ) -> tuple[RunResult, int]:
        """Runs the tokens that the state `base` has not read or, without a state, `context_ids`. Returns the result at
        the session's position, and the slot of the state there, until `held` is closed. This state is then resident.
        `dropped_tokens`: the number of the session's first tokens that it has not read."""
        self._record_hit(record, is_resident=not rebuilt)
        if base is not None and base.position == record.position:
            slot = base.slot
            held.enter_context(self._pool.hold(slot))
            result = await self._forward.again(slot, ticket)
        else:
            with self._pool.hold(ZERO if base is None else base.slot):
                slot = held.enter_context(self._pool.lease())
                if base is None:
                    result = await self._forward.full(context_ids, ticket, write=slot)
                else:
                    missed = self._missed(record, base)
                    result = await self._forward.append(missed, ticket, read=base.slot, write=slot)
                self._sessions.keep(record, slot, dropped_tokens)
        if rebuilt:
            self._sessions.count_rebuilt()
        return result, slot

    async def _replayed_logprobs(
        self, record: SessionRecord, request: StepRequest, ticket: Ticket
    ) -> tuple[float | None, ...]:
        """Returns the log-probability of each token of the last step. Raises InvalidRequest if the session does not
        keep a token before the last step's tokens."""
        before_ids = self._input_ids(record)[: -len(request.tokens)]
        if not len(before_ids) and record.dropped_tokens:
            raise InvalidRequest(
                f"token_logprobs of a replayed step need a token before the step, but the session keeps only its last "
                f"{len(record.tail)} tokens",
                "token_logprobs",
            )
        return await self._token_logprobs(before_ids, record.position - len(request.tokens), None, request, ticket)

    async def _own_logprobs(
        self, record: SessionRecord, base: CachedState | None, request: StepRequest, ticket: Ticket
    ) -> tuple[float | None, ...] | None:
        """Returns the log-probability of each token of a step that is not appended yet; None if it does not ask for
        them. See `_token_logprobs`."""
        if not request.token_logprobs:
            return None
        return await self._token_logprobs(self._input_ids(record), record.position, base, request, ticket)

    async def _token_logprobs(
        self,
        before_ids: NDArray[np.int64],
        position: int,
        base: CachedState | None,
        request: StepRequest,
        ticket: Ticket,
    ) -> tuple[float | None, ...]:
        """Returns the log-probability of each of the step's tokens. The value is None for the first token of a sequence
        if the model has a zero start, because the model does not predict this token.

        `before_ids` is the kept model input before the step. `position` is the session's position before the step.
        `base` is the state to continue from. The caller retains the slot of `base`. If `base` is None, the state before
        the step is computed from `before_ids`.
        """
        forward, builder, ids = self._forward, self._answer_builder, np.array(request.tokens, np.int64)
        result: RunResult | None = None
        with self._pool.lease() as slot:
            read = slot
            if not len(before_ids):
                read = ZERO
            elif base is None:
                result = await forward.full(before_ids, ticket, write=slot)
            elif base.position == position:
                read = base.slot
                result = await forward.again(read, ticket)
            else:
                missed = before_ids[base.position - position :]
                result = await forward.append(missed, ticket, read=base.slot, write=slot)
            logprobs, _ = await forward.scan(ids, ticket, read=read, write=slot)
        history = before_ids[1:] if len(before_ids) > position else before_ids  # without the start token
        if result is not None:
            logprobs = np.concatenate([log_softmax(result.network_logits)[ids[:1]], logprobs])
        else:
            history, position, ids = ids[:1], position + 1, ids[1:]
        if request.cache and builder.cache is not None:
            mixing = partial(mixed, builder.cache, history, position, ids, logprobs, [None] * len(ids))
            logprobs, _ = await builder.turns.run(len(ids) * TOKENS_OF_A_SCORE, mixing)
        return (*([None] if result is None else []), *logprobs.tolist())

    def _rebuilding(
        self, position: int, input_ids: NDArray[np.int64], dropped_tokens: int, tolerance: float | None = None
    ) -> tuple[NDArray[np.int64], int]:
        """Returns the tokens from which a session's state is rebuilt, and how many of the sequence's first tokens that
        state will not have read.

        `input_ids` holds the sequence up to `position`, without its first `dropped_tokens` tokens.
        """
        share = self._share_found()
        k = routing.rebuilt_from(
            self._manifest.certificate,
            position,
            len(input_ids),
            own=self._limits.window,
            largest=self._limits.max_window,
            tolerance=tolerance,
            used=min(share / max(1 - share, 1 / MOST_USES), MOST_USES),
            cost=lambda k: self._cost_model.full(len(input_ids)) if k is None else self._cost_model.window(k),
        )
        return (input_ids, dropped_tokens) if k is None else (tail(input_ids, position, k), position - k)

    def _input_ids(self, record: SessionRecord) -> NDArray[np.int64]:
        """Returns the kept part of the model's input for a session, int64 (n): the session's kept tokens, preceded by
        the start tokens if all tokens are kept. A stored history begins with `<eos>` if all tokens are kept. A model
        with a zero start does not read this `<eos>`."""
        ids = record.tail.ids()
        return ids if record.dropped_tokens or self._manifest.start_tokens else ids[1:]

    def _ranking(self, wanted: Filter, input_ids: NDArray[np.int64], position: int) -> Ranking:
        """Returns the ranking for the filter `wanted`. `input_ids` is the kept part of the session's model input, and
        `position` is the session's position."""
        return self._answer_builder.rankings.of(wanted, input_ids[max(len(input_ids) - position, 0) :])

    def _base(self, record: SessionRecord, *, needed: bool) -> tuple[CachedState | None, bool]:
        """Returns the state to continue from, or None, and whether the answer's state counts as rebuilt.

        Prefers a resident state, which may be at an earlier position than the session. If there is no resident state
        and a state is `needed`, returns the state from the store's snapshot."""
        resident = self._sessions.cached(record, behind=True)
        if resident is not None or not needed:
            return resident, resident is None
        return self._sessions.restore(record), True

    def _unseen(self, record: SessionRecord, base: CachedState, request: StepRequest) -> NDArray[np.int64]:
        """Returns the tokens that the state `base` has not read: the session's tokens after the state's position, and
        the step's own tokens."""
        tokens = np.array(request.tokens, np.int64)
        return tokens if base.position == record.position else np.concatenate([self._missed(record, base), tokens])

    def _missed(self, record: SessionRecord, base: CachedState) -> NDArray[np.int64]:
        """Returns the session's tokens after the position of the state `base`. If there are such tokens, counts one
        state in the metric `state_replays`."""
        missed = record.position - base.position
        if not missed:
            return NO_TOKENS
        self._sessions.state_replays.inc()
        return record.tail.ids()[-missed:]  # without the start token

    def _record_hit(self, record: SessionRecord, *, is_resident: bool) -> None:
        """Updates `share_found`. `is_resident` says whether the needed state was resident. The state of an empty
        session does not count."""
        if record.position:
            before = self._share_found()
            self.share_found = before + REBUILD_EMA_ALPHA * (is_resident - before)

    def _share_found(self) -> float:
        """Returns the share of needed states that were resident. The states of steps in columns are included."""
        hits, self._resident.hits = self._resident.hits, 0
        if hits:
            self.share_found = 1 - (1 - self.share_found) * (1 - REBUILD_EMA_ALPHA) ** hits
        return self.share_found

    def _plan(
        self,
        mode: Mode,
        position: int,
        window: int | None,
        held: int,
        rebuilt: bool,
        dropped_tokens: int,
        ranking: Ranking | None = None,
        *,
        cache: bool = True,
    ) -> AnswerPlan:
        """Plans the answer of a session. The session keeps its last `held` tokens, or all its tokens if `held` is at
        least `position`. The session's state has read all tokens except the first `dropped_tokens`.

        Raises InvalidRequest if the window exceeds the `held` tokens.
        """
        k: int | None = None
        if mode is not Mode.RECURRENT:
            k = self._limits.window if window is None else window
            if held < position and k > held:
                if window is not None:
                    raise InvalidRequest(
                        f"window is {window}, but the session keeps only its last {held} tokens", "window"
                    )
                k = held
        origin = StateSource.REBUILT if rebuilt else StateSource.RESIDENT
        ranking = ranking or self._answer_builder.rankings.default
        return AnswerPlan(mode, position, k, origin, position - dropped_tokens, ranking, cache)


def _check(bound: Bound | None, tolerance: float | None) -> None:
    """Raises InvalidRequest if the bound of a session's answer does not meet the tolerance."""
    if tolerance is None or meets(bound, tolerance):
        return
    has = "no error bound" if bound is None else f"an error bound of {bound.variation:g}"
    raise InvalidRequest(f"tolerance is {tolerance:g}, but the session's answer has {has}", "tolerance")
