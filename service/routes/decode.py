"""From bytes to a request: the body is read before its deadline, parsed strictly, and refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from service.engine.deadline import until
from service.engine.engine import Engine
from service.errors import Abandoned, BodyTimeout, DeadlineExceeded, InvalidRequest, NotJson, TooLarge
from service.middleware import context
from service.routes.findings import invalid_part, invalid_request, too_long_list, unknown_field
from service.routes.survey import Most, excess
from service.schemas import Body
from service.settings import Settings

B = TypeVar("B", bound=Body)

LARGE_BYTES = 1 << 15
"""A longer body is decoded on the decoder's thread. To decode a shorter one takes some milliseconds at most."""

MOST_FIELDS = 16
"""Fields of one body, or of one of its objects, and fewer values in those fields that are no token ids."""


class Decoder:
    """Decodes bodies, and messages of WebSockets: large ones on a thread of its own, one after the other.

    Decoding is a call that holds the interpreter, on whatever thread it is made. So a large body is not decoded beyond
    what a request may hold, and while one is decoded no other is. The thread ends with the decoder.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        fields = MOST_FIELDS * (settings.max_inputs + 4)
        tokens = max(settings.max_input_tokens, settings.max_scored_tokens)
        self._most = Most(values=tokens + fields, fields=fields, containers=fields)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")

    async def decode(self, raw: bytes | str, model: type[B], deadline: float | None = None) -> B:
        """JSON as `model`, no list in it longer than it may be. Raises NotJson, InvalidRequest, TooLarge,
        DeadlineExceeded."""
        if len(raw) <= LARGE_BYTES:
            return self._decode(raw, model)
        with until(deadline):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._decode_large, raw, model)

    def _decode_large(self, raw: bytes | str, model: type[B]) -> B:
        data = raw if isinstance(raw, bytes) else raw.encode()
        over = excess(data, self._most)
        if over is None:
            return self._decode(data, model)
        place, most = over
        self._check_part(data[:place], model)
        limit = "the limit follows from max_input_tokens, max_scored_tokens and max_inputs"
        raise TooLarge(f"the body holds more than {most}: {limit}")

    def _decode(self, raw: bytes | str, model: type[B]) -> B:
        document = parsed(raw)
        if isinstance(document, dict):
            too_long_list(document, model, self._settings)
        return valid(document, model)

    def _check_part(self, raw: bytes, model: type[Body]) -> None:
        """Raises for what is wrong in the beginning of a body however the body goes on."""
        document = parsed(raw, partial=True)
        if isinstance(document, dict):
            too_long_list(document, model, self._settings, partial=True)
        try:
            valid(document, model)
        except InvalidRequest as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            certain = invalid_part(error.__cause__, model)
            if certain is not None:
                raise certain from error.__cause__


async def decode(request: Request, model: type[B], empty: bytes = b"") -> B:
    """The body as `model`; one of no bytes is `empty`.

    Raises NotJson, InvalidRequest, TooLarge, BodyTimeout, DeadlineExceeded, Abandoned.
    """
    here = context(request.scope)
    deadline = here.deadline
    if deadline is not None and here.body_timeout_s < here.timeout_s:
        deadline -= here.timeout_s - here.body_timeout_s
    try:
        with until(deadline, "the deadline passed while the body was still coming in"):
            raw = await _body(request)
    except DeadlineExceeded:
        if deadline == here.deadline:
            raise
        raise BodyTimeout(f"the body was not there after {here.body_timeout_s:g} s") from None
    decoder: Decoder = request.app.state.decoder
    return await decoder.decode(raw or empty, model, deadline=here.deadline)


async def _body(request: Request) -> bytes:
    """All of the body; for most requests it is one message."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Abandoned("the client hung up before its request was read")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def parse(raw: bytes | str, model: type[B]) -> B:
    """JSON as `model`. Raises NotJson, InvalidRequest."""
    return valid(parsed(raw), model)


def parsed(raw: bytes | str, *, partial: bool = False) -> Any:
    """JSON as a document; `partial`: as far as it is given. Raises NotJson."""
    try:
        return from_json(raw, allow_partial=partial, cache_strings="keys")
    except ValueError as error:
        raise not_json(error) from error


def not_json(error: ValueError) -> NotJson:
    return NotJson(f"the body is not JSON: {error}")


def valid(document: Any, model: type[B]) -> B:
    """A document as `model`. Raises InvalidRequest."""
    if isinstance(document, dict) and (unknown := unknown_field(document, model)) is not None:
        raise InvalidRequest(f"{unknown}: there is no such field", unknown)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise invalid_request(error, model) from error


async def tokens_of(
    engine: Engine, given: str | list[int], deadline: float | None, *, document: bool = False
) -> tuple[int, ...]:
    """Token ids of text, or the ids themselves; a `document` is only scored, and may be longer than another input.
    Raises TooLarge, DeadlineExceeded, and InvalidRequest for text without a token in it."""
    if isinstance(given, list):
        return tuple(given)
    tokens = await engine.encode(given, deadline, document=document)
    if not tokens:
        raise InvalidRequest("the input is empty: there is no token in the text", "input")
    return tokens


def headers(described: Mapping[str, tuple[str, Mapping[str, object]]]) -> dict[str, Any]:
    """The OpenAPI description of headers that a route reads by itself, which costs a request less than the framework's
    own reading of them: what each says, and what is said of its text by JSON Schema."""
    return {
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string", **form}}
            for name, (text, form) in described.items()
        ]
    }


def json_body(model: type[Body], *, required: bool = True) -> dict[str, Any]:
    """The OpenAPI description of a route that decodes `model`, with the model's examples."""
    examples = {f"example {number}": {"value": value} for number, value in enumerate(model.examples, 1)}
    content = {"application/json": {"schema": model.model_json_schema(), "examples": examples}}
    return {"requestBody": {"required": required, "content": content}}
