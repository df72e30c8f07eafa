"""Serves predictions, comparisons and scores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.body import decode, filter_of, tokens_of
from wane.service.api.deps import deadline, engine_of, model_engine, note_model, owner, settings
from wane.service.api.disconnect import until_hangup
from wane.service.api.events import EventStream
from wane.service.api.exchange import note_answer, registry
from wane.service.api.openapi import Router
from wane.service.api.problem import items
from wane.service.engine.engine import Engine
from wane.service.engine.event_names import EventTokens
from wane.service.errors import InvalidRequest, as_result
from wane.service.types.answer import Answer, Batch
from wane.service.types.body import EventInput, EventsBody
from wane.service.types.predict import CompareBody, PredictBody, ScoreBody
from wane.service.types.request import CompareRequest, Filter, PredictRequest, ScoreRequest
from wane.service.types.text import Comparison, Comparisons, Score

router = Router(tags=["predict"])


@router.on_post("/v1/predict", PredictBody, Answer, Batch)
async def predict(request: Request) -> Response:
    """Predicts the next token in recurrent mode, in window mode, or in both modes. For both modes, the answer has the
    distance between the two predictions."""
    body = await decode(request, PredictBody)
    engine, session = await engine_of(request, body)
    if body.inputs is not None:
        return await encode.long_reply(await _predict_many(request, engine, body, body.inputs))
    tokens = await tokens_of(engine, body.sequence, deadline(request))
    answer = await engine.submit(asked(request, body, tokens, await filter_of(engine, body), session))
    note_answer(request.scope, answer)
    return encode.reply(answer)


def asked(
    request: Request, body: PredictBody, sequence: EventTokens, wanted: Filter, session: str | None = None
) -> PredictRequest:
    """Converts a body to a request for the engine. `session` is the session's key."""
    return body.request(
        PredictRequest,
        sequence.tokens,
        sequence.unknown,
        deadline(request),
        inputs=None,
        session=session,
        filter=wanted,
        owner=owner(request).name,
    )


async def _predict_many(
    request: Request, engine: Engine, body: PredictBody, inputs: Sequence[str | tuple[int, ...] | EventsBody]
) -> Batch:
    """Returns an answer or an error for each input. An invalid input does not fail the other inputs."""
    filtered: Filter | InvalidRequest
    try:
        filtered = await filter_of(engine, body)
    except InvalidRequest as error:
        filtered = error
    wanted: list[PredictRequest | Exception] = []
    for item in inputs:
        if not isinstance(item, tuple):
            await asyncio.sleep(0)  # lets the event loop run other work between many short texts or lists of events
        try:
            sequence = EventInput(item.events, body.unknown) if isinstance(item, EventsBody) else item
            tokens = await tokens_of(engine, sequence, deadline(request))
            wanted.append(filtered if isinstance(filtered, InvalidRequest) else asked(request, body, tokens, filtered))
        except Exception as error:
            wanted.append(as_result(error))
    requests = [outcome for outcome in wanted if isinstance(outcome, PredictRequest)]
    answered = iter(await engine.predict_many(requests))
    outcomes = [outcome if isinstance(outcome, Exception) else next(answered) for outcome in wanted]
    return Batch(*engine.identity, items(request.scope, outcomes))


@router.on_post("/v1/compare", CompareBody, Comparisons)
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
            sequence = await tokens_of(engine, body.sequence, deadline(request))
            wanted = body.request(CompareRequest, sequence.tokens, sequence.unknown, deadline(request))
            compared.append(await engine.compare(wanted))
    return encode.reply(Comparisons(registry(request).device, tuple(compared)))


@router.on_post("/v1/score", ScoreBody, Score, streams=True)
async def score(request: Request) -> Response:
    """Returns the log-probability of every token of a text. The model runs over the text in order or in concurrent
    chunks.

    If `stream` is true, the answer is a sequence of events. An event `progress` has the fields `done` and `total`. An
    event `tokens` has the fields `position`, `tokens` and `logprobs`. It also has `error_bounds` if the request has
    `truncated`, and `predictions` if the request has `top_k`. The events `tokens` are sent in the order of the tokens,
    each as soon as its values are final. The last event is `finish`. A failure is an event `error`.
    """
    body = await decode(request, ScoreBody)
    engine = await model_engine(request, body.model)
    with until_hangup(request):
        sequence = await tokens_of(engine, body.sequence, deadline(request), document=True)
        body.cost(settings(request), len(sequence.tokens)).check(settings(request))
        added = {"skipped": sequence.skipped, "owner": owner(request).name}
        wanted = body.request(ScoreRequest, sequence.tokens, sequence.unknown, deadline(request), **added)
        if not body.stream:
            return await encode.long_reply(await engine.score(wanted))
        scoring = await engine.scoring(wanted)
    return EventStream(request, scoring)
