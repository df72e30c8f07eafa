"""Serves one version of one model: `submit` admits a request, runs it and answers it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from functools import partial
from random import Random

from msgspec.structs import asdict

from wane.models.cache_mixture import CacheMixture
from wane.models.certificate.propagation import Propagation
from wane.models.manifest import Manifest
from wane.models.transitions import Transitions
from wane.models.vocabulary import TooManyTokens, Vocabulary
from wane.service.batching.batcher import Batcher
from wane.service.batching.cost_model import CostModel, Costs, warm_up
from wane.service.batching.ticket import Ticket
from wane.service.chunked.chunked import IN_ORDER, ChunkedRunner
from wane.service.chunked.layout import ThroughputProfile
from wane.service.deadline import until
from wane.service.engine import compare
from wane.service.engine.answer import AnswerBuilder
from wane.service.engine.backlog import LONG_S, Backlog, Share
from wane.service.engine.event_names import EventNames
from wane.service.engine.forward import PIECE_TOKENS, Forward
from wane.service.engine.generate import Begin, RecurrentSource, generate
from wane.service.engine.limits import Limits
from wane.service.engine.live_accuracy import LIST_BYTES, TOKEN_BYTES, LiveAccuracy
from wane.service.engine.pending import BEGUN_AT_ONCE, Admission, Pending, outcome_of
from wane.service.engine.predict import Predictor
from wane.service.engine.score import Item, Scorer
from wane.service.engine.shadow import Shadow
from wane.service.engine.stats import ModelReport, Stats
from wane.service.engine.step import SessionSteps
from wane.service.engine.steps.answers import StepAnswers
from wane.service.engine.steps.columns import StepColumns
from wane.service.engine.steps.continuations import continuations_of
from wane.service.engine.steps.rows import StepRow
from wane.service.engine.stream import Stream
from wane.service.engine.top1_proof import DirectionProof, MarginProof
from wane.service.errors import InvalidRequest, Unavailable, as_result
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import CURRENT
from wane.service.runners.runner import NORMS, RADIUS, Runner
from wane.service.sessions.resident import ResidentSessions
from wane.service.sessions.sessions import Sessions
from wane.service.sessions.stores.store import SessionRecord, Store, TokenHistory
from wane.service.settings import Settings
from wane.service.state.pool import StatePool
from wane.service.types.answer import Answer, Continuations, NewSession, Prediction, SessionState, SessionView
from wane.service.types.common import Identity, Mode
from wane.service.types.request import (
    ANYBODY,
    CompareRequest,
    ContinuationsRequest,
    GenerateRequest,
    History,
    Owner,
    PredictRequest,
    ScoreRequest,
    StepRequest,
    id_of,
)
from wane.service.types.text import Comparison, Finish, GeneratedToken, Score, ScoredTokens, ScoreSummary

logger = logging.getLogger("wane.engine")

HOUSEKEEPING_S = 1.0  # the time between two calls of `expire`

ENCODED_AT_ONCE = 4096  # largest number of characters of a text that is encoded on the event loop's thread

LONG_DOCUMENT = 1 << 15  # least number of tokens that are checked on another thread
IN_ROWS = (None, Mode.AUTO, Mode.RECURRENT)
"""Values of a step's `mode` with which the step may be a row (see `columns.py`)."""

TOKENIZER_DIGITS = 16  # number of hex digits of the tokenizer's digest that a session record holds


