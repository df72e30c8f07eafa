"""Serves OpenAI's text completions. A request is translated to the engine's requests for generations, scores and a
session's step."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from hashlib import sha256
from typing import cast

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.body import decode, tokens_of
from wane.service.api.choices import Choice, Generation, Prompt, merged, started, together
from wane.service.api.deps import deadline, header, model_engine, note_model, owner, session_key, settings
from wane.service.api.disconnect import until_hangup
from wane.service.api.events import EventStream
from wane.service.api.exchange import note_answer
from wane.service.api.openapi import Router, answers, parameters_in
from wane.service.api.problem import Failure, document_of, renamed
from wane.service.api.routes.sessions import IDEMPOTENCY_KEY, KEY, engine_to_step
from wane.service.api.schemas.completions import (
    MAX_TOKENS,
    CompletionBody,
    CompletionDocument,
    ErrorDocument,
    UsageDocument,
)
from wane.service.batching.turns import HEAVY_TOKENS
from wane.service.engine.engine import Engine
from wane.service.engine.event_names import EventTokens
from wane.service.errors import InvalidRequest, NotFound
from wane.service.types.answer import Answer
from wane.service.types.request import GenerateRequest, ScoreRequest, StepRequest, bias_of
from wane.service.types.text import Score

SEEDS = 2**64
"""The engine's seeds are from 0 to 2^64 - 1. OpenAI's clients may send negative seeds, so a seed is taken modulo 2^64.
"""

FAILURE = answers(ErrorDocument, status="default", description="any failure, in OpenAI's error format")

router = Router(tags=["openai"], responses=FAILURE)
chat = Router(include_in_schema=False)


@router.on_post(
    "/v1/completions",
    CompletionBody,
    CompletionDocument,
    streams=True,
    extra={"parameters": parameters_in("header", KEY)},
)
async def complete(request: Request) -> Response:
    """Completes one or many prompts, like OpenAI's API. If `stream` is true, the answer consists of lines `data:` with
    parts of the choices, and then the line `data: [DONE]`. A failure during the stream is sent as `data: {"error":
    ...}`, and ends the stream."""
    body = await decode(request, CompletionBody)
    with until_hangup(request):
        try:
            completion = await begin(request, body)
        except InvalidRequest as error:
            raise renamed(error) from error
        if not body.stream:
            return await encode.long_reply(await completion.whole())
    chunks = completion.chunks()
    completion.held.push_async_callback(chunks.aclose)
    return CompletionStream(request, chunks, completion.held)


@chat.api_route("/v1/chat/completions", methods=["GET", "HEAD", "POST"])
async def refuse_chat(request: Request) -> Response:  # noqa: ARG001
    """Answers 404, because the models have no chat format. The message names the route that completes text."""
    raise NotFound("the models have no chat format: use POST /v1/completions, which completes a text")


class Completion:
    """A completion request whose generations have started. The choices are ordered by prompt, then by sample."""

    def __init__(
        self,
        request: Request,
        engine: Engine,
        body: CompletionBody,
        choices: Sequence[Choice],
        read: Sequence[EventTokens],
        step: Answer | None,
        held: AsyncExitStack,
    ) -> None:
        """`read` has the tokens of each prompt. `step` is the answer to the step that appended the prompt to a session,
        or None for a request without a session. `held` closes the generations."""
        self.held = held
        self._scope = request.scope
        self._choices = choices
        self._last_samples = choices[(body.n or 1) - 1 :: body.n or 1]
        self._prompt_tokens = sum(len(prompt.tokens) for prompt in read)
        self._unknown = [name for prompt in read for name in prompt.unknown] or None
        self._step = step
        self._names_usage = body.stream_options is not None and body.stream_options.include_usage is True
        files = sorted(engine.manifest.files.items())
        facts = encode.json_bytes([engine.name, engine.version, files, request.app.version, engine.device])
        self._document = partial(
            CompletionDocument,
            f"cmpl-{secrets.token_hex(16)}",
            "text_completion",
            int(time.time()),
            engine.name,
            f"fp_{sha256(facts).hexdigest()[:16]}",
        )

    async def whole(self) -> CompletionDocument:
        """Returns the answer with every choice."""
        async with self.held:
            choices = await together([choice.whole for choice in self._choices])
        return self._extended(self._document(choices, self._usage()))

    async def chunks(self) -> AsyncGenerator[CompletionDocument, None]:
        """Yields the documents of a streamed answer. The caller must close the generator."""
        async with aclosing(merged([choice.parts() for choice in self._choices])) as parts:
            async for part in parts:
                chunk = self._document([part], None if self._names_usage else UNSET)
                yield chunk if part.finish_reason is None else self._extended(chunk)
        if self._names_usage:
            yield self._document([], self._usage())

    def _usage(self) -> UsageDocument:
        made = sum(choice.tokens for choice in self._choices)
        cached = sum(choice.finish.cached_tokens for choice in self._last_samples if choice.finish is not None)
        return UsageDocument(self._prompt_tokens, made, self._prompt_tokens + made, {"cached_tokens": cached})

    def _extended(self, document: CompletionDocument) -> CompletionDocument:
        """Adds the fields that OpenAI's API lacks to the last document of a choice."""
        step, finish = self._step, self._choices[-1].finish
        document.unknown = self._unknown
        if finish is not None:
            note_answer(self._scope, finish)
            if step is not None:
                document.session, document.position = finish.session, finish.position
                document.replayed, document.error_bound = step.replayed, finish.error_bound
        return document


