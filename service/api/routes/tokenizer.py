"""Serves a model's tokenizer under the same paths and in the same format as vLLM. lm-evaluation-harness detects these
routes."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from wane.models.manifest import Unknown
from wane.models.vocabulary import EOS, UNK
from wane.service.api import encode
from wane.service.api.body import decode
from wane.service.api.deps import deadline, model_engine, settings
from wane.service.api.disconnect import until_hangup
from wane.service.api.openai_error import renamed
from wane.service.api.openapi import json_body
from wane.service.api.routes.completions import FAILURE
from wane.service.api.schemas.tokenizer import (
    DetokenizeBody,
    DetokenizeDocument,
    TokenizeBody,
    TokenizeDocument,
    TokenizerDocument,
)
from wane.service.errors import InvalidRequest

router = APIRouter(tags=["tokenizer"], responses=FAILURE)

CLASS = "PreTrainedTokenizerFast"
"""The class of Hugging Face's library transformers that reads a bundle's tokenizer."""


@router.post("/tokenize", response_model=TokenizeDocument, openapi_extra=json_body(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Returns the token ids of a text. Each `<eos>` in the text becomes the id of the token `<eos>`. For a model of
    events, each remaining line of the text is the name of an event."""
    body = await decode(request, TokenizeBody)
    engine = await model_engine(request, body.model)
    tokens: list[int] = []
    is_events = engine.vocabulary.kind == "events"
    unknown: Unknown = "refuse" if engine.vocabulary.unk_id is None else "token"
    with until_hangup(request):
        for number, part in enumerate(body.prompt.split(EOS)):
            if number:
                tokens.append(engine.vocabulary.eos_id)
            if is_events and part.strip():
                tokens += engine.events.lines(part, unknown).tokens
            elif part and not is_events:
                try:
                    tokens += await engine.encode(part, deadline(request), document=True)
                except InvalidRequest as error:
                    raise renamed(error, {"input": "prompt"}) from error
    document: TokenizeDocument = {
        "count": len(tokens),
        "max_model_len": settings(request).max_input_tokens,
        "tokens": tokens,
        "token_strs": None,
    }
    return encode.reply(document)


@router.post("/detokenize", response_model=DetokenizeDocument, openapi_extra=json_body(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Returns the text of token ids. For models of text, the token `<eos>` becomes a line break."""
    body = await decode(request, DetokenizeBody)
    engine = await model_engine(request, body.model)
    engine.check_tokens(body.tokens, document=True)
    document: DetokenizeDocument = {"prompt": engine.vocabulary.decode([*body.tokens])}
    return encode.reply(document)


@router.head("/tokenizer_info", include_in_schema=False)
@router.get("/tokenizer_info", response_model=TokenizerDocument)
async def tokenizer_info(request: Request) -> Response:
    """Returns the special tokens of the tokenizer of the default model, or of the model in the query parameter `model`.
    `bos_token` is null, because clients need not put a start token before a text."""
    engine = await model_engine(request, request.query_params.get("model"))
    document: TokenizerDocument = {
        "tokenizer_class": CLASS,
        "eos_token": EOS,
        "bos_token": None,
        "unk_token": UNK if engine.vocabulary.has_unknown else None,
        "pad_token": None,
        "model_max_length": settings(request).max_input_tokens,
    }
    return encode.reply(document)
