"""OpenAI's text completions. A request is translated into calls of the engine for `/v1/generate`, `/v1/score` and a
session's step."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from wane.service.api import encode, events
from wane.service.api.body import decode, headers, json_body, tokens_of
from wane.service.api.choices import Choice, Generation, joined, merged, started, together
from wane.service.api.deps import charge, deadline, header, model_engine, owner, session_engine, session_key, settings
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import context, note_answer
from wane.service.api.openai_error import document_of, renamed
from wane.service.api.problem import described
from wane.service.api.schemas.common import IDEMPOTENCY
from wane.service.api.schemas.completions import (
    MAX_TOKENS,
    ChoiceDocument,
    CompletionBody,
    CompletionDocument,
    ErrorFacts,
    UsageDocument,
)
from wane.service.api.schemas.generate import bias_of
from wane.service.engine.engine import Engine
from wane.service.errors import InvalidRequest, NotFound, SessionExists, TooLarge, UnknownSession
from wane.service.types import (
    MAX_KEY_CHARACTERS,
    Answer,
    Finish,
    GenerateRequest,
    Score,
    ScoreRequest,
    StepRequest,
    id_of,
)

IDEMPOTENCY_KEY = "idempotency-key"
FIELDS = {"input": "prompt", "tokens": "prompt", "top_logprobs": "logprobs"}
"""OpenAI's fields, by the engine's names."""
SEEDS = 2**64
"""Seeds of OpenAI's clients may be negative; the engine's are not."""

ENVELOPE = {"type": "object", "required": ["error"], "properties": {"error": TypeAdapter(ErrorFacts).json_schema()}}
FAILURE: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "any failure, in OpenAI's envelope",
        "content": {"application/json": {"schema": ENVELOPE}},
    }
}
KEY_HEADER = headers({IDEMPOTENCY_KEY: (IDEMPOTENCY, {"minLength": 1, "maxLength": MAX_KEY_CHARACTERS})})

router = APIRouter(tags=["openai"], responses=FAILURE)
chat = APIRouter(include_in_schema=False)


@router.post(
    "/v1/completions",
    response_model=CompletionDocument,
    openapi_extra=json_body(CompletionBody) | KEY_HEADER,
    responses=events.DESCRIPTION,
)
async def complete(request: Request) -> Response:
    """Completes one prompt or many, like OpenAI's API. With `stream`: lines `data:` with parts of the choices, then
    `data: [DONE]`. A failure in the stream is `data: {"error": ...}`, and ends it."""
    body = await decode(request, CompletionBody)
    with until_hangup(request):
        try:
            completion = await begin(request, body)
        except InvalidRequest as error:
            raise renamed(error, FIELDS) from error
        if not body.stream:
            return encode.reply(await completion.whole(request))
    return CompletionStream(request, completion)


@chat.api_route("/v1/chat/completions", methods=["GET", "HEAD", "POST"])
async def refuse_chat(request: Request) -> Response:  # noqa: ARG001
    """Says where text is completed: the models have no chat format."""
    raise NotFound("these models complete text, and have no chat format: POST /v1/completions completes text")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and, if it is echoed, its text and its scored tokens."""

    tokens: tuple[int, ...]
    text: str | None = None
    score: Score | None = None