class CompletionStream(EventStream):
    """The choices of a completion as server-sent events without names."""

    last = b"data: [DONE]\n\n"

    def failed(self, request: Request, failure: Failure) -> bytes:  # noqa: ARG002
        return encode.event(document_of(failure))


async def begin(request: Request, body: CompletionBody) -> Completion:
    """Checks a request, and starts its generations. Raises InvalidRequest, TooLarge and the engine's errors."""
    samples, inputs = 1 if body.n is None else body.n, prompts_of(body.prompt)
    check(request, body, len(inputs), samples)
    until, whose, total = deadline(request), owner(request).name, 0
    session, creator = None, None
    if body.session is None:
        engine = await model_engine(request, body.model)
    else:
        session = session_key(request, body.session)
        engine, creator = await engine_to_step(request, session, body, body.expected_position, until)
        note_model(request, engine)
    read: list[EventTokens] = []
    for item in inputs:
        await asyncio.sleep(0)  # lets the event loop run other work between many prompts
        if isinstance(item, str) and engine.vocabulary.kind == "events":
            engine.limits.length(item.count("\n"))
            is_long = len(item) >= HEAVY_TOKENS
            read.append(await asyncio.to_thread(engine.events.lines, item) if is_long else engine.events.lines(item))
        else:
            read.append(await tokens_of(engine, item, until))
        total += len(read[-1].tokens)
    body.cost(settings(request), total).check(settings(request))
    await asyncio.sleep(0)
    bias = bias_of(body.logit_bias or {})  # all samples share its arrays, even without a bias
    await asyncio.sleep(0)
    stop = (body.stop,) if isinstance(body.stop, str) else body.stop or ()
    sampled = partial(
        GenerateRequest,
        max_tokens=MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=body.top_p,
        seed=None if body.seed is None else body.seed % SEEDS,
        stop=tuple(filter(None, stop)),  # an empty text stops nothing
        deadline=until,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        bias=bias,
        top_logprobs=body.logprobs,
        include_unknown=bool(body.include_unknown),
        owner=whose,
    )
    wanted = [
        sampled(tokens=prompt.tokens, unknown_names=prompt.unknown, sample=sample)
        for prompt in read
        for sample in range(samples)
    ]
    await engine.check_generations(wanted)  # before the step, because an invalid request must not change its session
    step: Answer | None = None
    if session is not None:
        # if an earlier attempt of the same request has appended the prompt, this is the answer to that attempt
        step = await engine.submit(
            StepRequest(
                session,
                read[0].tokens,
                None,
                body.expected_position,
                header(request, IDEMPOTENCY_KEY),
                top_k=1,
                deadline=until,
                unknown_names=read[0].unknown,
                creator=creator,
            )
        )
        wanted = [sampled(tokens=(), session=session, position=step.position)]
    async with AsyncExitStack() as held:
        generations: Sequence[Generation | None] = [None] * len(wanted)
        if body.max_tokens != 0:
            generations = await started(engine, wanted, held)
        prompts = await together([partial(prompt_of, engine, body, prompt.tokens, until, whose) for prompt in read])
        choices = [
            Choice(
                index,
                engine.vocabulary,
                engine.turns,
                prompts[index // samples],
                generation,
                has_logprobs=body.logprobs is not None,
            )
            for index, generation in enumerate(generations)
        ]
        return Completion(request, engine, body, choices, read, step, held.pop_all())


def prompts_of(prompt: str | tuple[str | int | tuple[int, ...], ...]) -> Sequence[str | tuple[int, ...]]:
    """Returns the request's prompts as a list. Raises InvalidRequest if there is no prompt, or if the prompts are of
    different kinds."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is empty: give a text, token ids, or a list of either", "prompt")
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            raise InvalidRequest(
                f"prompt[{index}] must be {PROMPT_KINDS[kind]}, like prompt[0]: a prompt is a text, token ids, or a "
                "list of either",
                f"prompt[{index}]",
            )
    if kind is int:
        return [cast(tuple[int, ...], prompt)]
    return cast(Sequence[str | tuple[int, ...]], prompt)


PROMPT_KINDS = {int: "an integer", str: "a string", tuple: "a list"}


def check(request: Request, body: CompletionBody, prompts: int, samples: int) -> None:
    """Raises InvalidRequest if fields cannot be combined. `prompts` is the number of prompts, and `samples` the number
    of samples of each prompt."""
    if samples < 1:
        raise InvalidRequest(f"n is {samples}, but must be at least 1", "n")
    if body.suffix:
        raise InvalidRequest("suffix is given, but the models complete only the end of a text", "suffix")
    if body.best_of not in (None, 1, samples):
        raise InvalidRequest(f"best_of is {body.best_of}, but must be absent, 1, or n, which is {samples}", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0, but must be at least 1 unless echo is true", "max_tokens")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is given, but stream is not true", "stream_options")
    if body.session is None:
        if body.expected_position is not None:
            raise InvalidRequest("expected_position is given without a session", "expected_position")
        return
    if samples > 1:
        raise InvalidRequest(f"n is {samples}, but must be 1 in a request with a session", "n")
    if body.echo:
        raise InvalidRequest("echo cannot be combined with a session", "echo")
    if prompts > 1:
        raise InvalidRequest(
            f"prompt holds {prompts} prompts, but must hold one prompt in a request with a session", "prompt"
        )
    if body.expected_position is None and header(request, IDEMPOTENCY_KEY) is None:
        raise InvalidRequest(
            "a request with a session needs expected_position or the header Idempotency-Key, so that a retry is safe",
            "expected_position",
        )


async def prompt_of(
    engine: Engine, body: CompletionBody, tokens: Sequence[int], until: float | None, whose: str
) -> Prompt:
    """Returns a prompt. If the answer repeats the prompt, decodes the prompt's text. If the request also asks for
    log-probabilities, scores the prompt's tokens."""
    if not body.echo:
        return Prompt(tokens)
    score: Score | None = None
    if body.logprobs is not None:
        score = await engine.score(
            ScoreRequest(
                tokens, deadline=until, top_k=body.logprobs, include_unknown=bool(body.include_unknown), owner=whose
            )
        )
    decode = partial(engine.vocabulary.decode, list(tokens))
    return Prompt(tokens, await asyncio.to_thread(decode) if len(tokens) >= HEAVY_TOKENS else decode(), score)
