"""A fake engine and a fake registry for tests of the layers that call the engine. They answer without delay. A test can
set an event for which they wait, or an exception that they raise."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from tests.models.rounding import rounding
from tests.service.engine_harness import byte_vocabulary
from wane.models.manifest import SCHEMA_VERSION, Manifest
from wane.service.batching.ticket import Ticket
from wane.service.batching.turns import Turns
from wane.service.deadline import until
from wane.service.engine.event_names import EventNames
from wane.service.engine.limits import Limits
from wane.service.engine.pending import Pending
from wane.service.errors import LoadFailed, Unavailable, UnknownModel, UnknownSession
from wane.service.registry.registry import IndexEntry
from wane.service.registry.swap import Epochs
from wane.service.sessions.stores.store import StoreHealth
from wane.service.settings import Settings
from wane.service.types.answer import (
    Agreement,
    Answer,
    Continuations,
    ModeAnswer,
    NewSession,
    Prediction,
    SessionState,
    SessionView,
)
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import (
    ANYBODY,
    CompareRequest,
    ContinuationsRequest,
    GenerateRequest,
    History,
    Latency,
    Owner,
    PredictRequest,
    ScoreRequest,
    StepRequest,
    id_of,
    name_within,
)
from wane.service.types.text import (
    ComparedMode,
    Comparison,
    Finish,
    FinishReason,
    GeneratedToken,
    Percentiles,
    Phases,
    Score,
    ScoredTokens,
    ScoreProgress,
    ScoreSummary,
)

VOCABULARY = byte_vocabulary()
LATENCY = Latency(0.25, 0.5, 1.0)
PREDICTIONS = (Prediction(7, " the", 0.5, -0.6931), Prediction(200, "\ufffd", 0.25, -1.3863, (0xC3,)))
AGREEMENT = Agreement(True, True, 1e-4, 1e-8, 1e-3, 1e-2, 2e-2, 1e-2)
MANIFEST = Manifest.model_validate(
    {
        "schema_version": SCHEMA_VERSION,
        "name": "fake",
        "version": "3",
        "description": "answers at once",
        "architecture": {"cell": "gated", "vocabulary_size": 256, "embedding": 4, "hidden": 4, "layers": 1},
        "vocabulary": {"kind": "bpe", "size": 256, "eos_id": 0, "sha256": "0" * 64},
        "state": [{"name": "layers.0.s", "shape": [4]}],
        "window": 8,
        "max_window": 16,
        "opset": 20,
        "graphs": {},
        "weights": "weights.safetensors",
        "tokenizer": "tokenizer.json",
        "files": {},
        "certificate": {
            "contractive": True,
            "certified": False,
            "reason": "the bound is still 0.02",
            "layers": [],
            "state_error": [0.4, 0.2, 0.02],
            "error_bound": [0.5, 0.1, 0.02],
            "head_diameter": 4.0,
            "rounding": rounding(1e-6, states=("layers.0.s",)).model_dump(),
        },
        "quality": None,
        "provenance": {
            "created": "2026-01-02T03:04:05+00:00",
            "command": "none",
            "config": {},
            "seed": 0,
            "steps": 0,
            "best_step": 0,
            "git_commit": None,
            "data": {},
            "versions": {},
            "hardware": "none",
            "train_wall_s": 0.0,
        },
    }
)


def with_tuples(request: Any) -> Any:
    """Returns a request, or a part of one, with tuples in place of arrays of token ids. Arrays are not equal to tuples,
    and the tests compare the requests with literals."""
    if isinstance(request, array):
        return tuple(request)
    if type(request) is tuple:
        return tuple(map(with_tuples, request))
    if isinstance(request, Struct):
        return structs.replace(
            request, **{name: with_tuples(getattr(request, name)) for name in request.__struct_fields__}
        )
    if isinstance(request, History):
        return dataclasses.replace(request, tokens=tuple(request.tokens))
    return request


class FakeEngine:
    """An engine that answers every request with fixed values, or raises `failure` if this is not None. If `wait` is not
    None, the engine first waits for this event.

    `asked` lists all requests. The engine sets the event `waiting` when a request begins to wait, the event `cancelled`
    when a request is cancelled during the wait, and the event `closed` when a generation has ended.
    """

    name = "fake"
    version = "3"
    device = "cpu"
    identity = name, version, device
    retired = False
    manifest = MANIFEST
    vocabulary: Any = VOCABULARY
    events = EventNames(MANIFEST, VOCABULARY, Settings())
    limits = Limits(MANIFEST, Settings(), VOCABULARY)

    def __init__(self) -> None:
        self.turns = Turns()
        self.cost_model = {"step": [{"tokens": 1.0, "compute_ms": 0.25}]}
        self.failure: Exception | None = None
        self.failure_after_first_token: Exception | None = None
        self.wait_after_first_token: asyncio.Event | None = None
        self.wait: asyncio.Event | None = None
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.closed = asyncio.Event()
        self.asked: list[object] = []

    async def _ask(self, request: object) -> None:
        self.asked.append(with_tuples(request))
        if self.wait is not None:
            self.waiting.set()
            try:
                await self.wait.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if self.failure is not None:
            raise self.failure

    async def encode(self, text: str, deadline: float | None = None, *, document: bool = False) -> tuple[int, ...]:
        return tuple(text.strip().encode())

    def submit(self, request: PredictRequest | StepRequest) -> Pending[Answer]:
        answer = self.step(request) if isinstance(request, StepRequest) else self._predict(request)
        return Pending.of(answer, Ticket(request.deadline))

    def step_one(
        self, session: str, token: int, expected_position: int | None, top_k: int, deadline: float | None
    ) -> Pending[Answer]:
        return self.submit(StepRequest(session, (token,), None, expected_position, None, top_k, deadline))

    async def _predict(self, request: PredictRequest) -> Answer:
        await self._ask(request)
        if request.mode is not Mode.BOTH:
            return Answer(
                *self.identity, request.mode, None, PREDICTIONS, LATENCY, StateSource.FULL, 0.25, 0.5, top1_proved=True
            )
        part = ModeAnswer(PREDICTIONS, LATENCY)
        return Answer(
            *self.identity,
            Mode.BOTH,
            8,
            PREDICTIONS,
            LATENCY,
            StateSource.FULL,
            0.0,
            0.0,
            True,
            {Mode.RECURRENT: part, Mode.WINDOW: part},
            AGREEMENT,
        )

    async def predict_many(self, requests: Sequence[PredictRequest]) -> list[Answer | Exception]:
        outcomes: list[Answer | Exception] = []
        for request in requests:
            try:
                outcomes.append(await self.submit(request))
            except Exception as error:
                outcomes.append(error)
        return outcomes

    async def step(self, request: StepRequest) -> Answer:
        await self._ask(request)
        return Answer(
            *self.identity,
            Mode.RECURRENT,
            None,
            PREDICTIONS,
            LATENCY,
            StateSource.RESIDENT,
            0.0,
            None,
            False,
            session=id_of(request.session),
            position=len(request.tokens),
            replayed=False,
        )

    async def score(self, request: ScoreRequest) -> Score:
        await self._ask(request)
        return Score(
            **structs.asdict(self._summary()), tokens=tuple(request.tokens), logprobs=(-1.0,) * len(request.tokens)
        )

    def _summary(self) -> ScoreSummary:
        return ScoreSummary(*self.identity, 2.718281828, 1, None, 1, 0.0, StateSource.FULL, 0.0, LATENCY)

    async def scoring(self, request: ScoreRequest) -> AsyncGenerator[ScoreProgress | ScoredTokens | ScoreSummary, None]:
        await self._ask(request)
        return self._scores(request)

    async def _scores(self, request: ScoreRequest) -> AsyncGenerator[ScoreProgress | ScoredTokens | ScoreSummary, None]:
        try:
            for index in range(len(request.tokens)):
                if index and self.failure_after_first_token is not None:
                    raise self.failure_after_first_token
                if index and self.wait_after_first_token is not None:
                    await self.wait_after_first_token.wait()
                yield ScoredTokens(index, (request.tokens[index],), (-1.0,))
                yield ScoreProgress(index + 1, len(request.tokens))
        finally:
            self.closed.set()
        yield self._summary()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GeneratedToken | Finish, None]:
        await self._ask(request)
        return self._tokens(request)

    async def _tokens(self, request: GenerateRequest) -> AsyncGenerator[GeneratedToken | Finish, None]:
        try:
            for index in range(request.max_tokens):
                if index and self.failure_after_first_token is not None:
                    raise self.failure_after_first_token
                if index and self.wait_after_first_token is not None:
                    await self.wait_after_first_token.wait()
                yield GeneratedToken(200, "\ufffd", "", -0.5, (0xC3,))
        finally:
            self.closed.set()
        yield Finish(
            *self.identity,
            text="é",
            tokens=(200,) * request.max_tokens,
            finish_reason=FinishReason.LENGTH,
            mode=Mode.RECURRENT,
            window=None,
            state=StateSource.FULL,
            error_bound=0.0,
            latency=LATENCY,
        )

    async def compare(self, request: CompareRequest) -> Comparison:
        await self._ask(request)
        percentiles = Percentiles(0.5, 1.0)

        def line(window: int | None) -> ComparedMode:
            return ComparedMode(
                Mode.RECURRENT if window is None else Mode.WINDOW,
                window,
                StateSource.RESIDENT if window is None else StateSource.WINDOW,
                PREDICTIONS,
                Phases(percentiles, percentiles, percentiles),
                0.0,
                None if window is None else AGREEMENT,
            )

        windows = tuple(line(window) for window in request.windows)
        return Comparison(*self.identity, len(request.tokens), request.repeat, line(None), windows)

    async def create_session(
        self,
        session: str | None = None,
        mode: Mode | None = None,
        owner: Owner = ANYBODY,
        history: History | None = None,
    ) -> SessionView:
        await self._ask((session, mode) if history is None else (session, mode, history))
        name = name_within(owner.name, "new" if session is None else session)
        return NewSession(**structs.asdict(self._view(name, mode or Mode.AUTO)))

    async def get_session(self, session: str) -> SessionView:
        await self._ask(session)
        return self._view(session)

    async def session_state(self, session: str, deadline: float | None = None) -> SessionState:
        await self._ask(session)
        return SessionState(*self.identity, id_of(session), 0, StateSource.RESIDENT, (0.0,), 0.0)

    async def delete_session(self, session: str, deadline: float | None = None) -> None:
        await self._ask(session)

    async def rewind(self, session: str, position: int, deadline: float | None = None) -> SessionView:
        await self._ask((session, position))
        return self._view(session)

    async def fork(
        self,
        session: str,
        given: str | None = None,
        position: int | None = None,
        owner: Owner = ANYBODY,
        deadline: float | None = None,
    ) -> SessionView:
        await self._ask((session, given, position))
        return self._view(given or session)

    async def continuations(self, request: ContinuationsRequest) -> Continuations:
        await self._ask(request)
        return Continuations(*self.identity, id_of(request.session), 0, ())

    def _view(self, session: str, mode: Mode = Mode.AUTO) -> SessionView:
        return SessionView(*self.identity, id_of(session), mode, 0, StateSource.RESIDENT, 0.0, 0.0)


class FakeRegistry:
    """A registry of one fake engine. The registry is ready from the start. After a call of `begin_loading`, requests
    wait until the test sets the event `loaded`. Every session exists, except the session `unknown`. If `failure` is not
    None, `check_ready` and the methods that call it raise this exception."""

    device = "cpu"
    default = "fake"
    status = "ready"

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.epochs = Epochs()
        self.failure: Exception | None = None
        self.loaded: asyncio.Event | None = None
        self.waiting = asyncio.Event()  # set when a request begins to wait for the model
        self.draining = asyncio.Event()
        self.leaving = asyncio.Event()
        self.standing = StoreHealth("memory")

    @property
    def store(self) -> StoreHealth:
        return self.standing

    @property
    def ready(self) -> bool:
        return self.status == "ready" and not self.leaving.is_set()

    @property
    def served(self) -> Sequence[FakeEngine]:
        return [self.engine] if self.ready else []

    @property
    def loading(self) -> Sequence[str]:
        return [self.engine.name] if self.status == "loading" else []

    @property
    def failures(self) -> Mapping[str, LoadFailed]:
        return {}

    async def load(self, on_default: Callable[[], None] = lambda: None) -> None:
        on_default()

    def begin_loading(self) -> asyncio.Event:
        """Sets the status to "loading". Returns an event. When the test sets the event, the model is loaded."""
        self.status = "loading"
        self.loaded = asyncio.Event()
        return self.loaded

    def is_coming(self, name: str | None = None) -> bool:
        return self.loaded is not None and not self.loaded.is_set()

    async def wait_for(self, name: str | None = None, deadline: float | None = None) -> None:
        if self.loaded is not None:
            self.waiting.set()
            async with until(deadline):
                await self.loaded.wait()
        self.check_ready()

    async def wait_for_all(self, deadline: float | None = None) -> None:
        await self.wait_for(None, deadline)

    def check_ready(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.status != "ready" and self.loaded is None:
            raise Unavailable(f"the server is {self.status}")

    def get(self, name: str | None = None) -> FakeEngine:
        self.check_ready()
        if name not in (None, self.engine.name):
            raise UnknownModel(f"there is no model {name!r}")
        if self.is_coming():
            raise Unavailable(f"the server is loading model {self.engine.name!r}")
        return self.engine

    def resident_engine(self, session: str) -> FakeEngine | None:
        """Returns None, because this registry keeps no resident state."""
        return None

    async def engine_for(self, session: str, model: str | None = None, deadline: float | None = None) -> FakeEngine:
        if id_of(session) == "unknown":
            raise UnknownSession(f"there is no session {id_of(session)!r}")
        await self.wait_for(model, deadline)
        return self.get(model)

    def list(self) -> list[FakeEngine]:
        return [self.get()]

    async def report(self) -> dict[str, object]:
        self.get()
        return {"device": "cpu", "models": []}

    def leave(self) -> None:
        self.leaving.set()

    async def load_model(self, name: str, deadline: float | None = None) -> FakeEngine:
        return self.get(name)

    async def unload_model(self, name: str, deadline: float | None = None) -> None:
        self.get(name)

    async def index(self) -> Sequence[IndexEntry]:
        self.check_ready()
        return [
            IndexEntry("fake", "3", "READY", ""),
            IndexEntry("fake", "4", "LOADING", ""),
            IndexEntry("other", "", "UNAVAILABLE", "its manifest is not JSON"),
        ]

    async def close(self) -> None:
        """Waits for the engine's event `wait`, as the real registry waits for admitted requests."""
        self.status = "draining"
        self.draining.set()
        if self.engine.wait is not None:
            await self.engine.wait.wait()