class Completion:
    """A request whose generations have begun. The choices are ordered by prompt, then by sample."""

    def __init__(
        self,
        engine: Engine,
        fingerprint: str,
        body: CompletionBody,
        prompts: Sequence[Prompt],
        generations: Sequence[Generation],
        step: Answer | None,
    ) -> None:
        """`generations` of every sample; empty if no token is generated. `step`: the session's, if there is one."""
        self._prompts = prompts
        self._samples = body.n or 1
        self._step = step
        self._names_usage = body.stream_options is not None and body.stream_options.include_usage is True
        self.generations = generations
        self._bounds: list[float | None] = []
        self._finish: Finish | None = None
        self._choices = [
            Choice(
                index,
                engine.vocabulary,
                has_logprobs=body.logprobs is not None,
                prompt=prompts[index // self._samples].text,
            )
            for index in range(len(prompts) * self._samples)
        ]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": engine.name,
            "system_fingerprint": fingerprint,
        }

    async def whole(self, request: Request) -> dict[str, object]:
        """Returns the answer with every choice."""
        parts: list[list[ChoiceDocument]] = [[] for _ in self._choices]
        try:
            async with aclosing(self.parts()) as found:
                async for part in found:
                    parts[part["index"]].append(part)
        finally:
            await self.aclose()
        self._note(request)
        return {
            **self._head,
            "choices": [joined(one) for one in parts],
            "usage": self._usage(),
            **self._session(),
        }

    async def parts(self) -> AsyncGenerator[ChoiceDocument, None]:
        """Yields the parts of the choices as they come. The caller must close it."""
        for choice in self._choices:
            prompt = self._prompts[choice.index // self._samples]
            if prompt.text is not None:
                yield choice.echoed(prompt.text, prompt.score)
        if not self.generations:
            for choice in self._choices:
                yield choice.ended(None)
            return
        async with aclosing(merged(self.generations)) as items:
            async for index, item in items:
                choice = self._choices[index]
                if isinstance(item, Finish):
                    self._finish = item
                    yield choice.ended(item)
                elif (part := choice.added(item)) is not None:
                    yield part

    async def chunks(self, request: Request) -> AsyncGenerator[dict[str, object], None]:
        """Yields the documents of a stream."""
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                chunk: dict[str, object] = {**self._head, "choices": [part]}
                if self._names_usage:
                    chunk["usage"] = None
                if part["finish_reason"] is not None:
                    chunk |= self._session()
                yield chunk
        self._note(request)
        if self._names_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    async def aclose(self) -> None:
        """Ends the generations, finished or not."""
        for one in self.generations:
            await one.aclose()

    def _usage(self) -> UsageDocument:
        given = sum(len(prompt.tokens) for prompt in self._prompts)
        made = sum(choice.tokens for choice in self._choices)
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}

    def _session(self) -> dict[str, object]:
        step, finish = self._step, self._finish
        if step is None or finish is None:
            return {}
        return {
            "session": finish.session,
            "position": finish.position,
            "replayed": step.replayed,
            "error_bound": finish.error_bound,
        }

    def _note(self, request: Request) -> None:
        if self._finish is not None:
            note_answer(request.scope, self._finish)


