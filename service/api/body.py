"""Reads request bodies. Enforces a deadline and a size limit for each body, parses it strictly, and names the invalid
field in errors.

**The values of a large body are counted before the body is decoded.** A body with too many values is rejected, and at
most its beginning is decoded (see `Decoder`). A JSON decoder takes a second for four megabytes of empty lists. During
this time the decoder holds the interpreter lock, even on another thread. Counting the values with numpy takes a few
milliseconds and releases the lock, so the event loop can run.

**Error messages are Wane's own.** They name the field by its path and say what its value must be. The path has the
notation of the engine's messages, such as `steps[0].tokens[1]`. pydantic's own paths contain the names of a union's
branches, and pydantic's messages use Python's terms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Scope

from wane.service.api.disconnect import WHOLE_BODY
from wane.service.api.exchange import context
from wane.service.api.schemas.common import AtMost, Body, EventInput, GivenSequence, RankedBody
from wane.service.api.schemas.sessions import StreamBody
from wane.service.deadline import until
from wane.service.engine.engine import Engine
from wane.service.engine.event_names import EventTokens
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
from wane.service.net.connection import CONNECTION, Connection
from wane.service.settings import Settings
from wane.service.types import MAX_POSITION, NO_FILTER, SESSION_ID, Filter

MOST_DIGITS = 1000
"""The largest number of digits of one number in a large body. Decoding time grows with the square of the number of
digits."""

QUOTE, BACKSLASH, COMMA, COLON, BRACKET, BRACE, ZERO = b'"\\,:[{0'

Mask = NDArray[np.bool_]


class BodyLimits(NamedTuple):
    """The limits of a body: the largest number of values, of fields, and of objects and lists together."""

    values: int
    fields: int
    containers: int


def excess(raw: bytes, most: BodyLimits) -> tuple[int, str] | None:
    """Returns the byte offset at which a body first exceeds a limit, and that limit as a text, such as `120 fields`.
    Returns None if the body exceeds no limit.

    The contents of strings do not count. Raises NotJson if a number has too many digits.
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
    """Marks the quotes that begin or end strings. The number of backslashes directly before such a quote is even."""
    quotes: Mask = data == QUOTE
    backslashes: Mask = data == BACKSLASH
    if backslashes.any():
        ordinals = np.arange(1, len(data) + 1, dtype=np.int64)
        # For each byte, the number of consecutive backslashes up to and including this byte.
        run = ordinals - np.maximum.accumulate(ordinals * ~backslashes)
        quotes[1:] &= run[:-1] & 1 == 0
    return quotes


def _place_after(mask: Mask, count: int) -> int | None:
    """Returns the index of the true value that follows the first `count` true values of `mask`. Returns None if there
    is no such value."""
    return int(np.flatnonzero(mask)[count]) if np.count_nonzero(mask) > count else None


def _check_numbers(digits: Mask) -> None:
    ends = np.flatnonzero(~digits)
    runs = np.diff(ends, prepend=-1, append=len(digits)) - 1
    longest = int(runs.argmax())
    if runs[longest] > MOST_DIGITS:
        at = 0 if longest == 0 else int(ends[longest - 1]) + 1
        raise NotJson(
            f"the body has a number with {runs[longest]} digits at byte {at}; the limit is {MOST_DIGITS} digits"
        )


# The keys are pydantic's error types. The values say what a field must be. If every branch of a union fails, the
# message lists what each branch accepts.
KINDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "int_type": "an integer",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
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
"""Types of errors that pydantic may report for a partial body although the complete body is valid. A `value_error`
means that a rule about several fields is violated."""


class BodyShape(NamedTuple):
    """The fields of a body type. `names` are the names of the fields. `bodies` maps each field whose value is another
    body to that body's type. `lists` maps each field with a list of bodies to the type of these bodies. `longest` maps
    each list field to its length limit."""

    names: frozenset[str]
    bodies: Mapping[str, type[Body]]
    lists: Mapping[str, type[Body]]
    longest: Mapping[str, AtMost]


@cache
def shape(model: type[Body]) -> BodyShape:
    """Returns the `BodyShape` of a body type. Computes the shape once for each type."""
    bodies: dict[str, type[Body]] = {}
    lists: dict[str, type[Body]] = {}
    for name, field in model.model_fields.items():
        if (inner := _body_type(field.annotation)) is not None:
            bodies[name] = inner
        elif (inner := _item_type(field.annotation)) is not None:
            lists[name] = inner
    longest = {
        name: one for name, field in model.model_fields.items() for one in field.metadata if isinstance(one, AtMost)
    }
    return BodyShape(frozenset(model.model_fields), bodies, lists, longest)


