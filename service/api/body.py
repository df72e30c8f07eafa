"""From the bytes of a body to a request: read before the deadline, counted, parsed strictly, and refused by name.

**Counted before it is decoded.** A JSON decoder takes a second for four megabytes of empty lists, and it holds the
interpreter for all of it, on whatever thread it runs. Counting what it would make takes some milliseconds of numpy,
which leaves the interpreter to the event loop.

**What is wrong with a body** is told in our words: the field by its place, and what should be there. Places are written
as the engine's own messages write them, `steps[0].tokens[1]`. pydantic's places contain the names of a union's
branches, and its sentences speak of Python.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from wane.service.aio.deadline import until
from wane.service.api.exchange import WHOLE_BODY, context
from wane.service.api.schemas.common import AtMost, Body
from wane.service.api.schemas.sessions import StreamBody
from wane.service.engine.engine import Engine
from wane.service.errors import (
    REPR_MAX_CHARACTERS,
    Abandoned,
    BodyTimeout,
    DeadlineExceeded,
    InvalidRequest,
    NotJson,
    TooLarge,
    truncate_repr,
)
from wane.service.settings import Settings
from wane.service.types import MAX_POSITION, SESSION_ID

MOST_DIGITS = 1000
"""Of one number in a large body: what a number takes to decode grows with the square of its digits."""

QUOTE, BACKSLASH, COMMA, COLON, BRACKET, BRACE, ZERO = b'"\\,:[{0'

Mask = NDArray[np.bool_]


class BodyLimits(NamedTuple):
    """What a body may hold: values in all, and fields, and objects and lists."""

    values: int
    fields: int
    containers: int


def excess(raw: bytes, most: BodyLimits) -> tuple[int, str] | None:
    """Where a body goes over what it may hold, and of what it holds too much; None if it does not.

    What is in a string does not count. Raises NotJson for a number that is too long to be read.
    """
    data = np.frombuffer(raw, np.uint8)
    outside = np.bitwise_xor.accumulate(_quotes(data).view(np.uint8)) == 0
    _check_numbers(outside & (data - ZERO <= 9))
    found = [
        (place, f"{count} {name}")
        for name, count, mask in (
            ("comma-separated values", most.values, data == COMMA),
            ("fields", most.fields, data == COLON),
            ("objects and lists", most.containers, (data == BRACKET) | (data == BRACE)),
        )
        if (place := _place_after(mask & outside, count)) is not None
    ]
    return min(found, default=None)


def _quotes(data: NDArray[np.uint8]) -> Mask:
    """Where strings begin and end: at quotes with no backslash before them, or an even number of them."""
    quotes: Mask = data == QUOTE
    backslashes: Mask = data == BACKSLASH
    if backslashes.any():
        ordinals = np.arange(1, len(data) + 1, dtype=np.int64)
        run = ordinals - np.maximum.accumulate(ordinals * ~backslashes)  # of backslashes, up to each place
        quotes[1:] &= run[:-1] & 1 == 0
    return quotes


def _place_after(mask: Mask, count: int) -> int | None:
    """Where the first value beyond the limit is; None if there are no more than the limit."""
    return int(np.flatnonzero(mask)[count]) if np.count_nonzero(mask) > count else None


def _check_numbers(digits: Mask) -> None:
    ends = np.flatnonzero(~digits)
    runs = np.diff(ends, prepend=-1, append=len(digits)) - 1
    longest = int(runs.argmax())
    if runs[longest] > MOST_DIGITS:
        at = 0 if longest == 0 else int(ends[longest - 1]) + 1
        raise NotJson(f"the body has a number of {runs[longest]} digits at byte {at}; at most {MOST_DIGITS} are read")


# By pydantic's names of errors. Where none of a union's branches would do, what each would take is told.
KINDS = {
    "bool_type": "true or false",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "int_type": "an integer",
    "less_than": "less than {lt}",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
OTHERS = {
    "missing": "is missing",
    "string_too_long": "has more than {max_length} characters",
    "too_short": "holds {actual_length} values, but must hold at least {min_length}",
}
MENDABLE = frozenset({"missing", "too_short", "value_error"})
"""What pydantic may find in the beginning of a body and not in the whole. `value_error`: which fields go together."""


class BodyShape(NamedTuple):
    """The names of a body's fields, which of them are bodies, or lists of bodies, and how long lists may be."""

    names: frozenset[str]
    bodies: Mapping[str, type[Body]]
    lists: Mapping[str, type[Body]]
    longest: Mapping[str, AtMost]


