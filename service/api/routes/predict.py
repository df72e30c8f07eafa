"""Serves the routes `/v1/predict` and `/v1/compare`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.body import decode, filter_of, tokens_of
from wane.service.api.deps import deadline, model_engine, note_model, owner, session_engine, session_key
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import note_answer, registry
from wane.service.api.openapi import answers, json_body
from wane.service.api.problem import failure_document
from wane.service.api.schemas.common import EventInput
from wane.service.api.schemas.compare import CompareBody
from wane.service.api.schemas.predict import EventsBody, PredictBody
from wane.service.engine.engine import Engine
from wane.service.engine.event_names import EventTokens
from wane.service.errors import InvalidRequest
from wane.service.types.answer import Answer, Batch, Failed
from wane.service.types.request import CompareRequest, Filter, PredictRequest
from wane.service.types.text import Comparison, Comparisons

router = APIRouter(tags=["predict"])


@router.post("/v1/predict", response_model=None, responses=answers(Answer, Batch), openapi_extra=json_body(PredictBody))
async def predict(request: Request) -> Response:
    """Predicts the next token in recurrent mode, in window mode, or in both modes. For both modes, the answer has the
    distance between the two predictions."""
    body = await decode(request, PredictBody)
    session: str | None = None
    if body.session is None:
        engine = await model_engine(request, body.model)
    else:
        session = session_key(request, body.session)
        engine = await session_engine(request, session, body.model)
    if body.inputs is not None:
        return await encode.long_reply(await _predict_many(request, engine, body, body.inputs))
    tokens = await tokens_of(engine, body.sequence, deadline(request))
    given = await engine.submit(asked(request, body, tokens, await filter_of(engine, body), session))
    note_answer(request.scope, given)
    return encode.reply(given)


def asked(
    request: Request, body: PredictBody, given: EventTokens, wanted: Filter, session: str | None = None
) -> PredictRequest:
    """Converts a body to a request for the engine. `session` is the session's key."""
    return PredictRequest(
        tokens=given.tokens,
        mode=body.mode,
        window=body.window,
        tolerance=body.tolerance,
        top_k=body.top_k,
        session=session,
        deadline=deadline(request),
        truncated=body.truncated,
        prove=body.prove,
        cache=body.cache,
        filter=wanted,
        unknown=given.unknown,
        owner=owner(request).name,
    )


async def _predict_many(
    request: Request, engine: Engine, body: PredictBody, inputs: Sequence[str | tuple[int, ...] | EventsBody]
) -> Batch:
    """Returns an answer or an error for each input. An invalid input does not fail the other inputs."""
    filtered: Filter | Failed
    try:
        filtered = await filter_of(engine, body)
    except InvalidRequest as error:
        filtered = Failed(failure_document(request.scope, error))
    wanted: list[PredictRequest] = []
    refused: dict[int, Failed] = {}
    for index, given in enumerate(inputs):
        if not isinstance(given, tuple):
            await asyncio.sleep(0)  # lets the event loop run other work between many short texts or lists of events
        try:
            sequence = EventInput(given.events, body.unknown) if isinstance(given, EventsBody) else given
            tokens = await tokens_of(engine, sequence, deadline(request))
            if isinstance(filtered, Failed):
                refused[index] = filtered
            else:
                wanted.append(asked(request, body, tokens, filtered))
        except Exception as error:
            refused[index] = Failed(failure_document(request.scope, error))
    answered = iter(await engine.predict_many(wanted))
    results: list[Answer | Failed] = []
    for index in range(len(inputs)):
        outcome = refused[index] if index in refused else next(answered)
        if isinstance(outcome, Exception):
            results.append(Failed(failure_document(request.scope, outcome)))
        else:
            results.append(outcome)
    return Batch(*engine.identity, tuple(results))


@router.post("/v1/compare", response_model=None, responses=answers(Comparisons), openapi_extra=json_body(CompareBody))
async def compare(request: Request) -> Response:
    """Measures the latency of recurrent mode and of windows of several sizes, and the agreement of each window with
    recurrent mode."""
    body = await decode(request, CompareBody)
    names: Sequence[str | None] = body.models or [body.model]
    engines = [await model_engine(request, name) for name in names]
    compared: list[Comparison] = []
    with until_hangup(request):
        for engine in engines:
            note_model(request, engine)
            given = await tokens_of(engine, body.sequence, deadline(request))
            wanted = CompareRequest(
                given.tokens, body.windows, body.repeat, deadline(request), body.cache, given.unknown
            )
            compared.append(await engine.compare(wanted))
    return encode.reply(Comparisons(registry(request).device, tuple(compared)))
