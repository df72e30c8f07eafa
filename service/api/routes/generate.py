"""Generation: as one JSON answer, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from wane.service.api import encode
from wane.service.api.body import decode, json_body, tokens_of
from wane.service.api.deps import deadline, model_engine, note_answer
from wane.service.api.disconnect import until_hangup
from wane.service.api.encode import json_bytes
from wane.service.api.exchange import context
from wane.service.api.problem import failure_document
from wane.service.api.schemas.generate import GenerateBody, GenerationDocument
from wane.service.engine.engine import Engine
from wane.service.engine.generate import Generation
from wane.service.types import Finish, GenerateRequest

router = APIRouter(tags=["generate"])


@router.post(
    "/v1/generate",
    response_model=GenerationDocument,
    openapi_extra=json_body(GenerateBody),
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def generate(request: Request) -> Response:
    """Goes on from a text. With `stream`: an event `token` for each token, then `finish`; a failure is `error`."""
    body = await decode(request, GenerateBody)
    engine = await model_engine(request, body.model)
    with until_hangup(request):
        wanted = GenerateRequest(
            tokens=await tokens_of(engine, body.sequence, deadline(request)),
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            seed=body.seed,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
            mode=body.mode,
            window=body.window,
            deadline=deadline(request),
            truncated=body.truncated,
        )
        generated = await engine.generate(wanted)
        if not body.stream:
            return encode.reply(await _collect(request, engine, generated))
    return EventStream(request, engine, generated)


async def _collect(request: Request, engine: Engine, generated: Generation) -> GenerationDocument:
    logprobs: list[float] = []
    async with aclosing(generated):
        async for item in generated:
            if isinstance(item, Finish):
                note_answer(request.scope, item)
                return {**encode.finish(engine, item), "logprobs": logprobs}
            logprobs.append(item.logprob)
    raise AssertionError("this is a bug: a generation ends with a Finish")


class EventStream(StreamingResponse):
    """A generation as server-sent events. When the client leaves, the generation is closed at once."""

    def __init__(self, request: Request, engine: Engine, generated: Generation) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        self.events = self._events(request, engine, generated)
        self.generated = generated
        super().__init__(self.events, headers=headers, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.generated), aclosing(self.events):
            await super().stream_response(send)

    @staticmethod
    async def _events(request: Request, engine: Engine, generated: Generation) -> AsyncGenerator[bytes, None]:
        try:
            async for item in generated:
                if isinstance(item, Finish):
                    note_answer(request.scope, item)
                    yield event("finish", encode.finish(engine, item))
                else:
                    yield event("token", encode.generated(item))
        except Exception as error:  # the answer has begun: what fails now can only be told in it
            document = failure_document(request.scope, error)
            context(request.scope).fields["error"] = document["code"]
            yield event("error", document)


def event(name: str, document: Mapping[str, object]) -> bytes:
    """One server-sent event. JSON holds no raw line break, so that one `data:` line is enough."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json_bytes(document))
