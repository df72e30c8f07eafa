"""Sessions: a sequence that grows step by step, with its state kept between requests."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from service.documents.answers import AnswerDocument
from service.documents.sessions import SessionDocument
from service.engine.engine import Engine
from service.engine.requests import MAX_KEY_CHARACTERS, SESSION_ID, History, StepRequest
from service.errors import InvalidRequest, shown
from service.routes import answers
from service.routes.context import catalog, deadline, header, named, note_answer, note_model, owner
from service.routes.decode import decode, headers, json_body, tokens_of
from service.routes.hangup import until_hangup
from service.schemas import IDEMPOTENCY, RewindBody, SessionBody, StepBody, anchored

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
    response_model=SessionDocument,
    openapi_extra=json_body(SessionBody),
    responses={
        200: {
            "model": SessionDocument,
            "description": "The session existed already with the same options, and no step was taken yet",
        }
    },
)
async def create(request: Request) -> Response:
    """Starts a session under an id of your own or a new one: at position 0, or at `position` behind its last tokens.

    Sent again before the first step, the same request is answered 200 with the session.
    """
    body = await decode(request, SessionBody)
    engine = catalog(request).get(body.model)
    note_model(request, engine)
    with until_hangup(request):
        history = await _history(engine, body, deadline(request))
    view = await engine.create_session(body.session, body.mode, owner(request), history)
    document = answers.session(engine, view)
    return answers.reply(document, 201 if view.created else 200, {"location": f"/v1/sessions/{document['session']}"})


async def _history(engine: Engine, body: SessionBody, until: float | None) -> History | None:
    """What the session goes on from; None where it starts at position 0. Raises InvalidRequest, TooLarge."""
    if body.position is None:
        return None
    if body.input is not None:
        return History(await tokens_of(engine, body.input, until), body.position)
    return History(tuple(body.history or ()), body.position)


@router.head("/{session}", include_in_schema=False)
@router.get("/{session}", response_model=SessionDocument)
async def read(request: Request, session: SessionId) -> Response:
    """Where a session is. Looking does not keep it alive."""
    name = named(request, session)
    engine = await catalog(request).engine_for(name)
    note_model(request, engine)
    return answers.reply(answers.session(engine, await engine.get_session(name)))


@router.delete("/{session}", status_code=204)
async def delete(request: Request, session: SessionId) -> Response:
    """Ends a session."""
    name = named(request, session)
    engine = await catalog(request).engine_for(name)
    note_model(request, engine)
    with until_hangup(request):
        await engine.delete_session(name, deadline(request))
    return Response(status_code=204)


@router.post("/{session}/tokens", response_model=AnswerDocument, openapi_extra=json_body(StepBody) | STEP_HEADERS)
async def append(request: Request, session: SessionId) -> Response:
    """Appends tokens and predicts what follows. A step may be sent again: see `expected_position` and the key."""
    body = await decode(request, StepBody)
    given = position(request, body)
    name = named(request, session)
    engine = await catalog(request).engine_for(name)
    note_model(request, engine)
    with until_hangup(request):
        tokens = await tokens_of(engine, body.sequence, deadline(request))
        answer = await engine.step(step(request, name, tokens, given, body))
    note_answer(request.scope, answer)
    return answers.reply(answers.answer(engine, answer))


def step(
    request: Request, session: str, tokens: tuple[int, ...], expected_position: int | None, body: StepBody
) -> StepRequest:
    """What a request asks of the engine; `session` as it goes by within. Raises InvalidRequest."""
    return StepRequest(
        session,
        tokens,
        body.mode,
        expected_position,
        header(request, IDEMPOTENCY_KEY),
        body.top_k,
        deadline(request),
    )


def position(request: Request, body: StepBody) -> int | None:
    """Where the step says that it starts, in its body or in a header. Raises InvalidRequest if the two differ."""
    given = header(request, POSITION)
    if given is None:
        return body.expected_position
    if not re.fullmatch(DIGITS, given):
        raise InvalidRequest(f"{POSITION} must be a whole number, not {shown(given)}", POSITION)
    if body.expected_position not in (None, int(given)):
        raise InvalidRequest(
            f"expected_position is {body.expected_position}, but the header {POSITION} says {given}",
            "expected_position",
        )
    return int(given)


@router.post("/{session}/rewind", response_model=SessionDocument, openapi_extra=json_body(RewindBody))
async def rewind(request: Request, session: SessionId) -> Response:
    """Forgets the latest tokens, back to `position`; the state is rebuilt on the next step."""
    body = await decode(request, RewindBody)
    name = named(request, session)
    engine = await catalog(request).engine_for(name)
    note_model(request, engine)
    with until_hangup(request):
        view = await engine.rewind(name, body.position, deadline(request))
    return answers.reply(answers.session(engine, view))