def _item_type(annotation: Any) -> type[Body] | None:
    """Returns the subclass of Body among the item types of a list annotation. Returns None if no item type is a Body,
    or if the annotation is not a list."""
    if get_origin(annotation) in (Union, UnionType):  # a union of a list and None
        return next((found for one in get_args(annotation) if (found := _item_type(one)) is not None), None)
    return _body_type(*get_args(annotation)) if get_origin(annotation) is list else None


def _body_type(annotation: Any) -> type[Body] | None:
    if get_origin(annotation) in (Union, UnionType):  # a union of a body type and None
        annotation = next((one for one in get_args(annotation) if _body_type(one) is not None), annotation)
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, Body) else None


def too_long_list(document: Mapping[str, Any], model: type[Body], settings: Settings, *, partial: bool = False) -> None:
    """Raises TooLarge or InvalidRequest for the first list in `document` that exceeds its limit. A pydantic model would
    validate the items of a list before its length, and a list may have a million items. If `partial` is true,
    `document` is the beginning of a body, and its last list may be incomplete."""
    longest = shape(model).longest
    for name, found in document.items():
        if not isinstance(found, list) or (at_most := longest.get(name)) is None:
            continue
        most = at_most.value(settings)
        if most is None or len(found) <= most:
            continue
        count = f"at least {len(found)}" if partial else str(len(found))
        if at_most.of_tokens:
            raise TooLarge(f"the input has {count} tokens, but at most {most} are accepted")
        raise InvalidRequest(f"{name} holds {count} values, but must hold at most {most}", name)


def unknown_field(document: Mapping[str, Any], model: type[Body]) -> str | None:
    """Returns the path of the first unknown field in `document` or its nested objects. Unknown fields are those that
    `model` does not define.

    pydantic's own check would create an error for every unknown field, and would report a misspelt required field as
    missing.
    """
    names, bodies, lists, _ = shape(model)
    if not document.keys() <= names:
        return _quoted(next(name for name in document if name not in names))
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


def _quoted(name: str) -> str:
    """Returns a client's field name for a message. Truncates a long name, and quotes a name that is not plain text."""
    plain = 0 < len(name) <= REPR_MAX_CHARACTERS and name.isprintable() and name == name.strip()
    return name if plain else truncate_repr(name)


def invalid_request(error: ValidationError, model: type[Body]) -> InvalidRequest:
    """Converts pydantic's errors for a body to one error that names the first invalid field."""
    return _first_failure(error.errors(include_url=False, include_input=False), model)


def invalid_part(error: ValidationError, model: type[Body]) -> InvalidRequest | None:
    """Converts pydantic's errors for the beginning of a body to one error, as `invalid_request` does. Returns None if
    the rest of the body may correct every error."""
    found = error.errors(include_url=False, include_input=False)
    mendable = {one["loc"][:1] for one in found if one["type"] in MENDABLE}
    certain = [one for one in found if one["loc"][:1] not in mendable]
    return _first_failure(certain, model) if certain else None


def _first_failure(found: Sequence[Any], model: type[Body]) -> InvalidRequest:
    """Returns the error for the first invalid field, with the field's path."""
    same_field = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    places = [_place(one["loc"], model) for one in same_field]
    deepest = max(places, key=len)  # selects the union branch whose error has the longest path
    here = [one for one, place in zip(same_field, places, strict=True) if place == deepest]
    field, complaint = "".join(deepest).removeprefix("."), _complaint(here)
    if field:
        return InvalidRequest(field + complaint, field)
    return InvalidRequest("the body must be a JSON object" if here[0]["type"] == "model_type" else complaint[2:])


def _place(loc: Sequence[int | str], model: type[Body]) -> tuple[str, ...]:
    """Returns the path of an invalid field in the body, which is pydantic's `loc` without the names of union
    branches."""
    place: list[str] = []
    body: type[Body] | None = model
    for part in loc:
        if isinstance(part, int):
            place.append(f"[{part}]")
        elif body is not None and part in (known := shape(body)).names:
            place.append(f".{part}")
            body = known.bodies.get(part) or known.lists.get(part)
    return tuple(place)