@cache
def shape(model: type[Body]) -> BodyShape:
    """The shape of a body."""
    bodies: dict[str, type[Body]] = {}
    lists: dict[str, type[Body]] = {}
    for name, field in model.model_fields.items():
        if (inner := _body_type(field.annotation)) is not None:
            bodies[name] = inner
        elif get_origin(field.annotation) is list and (inner := _body_type(*get_args(field.annotation))) is not None:
            lists[name] = inner
    longest = {
        name: one for name, field in model.model_fields.items() for one in field.metadata if isinstance(one, AtMost)
    }
    return BodyShape(frozenset(model.model_fields), bodies, lists, longest)


def _body_type(annotation: Any) -> type[Body] | None:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, Body) else None


def too_long_list(document: Mapping[str, Any], model: type[Body], settings: Settings, *, partial: bool = False) -> None:
    """Raises TooLarge or InvalidRequest for the first list in `document` that is longer than it may be. Not left to the
    model, which would look at its items first: there may be a million of them. `partial`: there may be more of it."""
    for name, at_most in shape(model).longest.items():
        found, most = document.get(name), at_most.value(settings)
        if not isinstance(found, list) or most is None or len(found) <= most:
            continue
        count = f"at least {len(found)}" if partial else str(len(found))
        if at_most.of_tokens:
            raise TooLarge(f"the input has {count} tokens, but at most {most} are taken")
        raise InvalidRequest(f"{name} holds {count} values, but must hold at most {most}", name)


def unknown_field(document: Mapping[str, Any], model: type[Body]) -> str | None:
    """The place of the first field of `document`, or of an object in it, that `model` has not.

    Not left to the model: it would build an error for each of them, and tell first of a field that is missing where it
    is one misspelt.
    """
    names, bodies, lists, _ = shape(model)
    if not document.keys() <= names:
        return _spelt(next(name for name in document if name not in names))
    for name, inner in bodies.items():
        found = document.get(name)
        if isinstance(found, dict) and (place := unknown_field(found, inner)) is not None:
            return f"{name}.{place}"
    for name, inner in lists.items():
        found, within = document.get(name), shape(inner)
        flat = not (within.bodies or within.lists)
        for index, one in enumerate(found if isinstance(found, list) else ()):
            if not isinstance(one, dict) or (flat and one.keys() <= within.names):
                continue
            if (place := unknown_field(one, inner)) is not None:
                return f"{name}[{index}].{place}"
    return None


def _spelt(name: str) -> str:
    """A name that a client chose: in quotes where it would not be seen for what it is, and cut."""
    plain = 0 < len(name) <= REPR_MAX_CHARACTERS and name.isprintable() and name == name.strip()
    return name if plain else truncate_repr(name)


def invalid_request(error: ValidationError, model: type[Body]) -> InvalidRequest:
    """pydantic's findings in a body as one failure of ours, which names the first field at fault."""
    return _told(error.errors(include_url=False, include_input=False), model)


def invalid_part(error: ValidationError, model: type[Body]) -> InvalidRequest | None:
    """As `invalid_request`, for the beginning of a body: None where the rest of the body may mend what was found."""
    found = error.errors(include_url=False, include_input=False)
    mendable = {one["loc"][:1] for one in found if one["type"] in MENDABLE}
    certain = [one for one in found if one["loc"][:1] not in mendable]
    return _told(certain, model) if certain else None


def _told(found: Sequence[Any], model: type[Body]) -> InvalidRequest:
    """The first field at fault, by its place."""
    same_field = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    places = [_place(one["loc"], model) for one in same_field]
    deepest = max(places, key=len)  # of a union's branches, the one that got furthest
    here = [one for one, place in zip(same_field, places, strict=True) if place == deepest]
    field, said = "".join(deepest).removeprefix("."), _said(here)
    if field:
        return InvalidRequest(field + said, field)
    return InvalidRequest("the body must be a JSON object" if here[0]["type"] == "model_type" else said[2:])


def _place(loc: Sequence[int | str], model: type[Body]) -> tuple[str, ...]:
    """Where that is in the body: what is in `loc` besides the names of branches."""
    place: list[str] = []
    body: type[Body] | None = model
    for part in loc:
        if isinstance(part, int):
            place.append(f"[{part}]")
        elif body is not None and part in (known := shape(body)).names:
            place.append(f".{part}")
            body = known.bodies.get(part) or known.lists.get(part)
    return tuple(place)


