"""Steps of many sessions in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.documents.answers import AnswerDocument, FailureDocument, StepsDocument
from service.engine.answers import Answer
from service.engine.engine import Engine
from service.engine.ownership import name_within
from service.engine.requests import StepRequest
from service.errors import EarlierStepFailed, InvalidRequest
from service.routes import answers
from service.routes.context import catalog, charge, deadline, header, owner
from service.routes.decode import decode, json_body, tokens_of
from service.routes.errors import failure_document
from service.routes.hangup import until_hangup
from service.routes.sessions import IDEMPOTENCY_KEY, POSITION
from service.schemas import SessionStepBody, StepsBody

router = APIRouter(tags=["sessions"])

Outcome = tuple[Engine, Answer] | Exception


@router.post("/v1/sessions/tokens", response_model=StepsDocument, openapi_extra=json_body(StepsBody))
async def append_many(request: Request) -> Response:
    """Appends to many sessions, and predicts what follows in each. A step that fails does not fail the others."""
    body = await decode(request, StepsBody)
    for name in (POSITION, IDEMPOTENCY_KEY):
        if header(request, name) is not None:
            raise InvalidRequest(f"{name} is a header for one step: of many, each has its own field", name)
    charge(request, len(body.steps))
    with until_hangup(request):
        outcomes = await _step_many(request, body.steps)
    results: list[AnswerDocument | FailureDocument] = []
    for index, outcome in enumerate(outcomes, 1):
        results.append(_document(request, outcome))
        if index % answers.MADE_AT_ONCE == 0:
            await asyncio.sleep(0)
    document: StepsDocument = {"results": results}
    return answers.reply(document)


async def _step_many(request: Request, bodies: Sequence[SessionStepBody]) -> list[Outcome]:
    """Every step at its session's engine, which is one for all of the session's, whatever is loaded meanwhile: so that
    they come in their order. Raises Unavailable where nothing is served."""
    models = catalog(request)
    models.check_ready()
    outcomes: list[Outcome | None] = [None] * len(bodies)
    engines: dict[str, Engine] = {}
    by_engine: dict[Engine, list[tuple[int, StepRequest]]] = {}
    failed: set[str] = set()
    until, owner_name = deadline(request), owner(request).name
    for index, body in enumerate(bodies):
        try:
            if body.session in failed:
                raise EarlierStepFailed(body.session)
            session = name_within(owner_name, body.session)
            engine = engines.get(session) or models.engine_at_once(session) or await models.engine_for(session)
            engines[session] = engine
            step = StepRequest(
                session,
                await _tokens(engine, body, until),
                body.mode,
                body.expected_position,
                body.idempotency_key,
                body.top_k,
                until,
            )
        except Exception as error:
            failed.add(body.session)
            outcomes[index] = error
        else:
            by_engine.setdefault(engine, []).append((index, step))

    async def at(engine: Engine, steps: Sequence[tuple[int, StepRequest]]) -> None:
        answered = await engine.step_many([step for _, step in steps])
        for (index, _), outcome in zip(steps, answered, strict=True):
            outcomes[index] = outcome if isinstance(outcome, Exception) else (engine, outcome)

    await asyncio.gather(*(at(engine, steps) for engine, steps in by_engine.items()))
    return [outcome for outcome in outcomes if outcome is not None]


async def _tokens(engine: Engine, body: SessionStepBody, until: float | None) -> tuple[int, ...]:
    if body.input is None:
        return tuple(body.tokens or ())
    await asyncio.sleep(0)  # many short texts hold up nobody, and the deadline and a hang-up are seen
    return await tokens_of(engine, body.input, until)


def _document(request: Request, outcome: Outcome) -> AnswerDocument | FailureDocument:
    if isinstance(outcome, Exception):
        return {"error": failure_document(request.scope, outcome)}
    return answers.answer(*outcome)
