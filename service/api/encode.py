"""Encodes results as JSON. The members of a result's JSON object are the fields of its class in `service/types/`.
`reply` builds the response."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from pydantic_core import to_jsonable_python
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wane.service.api.disconnect import has_left
from wane.service.api.exchange import context
from wane.service.errors import Abandoned
from wane.service.observability.logs import without_commands
from wane.service.types.answer import COLUMNS, SELDOM, Answer
from wane.service.types.common import Result
from wane.service.types.request import Latency

VALUES_AT_ONCE = 16_384
"""The number of values of a long list that are encoded in one iteration of the event loop. The encoder holds the
interpreter lock, so encoding on another thread would block the event loop for the same time."""

CHARACTERS = 64  # so many characters of a text are encoded in about the time of one value

BYTES_IN_A_TURN = 1 << 17  # encoded bytes after which the event loop runs other work
SENT_WHOLE_BYTES = 1 << 20

CONTENT_TYPE = (b"content-type", b"application/json")
RawHeaders = Sequence[tuple[bytes, bytes]]


class Reply(Response):
    """A JSON response. Creating Starlette's `Response` takes twice as long, because it accepts any content and
    encoding."""

    def __init__(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """`body` is encoded JSON."""
        self.status_code = status
        self.background = None
        self.body = body
        self.raw_headers = [CONTENT_TYPE, (b"content-length", b"%d" % len(self.body))]
        if headers:
            self.raw_headers += [(name.lower().encode("latin-1"), headers[name].encode("latin-1")) for name in headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})


encoder = msgspec.json.Encoder(enc_hook=to_jsonable_python)


def json_bytes(document: object) -> bytes:
    """Encodes a result, a document, or a value in a document as JSON in one line. A number that is not finite becomes
    null."""
    encoded = encoder.encode(document)
    return encoded if encoded.isascii() else without_commands(encoded)


def event(document: object, name: str = "") -> bytes:
    """Returns one server-sent event. Its data is one `data:` line."""
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: %s\n\n" % json_bytes(document)


def members(result: Result) -> dict[str, object]:
    """Returns the members of a result's JSON object. Omits a field that has its default value."""
    values = msgspec.structs.asdict(result)
    return {
        field.name: values[field.name]
        for field in msgspec.structs.fields(result)
        if field.required or values[field.name] != field.default
    }


def pieces(value: object) -> Iterator[bytes]:
    """Yields the same bytes as `json_bytes`, in pieces of about VALUES_AT_ONCE values."""
    if isinstance(value, Result):
        value = members(value)
    if isinstance(value, Mapping) and value:
        for number, (name, item) in enumerate(value.items()):
            yield (b"," if number else b"{") + json_bytes(name) + b":"
            yield from pieces(item)
        yield b"}"
        return
    if not isinstance(value, list | tuple | str) or (count := _values_in(value)) <= VALUES_AT_ONCE:
        yield json_bytes(value)
        return
    begin, between, end = (b'"', b"", b'"') if isinstance(value, str) else (b"[", b",", b"]")
    rows = max(1, VALUES_AT_ONCE * len(value) // count)
    for start in range(0, len(value), rows):
        yield between if start else begin
        if rows > 1:
            yield json_bytes(value[start : start + rows])[1:-1]
        else:
            yield from pieces(value[start])
    yield end


def _values_in(value: object) -> int:
    """Returns about how many values a value has, as if the items of each list had as many as the first that is not
    null. A long text counts as one value for every CHARACTERS characters."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.astuple(value)
        return sum(map(_values_in, value))
    if isinstance(value, Mapping):
        return sum(map(_values_in, value.values()))
    if isinstance(value, list | tuple) and value:
        return len(value) * _values_in(next((item for item in value if item is not None), None))
    return 1 + len(value) // CHARACTERS if isinstance(value, str) else 1


class LongReply(Response):
    """A response that is sent while it is made, because the whole would take much memory. A client of HTTP/1.0, which
    has no chunks, is sent the whole. If the client disconnects, the rest is not made."""

    def __init__(self, begun: list[bytes], rest: Iterator[bytes], headers: RawHeaders) -> None:
        """`begun` are the first pieces of the body, and `rest` makes the others."""
        self.status_code, self.background, self.raw_headers = 200, None, [*headers]
        self._begun, self._rest = begun, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        in_chunks = scope.get("http_version") != "1.0"
        if in_chunks:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b"".join(self._begun), "more_body": True})
            self._begun.clear()
        for piece in self._rest:
            if has_left(scope):
                context(scope).fields["error"] = Abandoned.code
                return
            if in_chunks:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            else:
                self._begun.append(piece)
            await asyncio.sleep(0)
        if in_chunks:
            await send({"type": "http.response.body", "body": b""})
        else:
            await _whole(self._begun, self.raw_headers)(scope, receive, send)


def _whole(made: Sequence[bytes], headers: RawHeaders) -> Reply:
    whole = Reply(b"".join(made))
    whole.raw_headers[:1] = headers
    return whole


async def made_in_turns(made: Iterator[bytes], most: float = math.inf) -> list[bytes]:
    """Returns the pieces, until they have more than `most` bytes. The event loop runs other work between two of
    them."""
    begun: list[bytes] = []
    size = in_turn = 0
    for piece in made:
        begun.append(piece)
        size += len(piece)
        in_turn += len(piece)
        if size > most:
            break
        if in_turn > BYTES_IN_A_TURN:
            in_turn = 0
            await asyncio.sleep(0)
    return begun


async def reply_in_pieces(made: Iterator[bytes], headers: RawHeaders = (CONTENT_TYPE,)) -> Response:
    """Returns a response whose body is made in pieces (see `made_in_turns`). A body of over SENT_WHOLE_BYTES is sent
    while it is made."""
    begun = await made_in_turns(made, SENT_WHOLE_BYTES)
    is_long = sum(map(len, begun)) > SENT_WHOLE_BYTES
    return LongReply(begun, made, headers) if is_long else _whole(begun, headers)


def reply(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a result or a document as a response."""
    encoded = encoder.encode(document)  # `json_bytes` would be one more call of every step
    return Reply(encoded if encoded.isascii() else without_commands(encoded), status, headers)


async def long_reply(document: object) -> Response:
    """Returns a result or a document that may be long as a response. See `reply_in_pieces`."""
    return await reply_in_pieces(pieces(document))


StepResult = Answer | Exception
"""The answer to one step, or the exception of a failed step."""


def step_columns(
    sessions: Sequence[str], results: Sequence[StepResult], failure: Callable[[Exception], dict[str, object]]
) -> dict[str, object]:
    """Returns the answers to many steps as one list for each field (`types.StepColumns`). `failure` converts an
    exception to a problem document."""
    answers = [None if isinstance(result, Exception) else result for result in results]
    columns: dict[str, object] = {"session": sessions}
    for name in COLUMNS:
        values = [None if answer is None else getattr(answer, name) for answer in answers]
        if name not in SELDOM or any(value is not None for value in values):
            columns[name] = values
    predictions = [None if answer is None else answer.predictions for answer in answers]
    phases = [answer.latency.phases() for answer in answers if answer is not None]
    return columns | {
        "token_id": [None if listed is None else [item.token_id for item in listed] for listed in predictions],
        "logprob": [None if listed is None else [item.logprob for item in listed] for listed in predictions],
        "error": [failure(result) if isinstance(result, Exception) else None for result in results],
        "latency": Latency(*map(max, zip(*phases, strict=True))) if phases else Latency(0.0, 0.0, 0.0),
    }
