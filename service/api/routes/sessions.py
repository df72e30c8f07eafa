"""Sessions: sequences that grow step by step, their state kept between requests; one step or many."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.body import ONE_TOKEN, decode, headers, json_body, only_token, tokens_of
from wane.service.api.deps import (
    charge,
    deadline,
    header,
    model_engine,
    note_answer,
    owner,
    registry,
    session_engine,
    session_key,
)
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import WHOLE_BODY, context
from wane.service.api.problem import failure_document
from wane.service.api.schemas.common import IDEMPOTENCY, anchored
from wane.service.api.schemas.predict import AnswerDocument, FailureDocument, StepsDocument
from wane.service.api.schemas.sessions import (
    RewindBody,
    SessionBody,
    SessionStepBody,
    StepBody,
    StepsBody,
)
from wane.service.engine.engine import Engine
from wane.service.engine.step_many import step_many
from wane.service.errors import EarlierStepFailed, InvalidRequest, truncate_repr
from wane.service.types import (
    MAX_KEY_CHARACTERS,
    SESSION_ID,
    Answer,
    History,
    NewSession,
    SessionView,
    StepRequest,
    name_within,
)

# What is no id is refused by the engine, not by the framework, whose answer would be another.
PATTERN: dict[str, Any] = {"pattern": anchored(SESSION_ID.pattern)}
SessionId = Annotated[str, Path(examples=["demo"], description="the session's id", json_schema_extra=PATTERN)]
POSITION = "x-wane-position"
DIGITS = "[0-9]{1,15}"
IDEMPOTENCY_KEY = "idempotency-key"
STEP_HEADERS = headers(
    {
        POSITION: ("as `expected_position`", {"pattern": anchored(DIGITS)}),
        IDEMPOTENCY_KEY: (
            IDEMPOTENCY,
            {"minLength": 1, "maxLength": MAX_KEY_CHARACTERS},
        ),
    }
)

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


@router.post(
    "",
    status_code=201,
    response_model=SessionView,
    openapi_extra=json_body(SessionBody),
    responses={
        200: {
            "model": SessionView,
            "description": "The session existed already with the same options, and no step was taken yet",
        }
    },
)
async def create(request: Request) -> Response:
    """Starts a session under an id of your own or a new one: at position 0, or at `position` behind its last tokens.

    Sent again before the first step, the same request is answered 200 with the session.
    """
    body = await decode(request, SessionBody)
    engine = await model_engine(request, body.model)
    with until_hangup(request):
        history = await _history(engine, body, deadline(request))
    view = await engine.create_session(body.session, body.mode, owner(request), history)
    return encode.reply(
        view, 201 if isinstance(view, NewSession) else 200, {"location": f"/v1/sessions/{view.session}"}
    )


async def _history(engine: Engine, body: SessionBody, until: float | None) -> History | None:
    """What the session goes on from; None where it starts at position 0. Raises InvalidRequest, TooLarge."""
    if body.position is None:
        return None
    if body.input is not None:
        return History(await tokens_of(engine, body.input, until), body.position)
    return History(tuple(body.history or ()), body.position)


@router.head("/{session}", include_in_schema=False)
@router.get("/{session}", response_model=SessionView)
async def read(request: Request, session: SessionId) -> Response:
    """Where a session is. Looking does not keep it alive."""
    name = session_key(request, session)
    engine = await session_engine(request, name)
    return encode.reply(await engine.get_session(name))


@router.delete("/{session}", status_code=204)
async def delete(request: Request, session: SessionId) -> Response:
    """Ends a session."""
    name = session_key(request, session)
    engine = await session_engine(request, name)
    with until_hangup(request):
        await engine.delete_session(name, deadline(request))
    return Response(status_code=204)


@router.post("/{session}/tokens", response_model=AnswerDocument, openapi_extra=json_body(StepBody) | STEP_HEADERS)
async def append(request: Request, session: SessionId) -> Response:
    """Appends tokens and predicts what follows. A step may be sent again: see `expected_position` and the key."""
    here = context(request.scope)
    token = only_token(request.scope.get(WHOLE_BODY))
    body = ONE_TOKEN if token is not None else await decode(request, StepBody)
    expected_position = position(here.header(POSITION), body.expected_position)
    key = name_within(here.owner.name, session)
    engine = await session_engine(request, key)
    tokens = (token,) if token is not None else await tokens_of(engine, body.sequence, here.deadline)
    idempotency_key = here.header(IDEMPOTENCY_KEY)
    answer = await engine.submit(step_request(key, tokens, body, here.deadline, expected_position, idempotency_key))
    note_answer(request.scope, answer)
    return encode.reply(encode.answer(engine, answer))


def step_request(
    session: str,
    tokens: tuple[int, ...],
    body: StepBody,
    deadline: float | None,
    expected_position: int | None,
    idempotency_key: str | None,
) -> StepRequest:
    """What a body asks of the engine; `session` is its key. Raises InvalidRequest."""
    return StepRequest(session, tokens, body.mode, expected_position, idempotency_key, body.top_k, deadline)


def position(given: str | None, in_body: int | None) -> int | None:
    """Where the step says that it starts, in a header or in its body. Raises InvalidRequest if the two differ."""
    if given is None:
        return in_body
    if not re.fullmatch(DIGITS, given):
        raise InvalidRequest(f"{POSITION} must be a whole number, not {truncate_repr(given)}", POSITION)
    if in_body not in (None, int(given)):
        raise InvalidRequest(
            f"expected_position is {in_body}, but the header {POSITION} says {given}",
            "expected_position",
        )
    return int(given)


@router.post("/{session}/rewind", response_model=SessionView, openapi_extra=json_body(RewindBody))
async def rewind(request: Request, session: SessionId) -> Response:
    """Forgets the latest tokens, back to `position`; the state is rebuilt on the next step."""
    body = await decode(request, RewindBody)
    name = session_key(request, session)
    engine = await session_engine(request, name)
    with until_hangup(request):
        view = await engine.rewind(name, body.position, deadline(request))
    return encode.reply(view)


Result = tuple[Engine, Answer] | Exception


@router.post("/tokens", response_model=StepsDocument, openapi_extra=json_body(StepsBody))
async def append_many(request: Request) -> Response:
    """Appends to many sessions, and predicts what follows in each. A step that fails does not fail the others."""
    body = await decode(request, StepsBody)
    for name in (POSITION, IDEMPOTENCY_KEY):
        if header(request, name) is not None:
            raise InvalidRequest(f"{name} is a header for one step: of many, each has its own field", name)
    charge(request, len(body.steps))
    steps = await _step_many(request, body.steps)
    results: list[AnswerDocument | FailureDocument] = []
    for index, step in enumerate(steps, 1):
        results.append(_document(request, step))
        if index % encode.MADE_AT_ONCE == 0:
            await asyncio.sleep(0)
    document: StepsDocument = {"results": results}
    return encode.reply(document)


async def _step_many(request: Request, bodies: Sequence[SessionStepBody]) -> list[Result]:
    """Every step at its session's engine, which is the same for all of the session's steps, whatever is loaded
    meanwhile. Raises Unavailable where no model is served."""
    models, until = registry(request), deadline(request)
    if models.is_coming():
        await models.wait_for(deadline=until)
    models.check_ready()
    results: list[Result | None] = [None] * len(bodies)
    engines: dict[str, Engine] = {}
    steps: dict[int, StepRequest] = {}
    failed: set[str] = set()
    owner_name = owner(request).name
    for index, body in enumerate(bodies):
        try:
            if body.session in failed:
                raise EarlierStepFailed(body.session)
            session = name_within(owner_name, body.session)
            engine = engines.get(session) or await models.engine_for(session, None, until)
            engines[session] = engine
            tokens = await _tokens(engine, body, until)
            steps[index] = step_request(session, tokens, body, until, body.expected_position, body.idempotency_key)
        except Exception as error:
            failed.add(body.session)
            results[index] = error
    answers = await step_many(lambda step: engines[step.session].submit(step), [*steps.values()])
    for (index, step), answer in zip(steps.items(), answers, strict=True):
        results[index] = answer if isinstance(answer, Exception) else (engines[step.session], answer)
    return [result for result in results if result is not None]


async def _tokens(engine: Engine, body: SessionStepBody, until: float | None) -> tuple[int, ...]:
    if body.input is None:
        return tuple(body.tokens or ())
    await asyncio.sleep(0)  # many short texts hold up nobody, and the deadline and a hang-up are seen
    return await tokens_of(engine, body.input, until)


def _document(request: Request, result: Result) -> AnswerDocument | FailureDocument:
    if isinstance(result, Exception):
        return {"error": failure_document(request.scope, result)}
    return encode.answer(*result)
