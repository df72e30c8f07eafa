"""Scoring: as one JSON answer, or, for long documents, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from wane.service.api import encode
from wane.service.api.body import decode, json_body, tokens_of
from wane.service.api.deps import deadline, model_engine
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import context
from wane.service.api.problem import failure_document
from wane.service.api.routes.generate import event
from wane.service.api.schemas.score import ScoreBody, ScoreDocument
from wane.service.engine.engine import Engine
from wane.service.engine.score import Scoring
from wane.service.types import ScoredTokens, ScoreProgress, ScoreRequest

router = APIRouter(tags=["predict"])


@router.post(
    "/v1/score",
    response_model=ScoreDocument,
    openapi_extra=json_body(ScoreBody),
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def score(request: Request) -> Response:
    """The log-probability of every token of a text: run in order, or in chunks side by side.

    With `stream`: events `progress` (`done`, `total`), `tokens` (`position`, `tokens`, `logprobs`, and with `truncated`
    `error_bounds`) in order, as they are settled, then `finish`; a failure is `error`.
    """
    body = await decode(request, ScoreBody)
    engine = await model_engine(request, body.model)
    with until_hangup(request):
        tokens = await tokens_of(engine, body.sequence, deadline(request), document=True)
        wanted = ScoreRequest(tokens, body.method, body.tolerance, deadline(request), body.truncated)
        if not body.stream:
            document = encode.score(engine, tokens, await engine.score(wanted))
            await asyncio.sleep(0)  # a long one is not made and written in one turn of the event loop
            return await encode.long_reply(document)
        scoring = await engine.scoring(wanted)
    return ScoreStream(request, engine, tokens, scoring)


class ScoreStream(StreamingResponse):
    """A score as server-sent events. When the client leaves, the scoring is closed at once."""

    def __init__(self, request: Request, engine: Engine, tokens: tuple[int, ...], scoring: Scoring) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        self.events = self._events(request, engine, tokens, scoring)
        self.scoring = scoring
        super().__init__(self.events, headers=headers, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.scoring), aclosing(self.events):
            await super().stream_response(send)

    @staticmethod
    async def _events(
        request: Request, engine: Engine, tokens: tuple[int, ...], scoring: Scoring
    ) -> AsyncGenerator[bytes, None]:
        try:
            async for item in scoring:
                if isinstance(item, ScoreProgress):
                    yield event("progress", encode.score_progress(item))
                elif isinstance(item, ScoredTokens):
                    yield event("tokens", encode.scored(tokens, item))
                else:
                    yield event("finish", encode.score_summary(engine, item))
        except Exception as error:  # the answer has begun: what fails now can only be told in it
            document = failure_document(request.scope, error)
            context(request.scope).fields["error"] = document["code"]
            yield event("error", document)
