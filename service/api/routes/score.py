"""Serves scoring, as one JSON answer or, for long documents, as server-sent events."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.body import decode, tokens_of
from wane.service.api.cost import of_score
from wane.service.api.deps import deadline, model_engine, owner, settings
from wane.service.api.disconnect import until_hangup
from wane.service.api.events import EventStream
from wane.service.api.openapi import answers, json_body
from wane.service.api.schemas.score import ScoreBody
from wane.service.types.request import ScoreRequest
from wane.service.types.text import Score

router = APIRouter(tags=["predict"])


@router.post(
    "/v1/score",
    response_model=None,
    openapi_extra=json_body(ScoreBody),
    responses=answers(Score, streams=True),
)
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
        given = await tokens_of(engine, body.sequence, deadline(request), document=True)
        of_score(body, settings(request), len(given.tokens)).check(settings(request))
        wanted = ScoreRequest(
            given.tokens,
            body.method,
            body.tolerance,
            deadline(request),
            body.truncated,
            body.cache,
            body.top_k,
            given.unknown,
            given.skipped,
            body.include_unknown,
            owner(request).name,
        )
        if not body.stream:
            return await encode.long_reply(await engine.score(wanted))
        scoring = await engine.scoring(wanted)
    return EventStream(request, scoring)