def _complaint(found: Sequence[Mapping[str, Any]]) -> str:
    """Returns the description of the errors at one path. An error message consists of the path and this description."""
    first = found[0]
    if first["type"] in KINDS:
        kinds = (KINDS[one["type"]].format_map(one.get("ctx", {})) for one in found if one["type"] in KINDS)
        return f" must be {' or '.join(dict.fromkeys(kinds))}"
    if first["type"] in OTHERS:
        return f" {OTHERS[first['type']].format_map(first.get('ctx', {}))}"
    return f": {first['msg'].removeprefix('Value error, ')}"


B = TypeVar("B", bound=Body)
R = TypeVar("R")

LARGE_BYTES = 1 << 15
"""A body of more bytes than this is decoded on the decoder's thread. Decoding a smaller body takes at most a few
milliseconds."""

MOST_FIELDS = 24
"""An upper bound on the number of fields of one object in a body. It is also an upper bound on the number of values in
these fields, except token ids and events."""


class Decoder:
    """Decodes bodies and WebSocket messages. A separate thread decodes large bodies, one at a time.

    Decoding holds the interpreter lock on any thread. Therefore, if a large body exceeds a limit, the decoder decodes
    only the part before the excess. The thread ends when the decoder is garbage-collected.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        fields = MOST_FIELDS * (settings.max_batch_inputs + 4)
        tokens = max(settings.max_input_tokens, settings.max_scored_tokens)
        filtered = 2 * settings.max_filter_events
        self.most = BodyLimits(values=tokens + filtered + fields, fields=fields, containers=fields)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")

    async def decode(self, raw: bytes | str, model: type[B], deadline: float | None = None) -> B:
        """Decodes JSON as `model`, and checks the lengths of its lists. Raises NotJson, InvalidRequest, TooLarge,
        DeadlineExceeded."""
        if len(raw) <= LARGE_BYTES:
            return self.decode_now(raw, model)
        async with until(deadline):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._decode_large, raw, model)

    async def run(self, function: Callable[..., R], *given: object, deadline: float | None = None) -> R:
        """Calls `function`, which processes a large body or a part of it, on the decoder's thread. Raises
        DeadlineExceeded and the function's errors."""
        async with until(deadline):
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *given)

    def _decode_large(self, raw: bytes | str, model: type[B]) -> B:
        data = raw if isinstance(raw, bytes) else raw.encode()
        over = excess(data, self.most)
        if over is None:
            return self.decode_now(data, model)
        place, most = over
        self._check_part(data[:place], model)
        limit = (
            "the limit follows from the settings max_input_tokens, max_scored_tokens, max_filter_events and "
            "max_batch_inputs"
        )
        raise TooLarge(f"the body holds more than {most}: {limit}")

    def decode_now(self, raw: bytes | str, model: type[B]) -> B:
        """Decodes JSON as `model` on the calling thread. Raises NotJson, InvalidRequest, TooLarge."""
        document = parsed(raw)
        if isinstance(document, dict):
            too_long_list(document, model, self._settings)
        return valid(document, model)

    def _check_part(self, raw: bytes, model: type[Body]) -> None:
        """Validates the beginning of a body. Raises the first error that the rest of the body cannot correct."""
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
    """Reads and decodes the body as `model`. Decodes `empty` instead of an empty body.

    Raises NotJson, InvalidRequest, TooLarge, BodyTimeout, DeadlineExceeded, Abandoned.
    """
    raw: bytes | None = request.scope.get(WHOLE_BODY)
    if raw is None:
        raw = await read(request)
    decoder: Decoder = request.app.state.decoder
    if len(raw) <= LARGE_BYTES:
        return decoder.decode_now(raw or empty, model)
    return await decoder.decode(raw, model, deadline=context(request.scope).deadline)


def received_body(scope: Scope) -> bytes | None:
    """Returns a body that was received together with the request's head. Returns None for other bodies."""
    state = scope.get("state")
    connection: Connection | None = None if state is None else state.get(CONNECTION)
    return None if connection is None else connection.content


async def read(request: Request) -> bytes:
    """Reads the whole body. Raises BodyTimeout, DeadlineExceeded, Abandoned."""
    here = context(request.scope)
    deadline = here.deadline
    if deadline is not None and here.body_timeout_s < here.timeout_s:
        deadline -= here.timeout_s - here.body_timeout_s
    try:
        async with asyncio.timeout_at(deadline):
            return await _receive(request)
    except TimeoutError:
        if deadline == here.deadline:
            raise DeadlineExceeded("the deadline passed before the whole body was received") from None
        raise BodyTimeout(f"the body was not complete after {here.body_timeout_s:g} s") from None


