"""Serves the event names, or the tokens, of a model's vocabulary in pages."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from wane.models.vocabulary import EOS, UNK, Vocabulary
from wane.service.api import encode
from wane.service.api.deps import model_engine
from wane.service.api.openapi import answers
from wane.service.api.schemas.models import VocabularyEntry, VocabularyPage
from wane.service.errors import InvalidRequest, truncate_repr

DEFAULT_LIMIT = 1000
LARGEST_LIMIT = 10_000
DIGITS = "[0-9]{1,15}"

PARAMETERS: dict[str, Any] = {
    "prefix": ("only the names that begin with this text", {"type": "string"}),
    "after": (
        "only the names whose id is above this number; give the `next` of the previous page",
        {"type": "integer", "minimum": 0},
    ),
    "limit": (
        "the largest number of names in the answer",
        {"type": "integer", "minimum": 1, "maximum": LARGEST_LIMIT, "default": DEFAULT_LIMIT},
    ),
}
"""The query parameters, each with its description and its JSON schema."""

DESCRIBED = {
    "parameters": [
        {"name": name, "in": "query", "required": False, "description": text, "schema": schema}
        for name, (text, schema) in PARAMETERS.items()
    ]
}

router = APIRouter(tags=["models"])


@router.head("/v1/models/{name}/vocabulary", include_in_schema=False)
@router.get(
    "/v1/models/{name}/vocabulary", response_model=None, responses=answers(VocabularyPage), openapi_extra=DESCRIBED
)
async def vocabulary(request: Request, name: str) -> Response:
    """Lists the names and ids of a model's events, or the texts and ids of a text model's tokens, by ascending id.
    Omits `<eos>`, `<unk>` and reserved tokens."""
    parameters = request.query_params
    if unknown := parameters.keys() - PARAMETERS:
        field = min(unknown)
        raise InvalidRequest(f"{field}: there is no such parameter; there are {', '.join(PARAMETERS)}", field)
    after = _whole(request, "after", -1, 0)
    limit = _whole(request, "limit", DEFAULT_LIMIT, 1, LARGEST_LIMIT)
    engine = await model_engine(request, name)
    entries = await asyncio.to_thread(page, engine.vocabulary, parameters.get("prefix", ""), after, limit)
    return await encode.long_reply(entries)


def page(vocabulary: Vocabulary, prefix: str, after: int, limit: int) -> VocabularyPage:
    """Returns the first `limit` names that begin with `prefix` and whose id is more than `after`."""
    events: list[VocabularyEntry] = []
    for index in range(after + 1, vocabulary.size):
        name = vocabulary.token(index)
        if not name.startswith(prefix) or name in (EOS, UNK) or index in vocabulary.reserved:
            continue
        if len(events) == limit:
            return VocabularyPage(events, events[-1].id)
        events.append(VocabularyEntry(index, name))
    return VocabularyPage(events, None)


def _whole(request: Request, name: str, default: int, least: int, most: int | None = None) -> int:
    """Returns the value of the query parameter `name`. Raises InvalidRequest unless the value is a whole number in the
    allowed range."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(DIGITS, text) or int(text) < least or (most is not None and int(text) > most):
        within = f"{least} or more" if most is None else f"from {least} to {most}"
        raise InvalidRequest(f"{name} is {truncate_repr(text)}, but must be a whole number, {within}", name)
    return int(text)
