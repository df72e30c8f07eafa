"""From bytes to a request: the body is read before its deadline, parsed strictly, and refused by name."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from service.engine.deadline import until
from service.engine.engine import Engine
from service.errors import Abandoned, BodyTimeout, DeadlineExceeded, InvalidRequest, NotJson
from service.middleware import context
from service.routes.findings import invalid_request, unknown_field
from service.schemas import Body

B = TypeVar("B", bound=Body)


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
    return parse(raw or empty, model)


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
    try:
        document = from_json(raw)
    except ValueError as error:
        raise NotJson(f"the body is not JSON: {error}") from error
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


def headers(described: dict[str, str]) -> dict[str, Any]:
    """The OpenAPI description of headers that a route reads by itself, which costs a request less than the framework's
    own reading of them."""
    return {
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
            for name, text in described.items()
        ]
    }


def json_body(model: type[Body], *, required: bool = True) -> dict[str, Any]:
    """The OpenAPI description of a route that decodes `model`, with the model's examples."""
    examples = {f"example {number}": {"value": value} for number, value in enumerate(model.examples, 1)}
    content = {"application/json": {"schema": model.model_json_schema(), "examples": examples}}
    return {"requestBody": {"required": required, "content": content}}
