"""Serves generation, as one JSON answer or as server-sent events."""

from __future__ import annotations

from contextlib import aclosing

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.body import decode, tokens_of
from wane.service.api.deps import deadline, engine_of, owner
from wane.service.api.disconnect import until_hangup
from wane.service.api.events import EventStream
from wane.service.api.exchange import note_answer
from wane.service.api.openapi import Router
from wane.service.engine.stream import Stream
from wane.service.types.answer import Prediction
from wane.service.types.generate import GenerateBody
from wane.service.types.request import GenerateRequest, bias_of
from wane.service.types.text import Finish, Generated, GeneratedToken

router = Router(tags=["generate"])


@router.on_post("/v1/generate", GenerateBody, Generated, streams=True)
async def generate(request: Request) -> Response:
    """Generates a continuation of a text, or of a session without changing the session. If `stream` is true, the answer
    is an event `token` for each token, then an event `finish`. A failure is an event `error`."""
    body = await decode(request, GenerateBody)
    engine, session = await engine_of(request, body)
    with until_hangup(request):
        sequence = await tokens_of(engine, body.sequence, deadline(request))
        wanted = body.request(
            GenerateRequest,
            sequence.tokens,
            sequence.unknown,
            deadline(request),
            session=session,
            owner=owner(request).name,
            stop=(body.stop,) if isinstance(body.stop, str) else body.stop,
            bias=bias_of(body.logit_bias),
        )
        generated = await engine.generate(wanted)
        if not body.stream:
            return await encode.long_reply(await _collect(request, generated))
    return EventStream(request, generated)


async def _collect(request: Request, stream: Stream[GeneratedToken | Finish]) -> Generated:
    logprobs: list[float] = []
    predictions: list[tuple[Prediction, ...]] = []
    async with aclosing(stream):
        async for item in stream:
            if isinstance(item, Finish):
                note_answer(request.scope, item)
                places = tuple(predictions) if predictions else None
                return Generated(**asdict(item), logprobs=tuple(logprobs), predictions=places)
            logprobs.append(item.logprob)
            if item.predictions is not None:
                predictions.append(item.predictions)
    raise AssertionError("a generation ends with a Finish: this is a bug")
