"""Serves a model's tokenizer under the same paths and in the same format as vLLM. lm-evaluation-harness detects these
routes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from wane.models.manifest import Unknown
from wane.models.vocabulary import EOS, UNK
from wane.service.api import encode
from wane.service.api.body import decode
from wane.service.api.deps import deadline, model_engine, settings
from wane.service.api.disconnect import until_hangup
from wane.service.api.openapi import Router
from wane.service.api.problem import renamed
from wane.service.api.routes.completions import FAILURE
from wane.service.deadline import until
from wane.service.engine.engine import Engine
from wane.service.errors import InvalidRequest
from wane.service.settings import Settings
from wane.service.types.body import HISTORY, Body, Model, TokenId, at_most
from wane.service.types.common import Result, says
from wane.service.types.cost import Cost

router = Router(tags=["tokenizer"], responses=FAILURE)

CLASS = "PreTrainedTokenizerFast"
"""The class of Hugging Face's library transformers that reads a bundle's tokenizer."""


class TokenizeBody(Body, kw_only=True):
    """Turn a text into token ids."""

    examples = ({"prompt": HISTORY}, {"prompt": "<eos>", "add_special_tokens": False})

    model: Model = None
    prompt: Annotated[str, says("a text; each `<eos>` in the text becomes the id of the token <eos>")]
    add_special_tokens: bool | None = None
    """has no effect: the server itself feeds the start token before a sequence"""


class DetokenizeBody(Body, kw_only=True):
    """Turn token ids into text."""

    examples = ({"tokens": [5, 6, 7]},)

    model: Model = None
    tokens: Annotated[tuple[TokenId, ...], at_most("max_scored_tokens")]
    """token ids"""

    def cost(self, settings: Settings) -> Cost:  # noqa: ARG002
        return Cost(1, len(self.tokens))


class TokenizeDocument(Result):
    """The token ids of a text."""

    count: Annotated[int, says("the number of token ids")]
    max_model_len: Annotated[int, says("the longest input that the server accepts, in tokens")]
    tokens: Annotated[Sequence[int], says("the token ids")]
    token_strs: Annotated[None, says("always null")]


class DetokenizeDocument(Result):
    """The text of the tokens."""

    prompt: Annotated[str, says("the text")]


class TokenizerDocument(Result):
    """The tokenizer's special tokens."""

    tokenizer_class: Annotated[str, says("the class of the library transformers that reads the tokenizer")]
    eos_token: Annotated[str, says("the token <eos>")]
    bos_token: Annotated[None, says("always null: the server itself feeds the start token")]
    unk_token: Annotated[str | None, says("the token <unk>; null: the vocabulary has none")]
    pad_token: Annotated[None, says("always null")]
    model_max_length: Annotated[int, says("the longest input that the server accepts, in tokens")]


@router.on_post("/tokenize", TokenizeBody, TokenizeDocument)
async def tokenize(request: Request) -> Response:
    """Returns the token ids of a text. Each `<eos>` in the text becomes the id of the token `<eos>`. For a model of
    events, each remaining line of the text is the name of an event."""
    body = await decode(request, TokenizeBody)
    engine = await model_engine(request, body.model)
    tokens: Sequence[int]
    with until_hangup(request):
        if engine.vocabulary.kind == "events":
            async with until(deadline(request)):
                tokens = await asyncio.to_thread(event_tokens, engine, body.prompt)
        else:
            try:
                # a line break in a text is the token <eos>, too
                tokens = await engine.encode(body.prompt.replace(EOS, "\n"), deadline(request), document=True)
            except InvalidRequest as error:
                raise renamed(error) from error
    longest = settings(request).max_input_tokens
    return await encode.long_reply(TokenizeDocument(len(tokens), longest, tokens, None))


def event_tokens(engine: Engine, prompt: str) -> tuple[int, ...]:
    """Returns the tokens of a text with one event in each line, for `tokenize`. Raises InvalidRequest for an event that
    the vocabulary lacks, if it has no `<unk>`, and TooLarge if there are too many events."""
    names = [name for line in prompt.replace(EOS, f"\n{EOS}\n").split("\n") if (name := line.strip())]
    engine.limits.length(len(names), document=True)
    unknown: Unknown = "refuse" if engine.vocabulary.unk_id is None else "token"
    return tuple(engine.events.tokens(names, unknown, "prompt", is_input=False).tokens)


@router.on_post("/detokenize", DetokenizeBody, DetokenizeDocument)
async def detokenize(request: Request) -> Response:
    """Returns the text of token ids. For models of text, the token `<eos>` becomes a line break."""
    body = await decode(request, DetokenizeBody)
    engine = await model_engine(request, body.model)
    engine.limits.tokens(body.tokens, document=True)
    text = await asyncio.to_thread(engine.vocabulary.decode, [*body.tokens])
    return await encode.long_reply(DetokenizeDocument(text))


@router.on_get("/tokenizer_info", TokenizerDocument)
async def tokenizer_info(request: Request) -> Response:
    """Returns the special tokens of the tokenizer of the default model, or of the model in the query parameter `model`.
    `bos_token` is null, because clients need not put a start token before a text."""
    engine = await model_engine(request, request.query_params.get("model"))
    document = TokenizerDocument(
        tokenizer_class=CLASS,
        eos_token=EOS,
        bos_token=None,
        unk_token=UNK if engine.vocabulary.has_unknown else None,
        pad_token=None,
        model_max_length=settings(request).max_input_tokens,
    )
    return encode.reply(document)