class CompletionStream(StreamingResponse):
    """A response in server-sent events without names. It ends the generations as soon as the client disconnects."""

    def __init__(self, request: Request, completion: Completion) -> None:
        self._completion = completion
        self._lines = self._encoded(request, completion)
        caching = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(self._lines, headers=caching, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        try:
            async with aclosing(self._lines):
                await super().stream_response(send)
        finally:
            await self._completion.aclose()

    @staticmethod
    async def _encoded(request: Request, completion: Completion) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(completion.chunks(request)) as chunks:
                async for chunk in chunks:
                    yield b"data: %s\n\n" % encode.json_bytes(chunk)
        except Exception as error:  # the response has begun, so a failure must be sent in it
            failure = described(request.scope, error)
            context(request.scope).fields["error"] = failure.code
            yield b"data: %s\n\n" % encode.json_bytes(document_of(failure))
        else:
            yield b"data: [DONE]\n\n"


async def begin(request: Request, body: CompletionBody) -> Completion:
    """Checks a request, and starts its generations. Raises what the engine raises."""
    samples, given = 1 if body.n is None else body.n, prompts_of(body.prompt)
    check(request, body, len(given), samples)
    charge(request, len(given) * samples)
    session: str | None = None
    if body.session is None:
        engine = await model_engine(request, body.model)
    else:
        session = session_key(request, body.session)
        engine = await engine_of(request, body, session)
    until, total = deadline(request), 0
    tokens: list[tuple[int, ...]] = []
    for one in given:
        if isinstance(one, str):
            await asyncio.sleep(0)  # many short texts do not block the event loop, its deadlines and disconnections
            engine.events.check_text("prompt", "give token ids, or send events to /v1/generate")
        tokens.append((await tokens_of(engine, one, until)).tokens)
        total += len(tokens[-1])
    most = settings(request).max_scored_tokens
    if total > most:
        raise TooLarge(f"the prompts have {total} tokens, but at most {most} are taken")
    if body.logprobs is not None and body.logprobs * total > most and body.echo:
        raise TooLarge(f"{total} tokens with {body.logprobs} each list more than {most} tokens")
    wanted = [generation(body, one, sample, until) for one in tokens for sample in range(samples)]
    engine.check_generation(wanted[0])  # before a session's step, which would remain
    step: Answer | None = None
    if session is not None:
        step = await stepped(request, engine, body, session, tokens[0])
        wanted = [generation(body, (), 0, until, session, step.position)]
    generations: list[Generation] = []
    if body.max_tokens != 0:
        generations = await started([partial(engine.generate, one) for one in wanted])
    try:
        prompts = await together([partial(prompt_of, engine, body, one, until) for one in tokens])
    except BaseException:
        for one_generation in generations:
            await one_generation.aclose()
        raise
    return Completion(engine, fingerprint_of(request, engine), body, prompts, generations, step)


def prompts_of(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Returns the prompts of a request. Raises InvalidRequest if there is none."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("prompt is empty: give a text, token ids, or a list of either", "prompt")
    if isinstance(given[0], int):
        return [[one for one in given if isinstance(one, int)]]
    return [one for one in given if isinstance(one, str | list)]


def check(request: Request, body: CompletionBody, prompts: int, samples: int) -> None:
    """Raises InvalidRequest for fields that do not go together."""
    most = settings(request).max_batch_inputs
    if samples < 1:
        raise InvalidRequest(f"n is {samples}, but must be at least 1", "n")
    if prompts > most:
        raise InvalidRequest(f"prompt holds {prompts} prompts, but must hold at most {most}", "prompt")
    if prompts * samples > most:
        raise InvalidRequest(
            f"n is {samples} for {prompts} prompts, which makes {prompts * samples} samples; at most {most} are made",
            "n",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0, but must be at least 1, or 0 with echo", "max_tokens")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is given, but stream is not true", "stream_options")
    if body.session is None:
        if body.expected_position is not None:
            raise InvalidRequest("expected_position is given, but no session", "expected_position")
        return
    if samples > 1:
        raise InvalidRequest(f"n is {samples}, but must be 1 with a session", "n")
    if body.echo:
        raise InvalidRequest("echo cannot be combined with a session", "echo")
    if prompts > 1:
        raise InvalidRequest(f"prompt holds {prompts} prompts, but must be one with a session", "prompt")
    if body.expected_position is None and header(request, IDEMPOTENCY_KEY) is None:
        raise InvalidRequest(
            "a session needs expected_position or the header Idempotency-Key, because clients send a request again",
            "expected_position",
        )


async def engine_of(request: Request, body: CompletionBody, session: str) -> Engine:
    """Returns a session's engine. At an expected position of 0 creates the session if there is none."""
    try:
        return await session_engine(request, session, body.model)
    except UnknownSession:
        if body.expected_position != 0:
            raise
    engine = await model_engine(request, body.model)
    try:
        await engine.create_session(id_of(session), None, owner(request))
    except SessionExists:  # another request has created it meanwhile, and stepped it
        return await session_engine(request, session, body.model)
    return engine


async def stepped(
    request: Request, engine: Engine, body: CompletionBody, session: str, tokens: tuple[int, ...]
) -> Answer:
    """Appends the prompt to the session, or replays that."""
    key = header(request, IDEMPOTENCY_KEY)
    return await engine.submit(
        StepRequest(session, tokens, None, body.expected_position, key, top_k=1, deadline=deadline(request))
    )


def generation(
    body: CompletionBody,
    tokens: tuple[int, ...],
    sample: int,
    until: float | None,
    session: str | None = None,
    position: int | None = None,
) -> GenerateRequest:
    """Returns the engine's request for one sample of one prompt, or of a session. Raises InvalidRequest."""
    stop = body.stop or []
    return GenerateRequest(
        tokens=tokens,
        max_tokens=MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=body.top_p,
        seed=None if body.seed is None else body.seed % SEEDS,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        deadline=until,
        session=session,
        position=position,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias_of(body.logit_bias),
        top_logprobs=body.logprobs,
        sample=sample,
    )


async def prompt_of(engine: Engine, body: CompletionBody, tokens: tuple[int, ...], until: float | None) -> Prompt:
    """Returns a prompt, with its text and its scored tokens if it is echoed."""
    if not body.echo:
        return Prompt(tokens)
    score: Score | None = None
    if body.logprobs is not None:
        score = await engine.score(ScoreRequest(tokens, deadline=until, top_k=body.logprobs))
    return Prompt(tokens, engine.vocabulary.decode(list(tokens)), score)


def fingerprint_of(request: Request, engine: Engine) -> str:
    """Returns a digest of the bundle's hashes, the versions of the model and the server, and the device."""
    files = sorted(engine.manifest.files.items())
    facts = encode.json_bytes([engine.name, engine.version, files, request.app.version, engine.device])
    return f"fp_{sha256(facts).hexdigest()[:16]}"
