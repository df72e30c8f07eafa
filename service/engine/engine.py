"""The heart of one model version: admit, check out, submit, choose, commit. It owns the return leg.

    limits      judges a request by the model and the settings
    routing     says which way to answer it
    sessions    says what a step is and where the state is, and commits
    forward     runs sequences: batcher, slab, runner
    answering   makes answers of what was run

None of these knows the others' business; this file is where they meet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from models.manifest import Manifest
from models.vocabulary import Vocabulary
from service.engine import comparison, routing, scoring
from service.engine.answering import Answering, Course, Part
from service.engine.batcher import Batcher, Ticket
from service.engine.deadline import until
from service.engine.forward import Forward, sequence
from service.engine.generation import Generation, RecurrentSource, Source, WindowSource
from service.engine.limits import Limits
from service.engine.report import Report
from service.engine.sessions import Place, Sessions, conflict, place
from service.engine.slab import Slab
from service.engine.types import (
    Answer,
    CompareRequest,
    Comparison,
    GenerateRequest,
    Mode,
    Origin,
    PredictRequest,
    Score,
    ScoreRequest,
    SessionView,
    StepRequest,
)
from service.engine.warm_up import warm_up
from service.errors import DeadlineExceeded, InvalidRequest, Unavailable, WaneError
from service.metrics import Metrics
from service.runners.runner import Runner
from service.settings import Settings
from service.stores.store import Record, Store
from service.stores.tail import Tail

RETRIES = 3  # of a step without a position, after comparisons lost to another writer
ENCODED_AT_ONCE = 4096  # characters up to which encoding is quicker than the way to a thread and back


class Engine:
    """Answers for one version of one model. Every method belongs to the event loop's thread.

    Every method that answers may raise Overloaded, Unavailable (while draining) and DeadlineExceeded beside what
    it says itself. Cancelling a caller takes back what has not entered a batch.
    """

    def __init__(
        self,
        manifest: Manifest,
        vocabulary: Vocabulary,
        runner: Runner,
        store: Store,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives seconds, as the store's does. Raises ValueError where the settings do not fit the model."""
        self.manifest = manifest
        self.vocabulary = vocabulary
        self.name = name = manifest.name
        self.version = manifest.version
        self._runner = runner
        self._max_batch = settings.max_batch
        self._limits = Limits(manifest, settings)
        self._slab = slab = Slab(
            manifest.state,
            manifest.architecture.hidden,
            settings.state_budget_bytes,
            metrics.evicted.labels(name).inc,
        )
        self._batcher = Batcher(runner, slab, metrics, name, max_batch=settings.max_batch, max_queue=settings.max_queue)
        self._forward = Forward(self._batcher, slab)
        self._sessions = Sessions(
            store,
            slab,
            metrics,
            model=name,
            version=self.version,
            ttl_s=settings.session_ttl_s,
            empty=Tail.start(vocabulary.eos_id, vocabulary.size),
            clock=clock,
        )
        self._report = Report(metrics, name)
        self._answering = Answering(manifest, vocabulary, self._forward, self._report)
        self._replayed = metrics.replayed.labels(name)
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._steps: set[asyncio.Task[Answer]] = set()
        metrics.model_info.labels(name, self.version, runner.device).set(1)
        metrics.sessions_resident.labels(name).set_function(lambda: len(slab))
        metrics.state_bytes.labels(name).set_function(lambda: slab.used_bytes)

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return self._runner.device

    def warm_up(self) -> None:
        """Makes the engine ready for its first request. Blocks, so it belongs off the event loop."""
        warm_up(
            self._runner,
            self._slab,
            self.vocabulary.eos_id,
            window=self.manifest.window,
            max_batch=self._max_batch,
        )

    # Questions

    async def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`; long texts are encoded off the event loop. Raises TooLarge over the limit."""
        if len(text) <= ENCODED_AT_ONCE:
            tokens = self.vocabulary.encode(text)
        else:
            tokens = await asyncio.to_thread(self.vocabulary.encode, text)
        self._limits.length(len(tokens))
        return tuple(tokens)

    async def predict(self, request: PredictRequest) -> Answer:
        """Predicts what follows the tokens, or a session's state (nothing is appended).

        Raises InvalidRequest, TooLarge, UnknownSession.
        """
        self._limits.tokens(request.tokens)
        self._limits.top_k(request.top_k)
        if request.window is not None:
            self._limits.of_window(request.window)
        ticket = Ticket(request.deadline)
        with self._admitted():
            async with until(request.deadline):
                if request.session is None:
                    answer = await self._predict_tokens(request, ticket)
                else:
                    answer = await self._predict_session(request, request.session, ticket)
        self._report.answered("predict", answer.mode)
        return answer

    async def predict_many(self, requests: Sequence[PredictRequest]) -> list[Answer | WaneError]:
        """Many predictions side by side; each has its own answer or its own error, in order."""

        async def one(request: PredictRequest) -> Answer | WaneError:
            try:
                return await self.predict(request)
            except WaneError as error:
                return error

        return await asyncio.gather(*map(one, requests))

    async def score(self, request: ScoreRequest) -> Score:
        """One log-probability for each given token. Raises InvalidRequest, TooLarge."""
        self._limits.tokens(request.tokens)
        ticket = Ticket(request.deadline)
        with self._admitted():
            async with until(request.deadline):
                scored = await scoring.score(self._forward, self.vocabulary.eos_id, request, ticket)
        self._report.answered("score", Mode.RECURRENT)
        return scored

    async def compare(self, request: CompareRequest) -> Comparison:
        """Measures recurrent against every window asked for. Raises InvalidRequest, TooLarge."""
        self._limits.tokens(request.tokens)
        self._limits.windows(request.windows)
        ticket = Ticket(request.deadline)
        with self._admitted():
            async with until(request.deadline):
                compared = await comparison.compare(
                    self._forward, self._slab, self.manifest, self.vocabulary, request, ticket
                )
        for line in compared.windows:
            if line.agreement is not None:
                self._report.compared(line.agreement)
        self._report.answered("compare", Mode.BOTH)
        return compared

    async def generate(self, request: GenerateRequest) -> Generation:
        """Checks the request and runs its prompt, then returns the tokens as they come, a `Finish` last.

        To be awaited, so that what is wrong with a request is raised before the first byte of a stream; to be
        closed (`contextlib.aclosing`) however the iteration ends. `auto` is recurrent: once the prompt has been
        run its state is there, and nothing is cheaper than one step for a token.
        Raises InvalidRequest, TooLarge.
        """
        self._limits.tokens(request.tokens)
        self._limits.generated(request.max_tokens)
        if request.window is not None:
            self._limits.of_window(request.window)
        ticket = Ticket(request.deadline)
        fed = sequence(self.vocabulary.eos_id, request.tokens)
        with ExitStack() as stack:
            stack.enter_context(self._admitted())
            source: Source
            if request.mode is Mode.WINDOW:
                source = WindowSource(self._forward, fed, request.window or self._limits.window, ticket)
            else:
                slot = stack.enter_context(self._slab.lease())
                source = RecurrentSource(self._forward, fed, slot, ticket)
            async with until(request.deadline):
                prompted = await source.prompt()
            held = stack.pop_all()
        self._report.answered("generate", Mode.RECURRENT if source.window is None else Mode.WINDOW)
        return Generation(request, self.manifest, self.vocabulary, ticket, source, prompted, held.close)

    async def _predict_tokens(self, request: PredictRequest, ticket: Ticket) -> Answer:
        fed = sequence(self.vocabulary.eos_id, request.tokens)
        position = len(request.tokens)
        mode = request.mode
        k: int | None = request.window or self._limits.window
        if mode is Mode.AUTO:
            k = routing.choose(
                self.manifest,
                position,
                window=request.window,
                own=self._limits.window,
                largest=self._limits.max_window,
                tolerance=request.tolerance,
            )
            mode = Mode.RECURRENT if k is None else Mode.WINDOW
        course = Course(mode, position, None if mode is Mode.RECURRENT else k, Origin.FULL, known=position)
        recurrent: Part | None = None
        if mode is not Mode.WINDOW:
            recurrent = Part(await self._forward.full(fed, ticket), ticket.latency())
        window = await self._answering.window(course, fed, ticket)
        return self._answering.answer(course, recurrent, window, request.top_k, ticket)

    async def _predict_session(self, request: PredictRequest, session: str, ticket: Ticket) -> Answer:
        async with self._sessions.turn(session):
            record = await self._sessions.read(session)
            await self._sessions.touch(session)
            mode = routing.of_session(request.mode, record.mode)
            return await self._recall(record, mode, request.window, request.top_k, ticket)

    # Sessions

    async def create_session(self, session: str | None = None, mode: Mode | None = None) -> SessionView:
        """Starts a session, under its owner's id or a fresh one. Raises SessionExists, InvalidRequest."""
        with self._admitted():
            return self._view(await self._sessions.create(session, mode))

    async def get_session(self, session: str) -> SessionView:
        """Looks at a session without touching its idle time. Raises UnknownSession."""
        return self._view(await self._sessions.read(session))

    async def delete_session(self, session: str) -> None:
        """Ends a session, after the step that it may be in. Raises UnknownSession."""
        async with self._sessions.turn(session):
            await self._sessions.delete(session)

    async def rewind(self, session: str, position: int) -> SessionView:
        """Cuts the session's tail back to `position`.

        Raises UnknownSession, and InvalidRequest naming the positions that the tail holds.
        """
        with self._admitted():
            async with self._sessions.turn(session):
                return self._view(await self._sessions.rewind(session, position))

    async def step(self, request: StepRequest) -> Answer:
        """Appends tokens to a session and predicts what follows; `position` and `replayed` are set.

        A caller that is cancelled, or whose deadline passes, before the step enters a batch leaves no trace;
        after that the step commits, and asking again replays it.
        Raises InvalidRequest, TooLarge, UnknownSession, PositionConflict.
        """
        self._limits.tokens(request.tokens)
        self._limits.top_k(request.top_k)
        ticket = Ticket(request.deadline)
        task = asyncio.create_task(self._step(request, ticket))
        self._steps.add(task)
        task.add_done_callback(self._steps.discard)
        try:
            async with until(request.deadline):
                answer = await asyncio.shield(task)
        except (asyncio.CancelledError, DeadlineExceeded):
            if not ticket.entered:
                task.cancel()
            raise
        self._report.answered("step", answer.mode)
        return answer

    async def _step(self, request: StepRequest, ticket: Ticket) -> Answer:
        """A step in its turn. A comparison lost to another writer is tried again on what that one left."""
        with self._admitted():
            async with self._sessions.turn(request.session):
                for _ in range(1 + RETRIES):
                    record = await self._sessions.read(request.session)
                    mode = routing.of_session(request.mode, record.mode)
                    if place(record, request) is Place.REPLAY:
                        self._replayed.inc()
                        answer = await self._recall(record, mode, None, request.top_k, ticket)
                        return replace(answer, replayed=True)
                    committed = await self._append(record, request, mode, ticket)
                    if committed is not None:
                        return committed
                raise conflict(await self._sessions.read(request.session), request.expected_position)

    async def _append(self, record: Record, request: StepRequest, mode: Mode, ticket: Ticket) -> Answer | None:
        """Runs a step that comes next and commits it; None if the comparison was lost.

        The next state is written to a slot of its own, so whatever fails on the way has changed nothing.
        """
        tokens = np.array(request.tokens, np.int64)
        position = record.position + len(tokens)
        fed = np.concatenate([record.tail.ids(), tokens])
        resident = self._sessions.resident(record)
        cut = record.cut if resident is None else resident.cut
        course = self._course(mode, position, None, len(fed), resident is None, cut)
        recurrent: Part | None = None
        with ExitStack() as stack:
            slot: int | None = None
            if mode is not Mode.WINDOW:
                if resident is not None:
                    stack.enter_context(self._slab.hold(resident.slot))
                slot = stack.enter_context(self._slab.lease())
                if resident is not None:
                    outcome = await self._forward.append(tokens, ticket, read=resident.slot, write=slot, binding=True)
                else:
                    outcome = await self._forward.full(fed, ticket, write=slot, binding=True)
                    self._sessions.count_rebuilt()
                recurrent = Part(outcome, ticket.latency())
            window = await self._answering.window(course, fed, ticket, binding=True)
            committed = await self._sessions.commit(record, request, slot, cut)
        if committed is None:
            return None
        answer = self._answering.answer(course, recurrent, window, request.top_k, ticket)
        return replace(answer, session=record.session, position=committed.position, replayed=False)

    async def _recall(self, record: Record, mode: Mode, window: int | None, top_k: int, ticket: Ticket) -> Answer:
        """The answer of a session as it stands. A state that had to be rebuilt for it stays resident."""
        fed = record.tail.ids()
        resident = self._sessions.resident(record)
        cut = record.cut if resident is None else resident.cut
        course = self._course(mode, record.position, window, len(fed), resident is None, cut)
        recurrent: Part | None = None
        if mode is not Mode.WINDOW:
            if resident is not None:
                with self._slab.hold(resident.slot):
                    outcome = await self._forward.again(resident.slot, ticket)
            else:
                with self._slab.lease() as slot:
                    outcome = await self._forward.full(fed, ticket, write=slot)
                    self._sessions.count_rebuilt()
                    self._sessions.keep(record, slot, cut)
            recurrent = Part(outcome, ticket.latency())
        part = await self._answering.window(course, fed, ticket)
        answer = self._answering.answer(course, recurrent, part, top_k, ticket)
        return replace(answer, session=record.session, position=record.position)

    def _course(self, mode: Mode, position: int, window: int | None, held: int, rebuilt: bool, cut: int) -> Course:
        """How a session is answered that has `held` tokens in hand, and whose state knows all but `cut`.

        Raises InvalidRequest for a window longer than what is held of it.
        """
        k: int | None = None
        if mode is not Mode.RECURRENT:
            k = self._limits.window if window is None else window
            if held <= position and k > held:  # held > position is all of the sequence: any k will do
                if window is not None:
                    raise InvalidRequest(
                        f"window is {window}, but only the last {held} tokens are kept of the session", "window"
                    )
                k = held
        origin = Origin.REBUILT if rebuilt else Origin.RESIDENT
        return Course(mode, position, k, origin, known=position - cut)

    def _view(self, record: Record) -> SessionView:
        resident = self._sessions.resident(record, use=False)
        known = record.position - (record.cut if resident is None else resident.cut)
        return SessionView(
            session=record.session,
            model=record.model,
            model_version=record.model_version,
            mode=record.mode,
            position=record.position,
            state=Origin.REBUILT if resident is None else Origin.RESIDENT,
            error_bound=routing.error_bound(self.manifest, known, record.position),
            idle_s=record.idle_s,
        )

    # Life

    async def report(self) -> dict[str, object]:
        """This model's part of /v1/report: name, version, device, modes, operations, agreement, sessions."""
        return {
            "model": self.name,
            "model_version": self.version,
            "device": self.device,
            **self._report.document(),
            "sessions": await self._sessions.counts(),
        }

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Counts a request while it lasts. Raises Unavailable when no more are taken."""
        if self._draining:
            raise Unavailable("the server is stopping")
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def drain(self) -> None:
        """Takes no new requests (Unavailable), and waits for those that were admitted."""
        self._draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """Takes no new requests, fails what is still queued, and ends the runner's thread."""
        self._draining = True
        await self._batcher.close()