def _said(found: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong at one place, to stand behind its name."""
    first = found[0]
    if first["type"] in KINDS:
        kinds = (KINDS[one["type"]].format_map(one.get("ctx", {})) for one in found if one["type"] in KINDS)
        return f" must be {' or '.join(dict.fromkeys(kinds))}"
    if first["type"] in OTHERS:
        return f" {OTHERS[first['type']].format_map(first.get('ctx', {}))}"
    return f": {first['msg'].removeprefix('Value error, ')}"


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
        fields = MOST_FIELDS * (settings.max_batch_inputs + 4)
        tokens = max(settings.max_input_tokens, settings.max_scored_tokens)
        self.most = BodyLimits(values=tokens + fields, fields=fields, containers=fields)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")

    async def decode(self, raw: bytes | str, model: type[B], deadline: float | None = None) -> B:
        """JSON as `model`, no list in it longer than it may be. Raises NotJson, InvalidRequest, TooLarge,
        DeadlineExceeded."""
        if len(raw) <= LARGE_BYTES:
            return self.decode_now(raw, model)
        with until(deadline):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._decode_large, raw, model)

    def _decode_large(self, raw: bytes | str, model: type[B]) -> B:
        data = raw if isinstance(raw, bytes) else raw.encode()
        over = excess(data, self.most)
        if over is None:
            return self.decode_now(data, model)
        place, most = over
        self._check_part(data[:place], model)
        limit = "the limit follows from max_input_tokens, max_scored_tokens and max_batch_inputs"
        raise TooLarge(f"the body holds more than {most}: {limit}")

    def decode_now(self, raw: bytes | str, model: type[B]) -> B:
        """As `decode`, on this thread. Raises NotJson, InvalidRequest, TooLarge."""
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
    raw: bytes | None = request.scope.get(WHOLE_BODY)
    if raw is None:
        raw = await read(request)
    decoder: Decoder = request.app.state.decoder
    if len(raw) <= LARGE_BYTES:
        return decoder.decode_now(raw or empty, model)
    return await decoder.decode(raw, model, deadline=context(request.scope).deadline)


async def read(request: Request) -> bytes:
    """All of the body; for most requests it is one message. Raises BodyTimeout, DeadlineExceeded, Abandoned."""
    here = context(request.scope)
    deadline = here.deadline
    if deadline is not None and here.body_timeout_s < here.timeout_s:
        deadline -= here.timeout_s - here.body_timeout_s
    parts: list[bytes] = []
    more = True
    try:
        with until(deadline, "the deadline passed while the body was still coming in"):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Abandoned("the client hung up before its request was read")
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
    except DeadlineExceeded:
        if deadline == here.deadline:
            raise
        raise BodyTimeout(f"the body was not there after {here.body_timeout_s:g} s") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


ONE_TOKEN = StreamBody(tokens=[0])
"""The options of a step that is one token and says nothing else: see `only_token`."""

SHORT = 64  # bytes of a step that may be one token and nothing else


def only_token(raw: bytes | str | None) -> int | None:
    """The token of a step that has one and says nothing else: most are such, and need no model to be read by. None of
    any other, good or bad."""
    if raw is None or len(raw) > SHORT:
        return None
    try:
        document = orjson.loads(raw)
    except ValueError:
        return None
    if type(document) is not dict or len(document) != 1:
        return None
    tokens = document.get("tokens")
    return tokens[0] if type(tokens) is list and len(tokens) == 1 and type(tokens[0]) is int else None


class PlainStep(NamedTuple):
    """A step of one token that says nothing else but where it starts."""

    session: str
    token: int
    expected_position: int | None


PLAIN_STEP = frozenset({"session", "tokens", "expected_position"})


def plain_steps(raw: bytes, most: int) -> tuple[list[PlainStep], bool] | None:
    """The steps of a call, at most so many, where each is plain and of another session, and whether it wants columns.
    None for any other body, good or bad: most need no model to be read by."""
    try:
        document = orjson.loads(raw)
    except ValueError:
        return None
    if type(document) is not dict or not document.keys() <= {"steps", "format"}:
        return None
    steps, form = document.get("steps"), document.get("format", "documents")
    if type(steps) is not list or not 0 < len(steps) <= most or form not in ("documents", "columns"):
        return None
    found: list[PlainStep] = []
    sessions: set[str] = set()
    for step in steps:
        if type(step) is not dict or not step.keys() <= PLAIN_STEP:
            return None
        session, tokens, expected = step.get("session"), step.get("tokens"), step.get("expected_position")
        if type(session) is not str or SESSION_ID.fullmatch(session) is None:
            return None
        if type(tokens) is not list or len(tokens) != 1 or type(tokens[0]) is not int:
            return None
        if expected is not None and (type(expected) is not int or not 0 <= expected <= MAX_POSITION):
            return None
        sessions.add(session)
        found.append(PlainStep(session, tokens[0], expected))
    return (found, form == "columns") if len(sessions) == len(found) else None


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