class Engine:
    """Serves one version of one model. Every method must be called on the event loop's thread.

    Every method that answers a request may raise Overloaded, Unavailable (while draining) and DeadlineExceeded in
    addition to its own errors. If a caller is cancelled, the caller's work that has not entered a batch is withdrawn.
    """

    def __init__(
        self,
        manifest: Manifest,
        vocabulary: Vocabulary,
        margin: MarginProof,
        runner: Runner,
        store: Store,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        cost_model: CostModel | None = None,
        throughput: ThroughputProfile | None = None,
        transitions: Transitions | None = None,
        direction: DirectionProof | None = None,
        shadow_runner: Runner | None = None,
        bits: bytes = b"",
    ) -> None:
        """`clock` returns seconds on the store's time scale. `cost_model` and `throughput` are measured if they are
        None. `transitions` are the model's transition tables, if it has them. `direction` proves most probable tokens
        that `margin` does not prove, if a request sets `prove`. `shadow_runner` repeats sampled live answers in the
        other mode; if it is None, no live answers are sampled. `bits` is a digest of the graphs' results on this
        machine. A state from the store is reused only if `bits` and the model's files were the same when the state was
        computed.

        Raises ValueError if the settings do not fit the model.
        """
        self.manifest = manifest
        self.vocabulary = vocabulary
        self.name = name = manifest.name
        self.version = manifest.version
        self.tokenizer = manifest.vocabulary.sha256[:TOKENIZER_DIGITS]
        self.admission = Admission()
        self.retired = False
        self._runner = runner
        self._max_batch = settings.max_batch_size
        self.limits = Limits(manifest, settings, vocabulary)
        self.events = EventNames(manifest, vocabulary, settings)
        cache = None
        if manifest.cache is not None:
            cache = CacheMixture(manifest.cache, vocabulary.size, transitions)
        self.state_cache = pool = StatePool(
            manifest.state,
            manifest.architecture.hidden,
            settings.state_budget_bytes,
            runner.memory,
            metrics.states_evicted.labels(name).inc,
            norms=manifest.architecture.norm_columns if NORMS in runner.outputs("step") else 0,
            beside_bytes=LIST_BYTES + TOKEN_BYTES * settings.live_accuracy if settings.live_accuracy else 0,
            clock=clock,
            on_prefix=metrics.prefix_counter(name),
        )
        self._cost_model = cost_model or CostModel(PIECE_TOKENS)
        self.batcher = Batcher(
            runner,
            pool,
            metrics,
            name,
            max_batch_size=settings.max_batch_size,
            max_queue=settings.max_queue,
            cost_model=self._cost_model,
            inline_s=settings.inline_batch_max_us / 1e6,
        )
        self._throughput = throughput or ThroughputProfile()
        parallel = ChunkedRunner(manifest, self.batcher, pool, self._throughput)
        self._cost_model.parallel_cost = parallel.seconds
        keeps_prefixes = settings.prefix_states == "on" and bool(manifest.state)
        self.forward = Forward(
            self.batcher,
            pool,
            parallel,
            self._cost_model,
            keeps=keeps_prefixes,
            has_radius_output=RADIUS in runner.outputs("window"),
        )
        empty = TokenHistory.start(vocabulary.eos_id, vocabulary.size)
        self.sessions = Sessions(store, pool, metrics, settings, manifest, self.tokenizer, empty, bits, clock)
        self._stats = Stats(metrics, name)
        self._live: LiveAccuracy | None = None
        if settings.live_accuracy:
            self._live = LiveAccuracy(settings.live_accuracy, pool.capacity, metrics, name, self.version)
        self._prover = ThreadPoolExecutor(1, thread_name_prefix=f"prover-{name}")
        self.answer_builder = AnswerBuilder(
            manifest, self.identity, vocabulary, margin, self.forward, self._stats, self._prover, cache, direction
        )
        self.turns = self.answer_builder.turns
        self.scorer = Scorer(self.answer_builder)
        self.shadow: Shadow | None = None
        if shadow_runner is not None:
            self.shadow = Shadow(
                settings.shadow_rate,
                shadow_runner,
                manifest.state,
                self.batcher,
                self.answer_builder,
                window=self.limits.window,
                random=Random(),  # noqa: S311  (a sample, not a secret)
            )
            self.answer_builder.sampler = self.shadow
        self.predictor = Predictor(self.limits, self.answer_builder)
        self.has_state = pool.order.__contains__
        """Returns whether the state of a session, given by its name, is in the state cache."""
        self._resident = resident = ResidentSessions(pool, store, settings.session_ttl_s, empty, clock, cache)
        most_predictions = min(settings.top_k_limit, runner.top - len(vocabulary.unlisted))
        most_predictions = most_predictions if most_predictions > 1 else 0
        answers = StepAnswers(self.answer_builder, resident, self.admission, most_predictions, self._live)
        procedure = partial(self._step_admitted, is_locked=True)
        self.columns = StepColumns(answers, self.sessions, self.batcher, metrics, procedure)
        self.steps = SessionSteps(self.limits, self.columns, metrics, self._live)
        self.backlog = Backlog(metrics.queue_rejected.labels(name).inc)
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix=f"encoder-{name}")
        self._checks_invariants = settings.check_invariants
        self._parked = 0  # the number of this model's sessions without a state in memory, after the last `expire`
        self._keeping: asyncio.Task[None] | None = None
        self._metrics = metrics
        self._gauges = {
            metrics.sessions_resident: lambda: len(pool),
            metrics.sessions_parked: lambda: self._parked,
            metrics.state_bytes: lambda: pool.used_bytes,
            metrics.prefix_bytes: lambda: len(pool.prefixes) * pool.slot_bytes,
            metrics.queue_items: lambda: self.batcher.waiting,
        }

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return self._runner.device

    @property
    def identity(self) -> Identity:
        """The model's name, its version and the device."""
        return self.name, self.version, self.device

    @property
    def cost_model(self) -> Costs:
        """The measured compute time of one sequence, by the role of the graph that runs it. Each role has one entry for
        each measured number of tokens, fewest first."""
        return self._cost_model.document()

    def warm_up(self, propagation: Propagation | None = None) -> None:
        """Warms up the engine for its first request, and measures the cost of runs. `measure` later measures how to cut
        long sequences into chunks. Blocks, so it must not be called on the event loop.

        `propagation` bounds the growth of small errors in a state. It is None unless every layer of the model is
        contractive.
        """
        self.scorer.propagation = propagation
        warm_up(self._runner, self.state_cache, self.manifest, max_batch_size=self._max_batch)
        lengths = (1, self.limits.window, self.limits.max_window)
        self._cost_model.measure(self._runner, self.state_cache, self.vocabulary.eos_id, lengths)

    async def measure(self) -> None:
        """Measures, between requests, how to cut long sequences into chunks. Until the measurement has ended, long
        sequences run in order, without chunks.

        Raises Unavailable if the engine is closed. Also raises the runner's errors."""
        measuring = self._throughput.measure(self._runner, self.state_cache, self.manifest, self._max_batch)
        ended = object()
        while await self.batcher.run_between(partial(next, measuring, ended)) is not ended:
            pass
        if (pace_s := self._throughput.pace("scan").get(1)) is not None:
            self._cost_model.observe("scan", 1, IN_ORDER["scan"], IN_ORDER["scan"] * pace_s)

    # Requests

    async def encode(self, text: str, deadline: float | None = None, *, document: bool = False) -> tuple[int, ...]:
        """Returns the token ids of `text`. A long text is encoded on a thread. A text that certainly exceeds the limit
        is refused before it is encoded. A `document` is input for scoring, for which the limit is higher.

        Raises TooLarge if there are too many tokens, and InvalidRequest if `text` is not valid text, or if the model
        reads events.
        """
        self.events.check_text()
        try:
            self.limits.length(self.vocabulary.fewest_tokens(text), "at least ", document=document)
            with self.admission.admitted():
                async with until(deadline):
                    if len(text) <= ENCODED_AT_ONCE:
                        tokens = self.vocabulary.encode(text)
                    else:
                        loop, most = asyncio.get_running_loop(), self.limits.longest(document=document)
                        tokens = await loop.run_in_executor(self._encoder, self.vocabulary.encode, text, most)
        except TooManyTokens as over:
            self.limits.length(over.count, "at least ", document=document)
            raise
        except ValueError as error:
            raise InvalidRequest(f"the input is not valid text: {error}", "input") from error
        self.limits.length(len(tokens), document=document)
        return tuple(tokens)

    def submit(self, request: PredictRequest | StepRequest) -> Pending[Answer]:
        """Starts a request and returns its pending answer. The request runs even if the answer is not awaited.

        A `PredictRequest` predicts the token after its own tokens or after a session's tokens. It does not append
        tokens. A `StepRequest` appends tokens to a session and predicts the next token. The answer to a step has the
        fields `position` and `replayed`. A step has no effect if it is cancelled, or its deadline passes, before it
        enters a batch. After that, the step commits, and a retry replays its answer.

        Awaiting the answer may raise InvalidRequest, TooLarge, UnknownSession or PositionConflict.
        """
        if not isinstance(request, StepRequest):
            ticket = Ticket(request.deadline)
            return Pending.of(self._predict(request, ticket), ticket)
        session, tokens, deadline, is_plain = request.session, request.tokens, request.deadline, request.is_plain
        # The log-probabilities of a step's own tokens need a run before the step.
        if len(tokens) == 1 and (is_plain or (request.mode in IN_ROWS and not request.token_logprobs)):
            asked, position, top_k = None if is_plain else request, request.expected_position, request.top_k
            row = StepRow(session, tokens[0], position, top_k, deadline, asked, CURRENT.get(), request.creator)
            if self.columns.take(row):
                return row
        ticket = Ticket(deadline)
        # A later step of the session could otherwise run before this step's task begins.
        place = self.sessions.locks.reserve(session) if len(tokens) <= PIECE_TOKENS else None
        return Pending.of(self._step(request, ticket, place), ticket)

    def step_one(
        self, session: str, token: int, expected_position: int | None, top_k: int, deadline: float | None
    ) -> Pending[Answer]:
        """The same as `submit` with a StepRequest of these values, in less time."""
        row = self.take_step(session, token, expected_position, top_k, deadline)
        if row is not None:
            return row
        return self.submit(StepRequest(session, (token,), None, expected_position, None, top_k, deadline))

    def take_step(
        self, session: str, token: int, expected_position: int | None, top_k: int, deadline: float | None
    ) -> StepRow | None:
        """Takes a step of one token as a row (see `columns.py`). Returns None, without side effects, if the step needs
        the general procedure. The caller must then call `submit`."""
        row = StepRow(session, token, expected_position, top_k, deadline, None, CURRENT.get())
        return row if self.columns.take(row) else None

    async def _step(self, request: StepRequest, ticket: Ticket, place: asyncio.Future[None] | None) -> Answer:
        """Like `submit`. `place`: the step's place among those that want the session's lock, if it has one."""
        try:
            self.limits.tokens(request.tokens)
            self.limits.top_k(request.top_k)
            self.admission.enter()
        except BaseException:
            if place is not None:
                self.sessions.locks.give_up(request.session, place)
            raise
        if place is not None:
            try:
                await self.sessions.locks.hold(request.session, place)
            except BaseException:
                self.admission.leave()
                raise
        return await self._step_admitted(request, ticket, is_locked=place is not None)

    async def _step_admitted(self, request: StepRequest, ticket: Ticket, *, is_locked: bool = False) -> Answer:
        """Like `submit`, for a step that was checked and counted as active. `is_locked`: see `SessionSteps.step`."""
        try:
            if len(request.tokens) <= PIECE_TOKENS:
                answer = await self.steps.step(request, ticket, is_locked=is_locked)
            else:
                with self.backlog.share(self._cost_model.full(len(request.tokens)), request.deadline) as share:
                    answer = await self.steps.step(request, ticket)
                    if not answer.replayed:
                        share.progress(1)
        finally:
            self.admission.leave()
        self._stats.made(answer, None if ticket.abandoned else "step")
        return answer

    async def _predict(self, request: PredictRequest, ticket: Ticket) -> Answer:
        self._check_prediction(request)
        expected_s = self.predictor.seconds(request) if len(request.tokens) >= PIECE_TOKENS else 0.0
        with self.backlog.share(expected_s, request.deadline) as share:
            answer = await self._predict_checked(request, ticket)
            share.progress(1)
        return answer

    async def _predict_checked(self, request: PredictRequest, ticket: Ticket) -> Answer:
        """Like `submit`, for a request that was checked and that the backlog has admitted."""
        with self.admission.admitted():
            if request.session is None:
                answer = await self.predictor.predict(request, ticket)
            else:
                answer = await self.steps.predict(request, request.session, ticket)
        self._stats.made(answer, None if ticket.abandoned else "predict")
        return answer

    def _check_prediction(self, request: PredictRequest) -> None:
        """Raises InvalidRequest or TooLarge if the request exceeds a limit."""
        self.limits.tokens(request.tokens)
        self.limits.top_k(request.top_k)
        self.limits.of_window(request.window)

    async def predict_many(self, requests: Sequence[PredictRequest]) -> list[Answer | Exception]:
        """Runs many predictions concurrently. Returns the answer or error of each, in the order of the requests.

        The backlog admits or refuses the whole call, by the expected work of all its requests. Raises Overloaded if the
        backlog refuses the call.
        """
        results: list[Answer | Exception | None] = [None] * len(requests)
        expected: dict[int, float] = {}
        for index, request in enumerate(requests):
            try:
                self._check_prediction(request)
                expected[index] = self.predictor.seconds(request)
            except Exception as error:  # an unexpected error fails only its own request
                results[index] = as_result(error)
            if index % BEGUN_AT_ONCE == BEGUN_AT_ONCE - 1:
                await asyncio.sleep(0)
        all_s, done_s = sum(expected.values()), 0.0
        deadline = min((request.deadline for request in requests if request.deadline is not None), default=None)
        with self.backlog.share(all_s, deadline) as share, ExitStack() as submitted:
            pending: list[tuple[int, Pending[Answer]]] = []
            for index in expected:
                ticket = Ticket(requests[index].deadline)
                prediction = Pending.of(self._predict_checked(requests[index], ticket), ticket)
                submitted.callback(prediction.cancel)
                pending.append((index, prediction))
                if len(pending) % BEGUN_AT_ONCE == 0:
                    await asyncio.sleep(0)
            for index, prediction in pending:
                outcome = results[index] = await outcome_of(prediction)
                if all_s and not isinstance(outcome, Exception):
                    done_s += expected[index]
                    share.progress(done_s / all_s)
        answers = [result for result in results if result is not None]
        results.clear()  # an error of a check has a traceback that holds this frame
        return answers

    async def score(self, request: ScoreRequest) -> Score:
        """Returns one log-probability for each token or skipped event of the request. It is None for a token that has
        no prediction, and for a skipped event. Raises InvalidRequest, TooLarge."""
        tokens: list[int | None] = []
        logprobs: list[float | None] = []
        error_bounds: list[float | None] = []
        places: list[tuple[Prediction, ...] | None] = []
        async with aclosing(await self.scoring(request)) as scoring:
            async for item in scoring:
                if isinstance(item, ScoredTokens):
                    places.extend(item.predictions or ())
                    tokens.extend(item.tokens)
                    logprobs.extend(item.logprobs)
                    error_bounds.extend(item.error_bounds or ())
                elif isinstance(item, ScoreSummary):
                    return Score(
                        **asdict(item),
                        tokens=tokens,  # not copied: a copy of 262,144 values takes 2 ms
                        logprobs=logprobs,
                        error_bounds=error_bounds if request.truncated else None,
                        predictions=None if request.top_k is None else places,
                    )
        raise AssertionError("the stream of a score ended without a summary: this is a bug")

    async def scoring(self, request: ScoreRequest) -> Stream[Item]:
        """Like `score`, but returns a stream of results. Checks the request and computes the first result before it
        returns.

        The caller must close the stream (`contextlib.aclosing`). Raises InvalidRequest, TooLarge.
        """
        await self._check_tokens(request.tokens, document=True)
        if request.top_k is not None:
            self.limits.top_k(request.top_k)
        with ExitStack() as stack:
            stack.enter_context(self.admission.admitted())
            share = stack.enter_context(self.backlog.share(self.scorer.seconds(request), request.deadline))
            items = self.scorer.score(request, Ticket(request.deadline), share)
            scoring = await Stream.begin(items, share, request.deadline, stack)
        self._stats.answered("score", Mode.RECURRENT)
        return scoring

    async def compare(self, request: CompareRequest) -> Comparison:
        """Compares the recurrent mode with every requested window. Raises InvalidRequest, TooLarge."""
        await self._check_tokens(request.tokens)
        for index, window in enumerate(request.windows):
            self.limits.of_window(window, f"windows[{index}]")
        expected_s = compare.seconds(self._cost_model, request)
        with self.admission.admitted(), self.backlog.share(expected_s, request.deadline) as share:
            async with until(request.deadline):
                compared = await compare.compare(request, self.answer_builder, Ticket(request.deadline), share)
        self._stats.answered("compare", Mode.BOTH)
        return compared

    async def _check_tokens(self, tokens: Sequence[int], field: str = "tokens", *, document: bool = False) -> None:
        """Like `Limits.tokens`, but checks many tokens on another thread."""
        if len(tokens) < LONG_DOCUMENT:
            self.limits.tokens(tokens, field, document=document)
        else:
            await asyncio.to_thread(self.limits.tokens, tokens, field, document=document)

    async def _check_generation(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest or TooLarge if the request exceeds a limit."""
        await self._check_tokens(request.tokens)
        self.limits.generated(request.max_tokens)
        self.limits.preferences(request)
        self.limits.of_window(request.window)

    async def check_generations(self, requests: Sequence[GenerateRequest]) -> None:
        """Checks the first of several requests, which differ only in their tokens and samples: raises InvalidRequest or
        TooLarge if it exceeds a limit. Raises Overloaded if long requests among them would miss their deadline
        together."""
        await self._check_generation(requests[0])
        long = [each_s for each_s in map(self.predictor.generation_seconds, requests) if each_s >= LONG_S]
        if len(long) > 1:
            self.backlog.check(Share(None, sum(long), requests[0].deadline))

    async def generate(self, request: GenerateRequest) -> Stream[GeneratedToken | Finish]:
        """Checks the request and runs its prompt, then returns a stream of tokens that ends with a `Finish`.

        The caller must close the stream (`contextlib.aclosing`). Raises InvalidRequest, TooLarge, UnknownSession,
        PositionConflict.
        """
        await self._check_generation(request)
        with ExitStack() as stack:
            stack.enter_context(self.admission.admitted())
            expected_s = self.predictor.generation_seconds(request)
            share = stack.enter_context(self.backlog.share(expected_s, request.deadline))
            ticket = Ticket(request.deadline)
            begin: Begin = partial(self.predictor.begin, request, ticket, stack)
            if request.session is not None:
                begin = partial(self.steps.begin, request, request.session, ticket, stack)
            items = generate(request, self.answer_builder, begin, ticket, share)
            generation = await Stream.begin(items, share, request.deadline, stack)
        self._stats.answered("generate", Mode.WINDOW if request.mode is Mode.WINDOW else Mode.RECURRENT)
        return generation

    # Sessions

    async def create_session(
        self,
        session: str | None = None,
        mode: Mode | None = None,
        owner: Owner = ANYBODY,
        history: History | None = None,
    ) -> SessionView:
        """Creates a session with the given id or a random id, at position 0 or after `history`. Returns a `NewSession`.
        Returns a `SessionView` if a session with this id exists and is equal to the one that this request would create.

        Raises SessionExists, InvalidRequest, TooLarge, QuotaExceeded.
        """
        if history is not None:
            await self._check_tokens(history.tokens, "history", document=history.snapshot is not None)
        with self.admission.admitted():
            record, created = await self.sessions.create(session, mode, owner, history)
            return self._view(record, created)

    async def fork(
        self,
        session: str,
        asked_id: str | None = None,
        position: int | None = None,
        owner: Owner = ANYBODY,
        deadline: float | None = None,
    ) -> SessionView:
        """See `Sessions.fork`. Waits for the end of the session's step in flight. Runs no token. Returns a
        `NewSession`, or a `SessionView` if this call has created the session before and it has made no step.

        Raises SessionExists, QuotaExceeded, and the errors of `Sessions.fork`."""
        with self.admission.admitted():
            async with until(deadline), self.sessions.locks.held(session):
                record, created = await self.sessions.fork(session, asked_id, position, owner)
            return self._view(record, created)

    def _view(self, record: SessionRecord, created: bool) -> SessionView:
        """Returns the session that a request has created or found."""
        if created and self._live is not None:
            self._live.forget(record.session)
        view = self.steps.view(record)
        return NewSession(**asdict(view)) if created else view

    async def history(
        self, session: str, position: int | None, deadline: float | None = None
    ) -> tuple[SessionView, History]:
        """See `Sessions.history`. Waits for the end of the session's step in flight."""
        with self.admission.admitted():
            async with until(deadline), self.sessions.locks.held(session):
                record, history = await self.sessions.history(session, position)
            return self.steps.view(record), history

    async def get_session(self, session: str) -> SessionView:
        """Returns a session without resetting its idle time. Raises UnknownSession."""
        return self.steps.view(await self.sessions.read(session))

    async def session_state(self, session: str, deadline: float | None = None) -> SessionState:
        """Returns the output layer's input after a session's tokens, without changing the session or its idle time.
        Raises UnknownSession."""
        with self.admission.admitted():
            async with until(deadline):
                return await self.steps.state(session, Ticket(deadline))

    async def continuations(self, request: ContinuationsRequest) -> Continuations:
        """Scores each of the continuations of a session, and predicts the token after it. The session does not change.
        Raises UnknownSession, InvalidRequest, TooLarge."""
        self.limits.top_k(request.top_k)
        total = sum(map(len, request.continuations))
        self.limits.length(total)
        for index, tokens in enumerate(request.continuations):
            self.limits.tokens(tokens, f"continuations[{index}]")
        ticket, expected_s = Ticket(request.deadline), self._cost_model.full(total) if total > PIECE_TOKENS else 0.0
        share_of = self.backlog.share(expected_s, request.deadline)
        with self.admission.admitted(), share_of as share, ExitStack() as held:
            async with until(request.deadline):
                begun = GenerateRequest(mode=Mode.RECURRENT, session=request.session)
                source, first = await self.steps.begin(begun, request.session, ticket, held)
                assert isinstance(source, RecurrentSource), "mode recurrent began a window: this is a bug"
                results = await continuations_of(request, source, first, self.answer_builder, ticket)
            share.progress(1)
        self._stats.answered("continuations", Mode.RECURRENT)
        return Continuations(*self.identity, id_of(request.session), source.start.position, results)

    async def delete_session(self, session: str, deadline: float | None = None) -> None:
        """Deletes a session after its step in flight, if any, has ended. Raises UnknownSession."""
        async with until(deadline), self.sessions.locks.held(session):
            await self.sessions.delete(session)

    async def rewind(self, session: str, position: int, deadline: float | None = None) -> SessionView:
        """See `Sessions.rewind`. Waits for the end of the session's step in flight."""
        with self.admission.admitted():
            async with until(deadline), self.sessions.locks.held(session):
                return self.steps.view(await self.sessions.rewind(session, position))

    # Life cycle

    async def report(self) -> ModelReport:
        """Returns this model's entry of /v1/report."""
        live_accuracy = None if self._live is None else self._live.report()
        return self._stats.report(self.identity, live_accuracy, await self.sessions.counts(), self.cost_model)

    def publish(self) -> None:
        """Makes the model's Prometheus gauges read their values from this engine. The registry calls this method when
        it starts to serve this engine."""
        self._metrics.model_info.labels(self.name, self.version, self.device).set(1)
        for gauge, value in self._gauges.items():
            gauge.labels(self.name).set_function(value)

    def unpublish(self) -> None:
        """Removes the model's gauges, which would otherwise keep this engine in memory."""
        self._metrics.model_info.remove(self.name, self.version, self.device)
        for gauge in self._gauges:
            gauge.remove(self.name)

    def keep(self) -> None:
        """Starts the periodic housekeeping."""
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            if self._live is not None:
                self._live.passed(HOUSEKEEPING_S)
            try:
                await self.expire()
            except Exception:  # housekeeping continues, because an unreachable store may become reachable again
                logger.exception("the housekeeping of model %s failed", self.name)
            if self._checks_invariants:
                self.check_states()

    async def expire(self) -> None:
        """Expires idle states and sessions."""
        self._parked = (await self.sessions.counts()).parked

    def check_states(self) -> None:
        """Ends the process if the reference counts of the states or the cache's indexes are inconsistent."""
        try:
            self.state_cache.check_integrity(idle=not self.admission.active and self.batcher.idle)
        except AssertionError:
            logger.critical("the state cache of model %s is inconsistent: this is a bug", self.name, exc_info=True)
            os.abort()  # a debugger finds the process as it was

    def retire(self) -> None:
        """Marks the engine as replaced or unloaded. A caller that holds this engine must get the current engine from
        the registry."""
        self.retired = True
        if self.shadow is not None:
            self.shadow.close()

    async def drain(self) -> None:
        """Refuses new requests (Unavailable), and waits for the requests in flight."""
        self.admission.close()
        if self.shadow is not None:
            self.shadow.close()
        await self.admission.idle()

    async def close(self) -> None:
        """Refuses new requests, fails queued requests, and stops the engine's threads."""
        self.admission.close()
        if self.shadow is not None:
            self.shadow.close()
        if self._keeping is not None:
            self._keeping.cancel()
        self._encoder.shutdown(wait=False, cancel_futures=True)
        self._prover.shutdown(wait=False, cancel_futures=True)
        self.columns.close(Unavailable("the server is stopping"))
        await self.batcher.close()
        await self.columns.settled()
        # Buffered tokens are written to the store last, because closing the batcher may commit a batch of steps, whose
        # tokens are then buffered too.
        await self._resident.close()

    def discard(self) -> None:
        """Frees the runner and the states immediately, without garbage collection. Must be called last, after
        `close`."""
        self._stats.end()
        if self._live is not None:
            self._live.count()
        self._runner.close()
        self.state_cache.memory.close()