async def _receive(request: Request) -> bytes:
    parts: list[bytes] = []
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Abandoned("the client hung up before its request was read")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


ONE_TOKEN = StreamBody(tokens=[0])
"""Stands for every step that `only_token` recognises. Its options have their default values. Its token is not used."""

SHORT = 64  # in bytes; a longer message has several tokens or another field, so it is not parsed here


def only_token(raw: bytes | str | None) -> int | None:
    """Returns the token of a step with one token and no other field. Returns None for any other step, valid or invalid.
    Most steps have this form, and this function is faster than a pydantic model."""
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
    """A step with one token and no option but `expected_position`."""

    session: str
    token: int
    expected_position: int | None


PLAIN_STEP = frozenset({"session", "tokens", "expected_position"})


def plain_steps(raw: bytes, most: int) -> tuple[list[PlainStep], bool] | None:
    """Returns the steps of a call, and whether the call requests the format `columns`. Returns None if the body is
    invalid, has more than `most` steps, has a step with an option that `PlainStep` lacks, or has two steps of one
    session. Most calls have only plain steps, and this function is faster than a pydantic model."""
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
    """Parses JSON. If `partial` is true, the JSON may be incomplete. Raises NotJson."""
    try:
        return from_json(raw, allow_partial=partial, cache_strings="keys")
    except ValueError as error:
        raise not_json(error) from error


def not_json(error: ValueError) -> NotJson:
    return NotJson(f"the body is not JSON: {error}")


def valid(document: Any, model: type[B]) -> B:
    """Validates a document as `model`. Raises InvalidRequest."""
    if isinstance(document, dict) and (unknown := unknown_field(document, model)) is not None:
        raise InvalidRequest(f"{unknown}: there is no such field", unknown)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise invalid_request(error, model) from error


async def tokens_of(
    engine: Engine, given: GivenSequence, deadline: float | None, *, document: bool = False
) -> EventTokens:
    """Returns the tokens of the input `given`: a text, events or token ids. If `document` is true, the input is for
    scoring, which has a larger limit on the number of tokens. Raises TooLarge and DeadlineExceeded. Raises
    InvalidRequest for a text without tokens, for events that the model refuses, and if the model does not read this
    kind of input."""
    if isinstance(given, list):
        return EventTokens(tuple(given))
    if isinstance(given, EventInput):
        engine.check_event_count(len(given.events), document=document)
        return await engine.events.read(given.events, given.unknown)
    tokens = await engine.encode(given, deadline, document=document)
    if not tokens:
        raise InvalidRequest("the input is empty: there is no token in the text", "input")
    return EventTokens(tokens)


def filter_of(engine: Engine, body: RankedBody) -> Filter:
    """Returns the filter that selects the tokens that the answer may list. Raises InvalidRequest."""
    flags = body.exclude_seen or body.include_end or body.include_unknown
    if body.exclude is None and body.candidates is None and not flags:
        return NO_FILTER
    return engine.events.filter(
        body.exclude,
        body.candidates,
        body.unknown,
        exclude_seen=body.exclude_seen,
        include_end=body.include_end,
        include_unknown=body.include_unknown,
    )


def headers(described: Mapping[str, tuple[str, Mapping[str, object]]]) -> dict[str, Any]:
    """Returns the OpenAPI description of headers, with a text and a JSON schema for each header. A route that reads the
    headers itself is faster than a route with the framework's header parameters."""
    return {
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string", **form}}
            for name, (text, form) in described.items()
        ]
    }


def json_body(model: type[Body], *, required: bool = True) -> dict[str, Any]:
    """Returns the OpenAPI description of the body of a route that decodes `model`, with the model's examples."""
    examples = {f"example {number}": {"value": value} for number, value in enumerate(model.examples, 1)}
    content = {"application/json": {"schema": _without_references(model.model_json_schema()), "examples": examples}}
    return {"requestBody": {"required": required, "content": content}}


def _without_references(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema in which each reference is replaced by the definition that it refers to."""
    definitions = schema.pop("$defs", {})

    def resolved(part: Any) -> Any:
        if isinstance(part, list):
            return [resolved(one) for one in part]
        if not isinstance(part, dict):
            return part
        found = {name: resolved(one) for name, one in part.items() if name != "$ref"}
        if "$ref" in part:
            found = resolved(definitions[part["$ref"].rpartition("/")[2]]) | found
        return found

    whole: dict[str, Any] = resolved(schema)
    return whole
