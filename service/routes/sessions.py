"""Sessions: a sequence that grows step by step, with its state kept between requests."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path
from starlette.requests import Request
from starlette.responses import Response

from service.documents import AnswerDocument, SessionDocument
from service.engine.types import StepRequest
from service.errors import InvalidRequest
from service.routes import answers
from service.routes.context import catalog, deadline, note_answer, note_model
from service.routes.decode import decode, json_body, tokens_of
from service.routes.hangup import until_hangup
from service.schemas import RewindBody, SessionBody, StepBody

SessionId = Annotated[str, Path(examples=["demo"], description="the session's id")]
Position = Annotated[int | None, Header(description="as `expected_position`")]
IdempotencyKey = Annotated[
    str | None,
    Header(description="a step sent again with the key of the last one is answered again, not appended"),
]

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


@router.post("", status_code=201, response_model=SessionDocument, openapi_extra=json_body(SessionBody))
async def create(request: Request) -> Response:
    """Starts a session at position 0, under an id of your own or a new one."""
    body = await decode(request, SessionBody)
    engine = catalog(request).get(body.model)
    note_model(request, engine)
    view = await engine.create_session(body.session, body.mode)
    location = {"location": f"/v1/sessions/{view.session}"}
    return answers.reply(answers.session(engine, view), 201, location)


@router.get("/{session}", response_model=SessionDocument)
async def read(request: Request, session: SessionId) -> Response:
    """Where a session is. Looking does not keep it alive."""
    engine = await catalog(request).engine_for(session)
    note_model(request, engine)
    return answers.reply(answers.session(engine, await engine.get_session(session)))


@router.delete("/{session}", status_code=204)
async def delete(request: Request, session: SessionId) -> Response:
    """Ends a session."""
    engine = await catalog(request).engine_for(session)
    note_model(request, engine)
    await engine.delete_session(session)
    return Response(status_code=204)


@router.post("/{session}/tokens", response_model=AnswerDocument, openapi_extra=json_body(StepBody))
async def append(
    request: Request,
    session: SessionId,
    x_wane_position: Position = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Appends tokens and predicts what follows. A step may be sent again: see `expected_position` and the key."""
    body = await decode(request, StepBody)
    position = x_wane_position if body.expected_position is None else body.expected_position
    if x_wane_position is not None and position != x_wane_position:
        raise InvalidRequest(
            f"expected_position is {position}, but the header x-wane-position says {x_wane_position}",
            "expected_position",
        )
    engine = await catalog(request).engine_for(session)
    note_model(request, engine)
    async with until_hangup(request):
        step = StepRequest(
            session=session,
            tokens=await tokens_of(engine, body.sequence),
            mode=body.mode,
            expected_position=position,
            idempotency_key=idempotency_key,
            top_k=body.top_k,
            deadline=deadline(request),
        )
        given = await engine.step(step)
    note_answer(request, given)
    return answers.reply(answers.answer(engine, given))


@router.post("/{session}/rewind", response_model=SessionDocument, openapi_extra=json_body(RewindBody))
async def rewind(request: Request, session: SessionId) -> Response:
    """Forgets the latest tokens, back to `position`; the state is rebuilt on the next step."""
    body = await decode(request, RewindBody)
    engine = await catalog(request).engine_for(session)
    note_model(request, engine)
    return answers.reply(answers.session(engine, await engine.rewind(session, body.position)))
