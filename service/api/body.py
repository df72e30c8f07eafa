"""Reads request bodies. Enforces a deadline and a size limit for each body, decodes it strictly, and names the invalid
field in errors.

**The values of a large body are counted before the body is decoded.** A body with too many values is rejected. The
decoder takes a quarter of a second for four megabytes of empty lists. During this time it holds the interpreter lock,
even on another thread. Counting the values with numpy takes a few milliseconds and releases the lock, so the event loop
can run.

**Error messages are Wane's own** (`faults.py`). They name the field by its path and its value, and say what the value
must be. The path has the notation of the engine's messages, such as `steps[0].tokens[1]`.
"""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from wane.service.api.disconnect import WHOLE_BODY, connection_of
from wane.service.api.exchange import admit, context
from wane.service.api.faults import read_again
from wane.service.api.schemas.sessions import StepsFormat, StreamBody
from wane.service.batching.turns import HEAVY_TOKENS
from wane.service.deadline import until
from wane.service.engine.engine import Engine
from wane.service.engine.event_names import EventTokens
from wane.service.errors import (
    Abandoned,
    BodyTimeout,
    DeadlineExceeded,
    InvalidRequest,
    NotJson,
    Overloaded,
    TooLarge,
    UnsupportedMedia,
    truncate_repr,
)
from wane.service.settings import Settings
from wane.service.types.body import Body, EventInput, InputSequence, RankedBody, as_array
from wane.service.types.request import MAX_POSITION, NO_FILTER, Filter, is_session_id

MOST_DIGITS = 1000
"""The largest number of digits of one number in a large body. Decoding time grows with the square of the number of
digits."""

QUOTE, BACKSLASH, COMMA, COLON, BRACKET, BRACE, ZERO = b'"\\,:[{0'

ENCODING = "content-encoding"
WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # values of zlib's `wbits` for the gzip format and the zlib format
MOST_INFLATED = 1040  # deflate makes at most 258 bytes of 2 bits, so a body grows at most so many times
MEMBER = b"\x1f\x8b"  # the first bytes of each member of the gzip format
MOST_MEMBERS = 256  # the bytes after a member are copied, so many small members would take long
MARKS = b"\xef\xbb\xbf", "\ufeff"  # a byte-order mark, with which some editors begin a file

Mask = NDArray[np.bool_]


class BodyLimits(NamedTuple):
    """The limits of a body: the largest number of values, of fields, and of objects and lists together."""

    values: int
    fields: int
    containers: int


def excess(raw: bytes, most: BodyLimits) -> str | None:
    """Returns a limit that a body exceeds, as a text, such as `120 fields`, or None if it exceeds none.

    The contents of strings do not count. Raises NotJson if a number has too many digits.
    """
    data = np.frombuffer(raw, np.uint8)
    outside = np.bitwise_xor.accumulate(_quotes(data).view(np.uint8)) == 0
    _check_numbers(outside & (data - ZERO <= 9))
    for name, count, mask in (
        ("comma-separated values", most.values, data == COMMA),
        ("fields", most.fields, data == COLON),
        ("objects and lists", most.containers, (data == BRACKET) | (data == BRACE)),
    ):
        if np.count_nonzero(mask & outside) > count:
            return f"{count} {name}"
    return None


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


def _check_numbers(digits: Mask) -> None:
    ends = np.flatnonzero(~digits)
    runs = np.diff(ends, prepend=-1, append=len(digits)) - 1
    longest = int(runs.argmax())
    if runs[longest] > MOST_DIGITS:
        at = 0 if longest == 0 else int(ends[longest - 1]) + 1
        raise NotJson(
            f"the body has a number with {runs[longest]} digits at byte {at}; the limit is {MOST_DIGITS} digits"
        )


B = TypeVar("B", bound=Body)
R = TypeVar("R")

LARGE_BYTES = 1 << 15
"""A body of more bytes than this is decoded on the decoder's thread. Decoding a smaller body takes at most a few
milliseconds."""

MOST_FIELDS = 24
"""An upper bound on the number of fields of one object in a body. It is also an upper bound on the number of values in
these fields, except token ids and events."""

OF_VALUES = "max_scored_tokens", "max_input_tokens", "max_filter_events", "max_batch_inputs"
"""The settings from which the largest number of values in a body follows."""

FAILURES = (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError)
"""The errors with which msgspec rejects a body."""

reader = cache(msgspec.json.Decoder)
"""Returns the decoder of a type. Makes it once for each type."""


class Decoder:
    """Decodes bodies and WebSocket messages. A separate thread decodes large bodies, one at a time.

    Decoding holds the interpreter lock on any thread. Therefore a large body that exceeds a limit is not decoded. The
    thread ends when the decoder is garbage-collected.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        fields = MOST_FIELDS * (settings.max_batch_inputs + 4)
        tokens = max(settings.max_input_tokens, settings.max_scored_tokens)
        filtered = 2 * settings.max_filter_events
        self.most = BodyLimits(values=tokens + filtered + fields, fields=fields, containers=fields)
        self.inflating = asyncio.Lock()
        """Held while a body is decompressed. Bodies wait for it, so that only one at a time has a reservation of the
        receive budget for its largest possible size."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")

    async def decode(self, raw: bytes | str, model: type[B], deadline: float | None = None) -> B:
        """Decodes JSON as `model`. Raises NotJson, InvalidRequest, TooLarge, DeadlineExceeded."""
        if len(raw) <= LARGE_BYTES:
            return self.decode_now(raw, model)
        return await self.run(self._decode_large, raw, model, deadline=deadline)

    async def run(self, function: Callable[..., R], *arguments: object, deadline: float | None = None) -> R:
        """Calls `function`, which processes a large body or a part of it, on the decoder's thread. Raises
        DeadlineExceeded and the function's errors."""
        async with until(deadline):
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _decode_large(self, raw: bytes | str, model: type[B]) -> B:
        data = raw if isinstance(raw, bytes) else raw.encode()
        over = excess(data, self.most)
        if over is not None:
            limits = ", ".join(f"{name} is {getattr(self._settings, name)}" for name in OF_VALUES)
            raise TooLarge(f"the body has more than {over}, and the settings allow no request with more: {limits}")
        return self.decode_now(data, model)

    def decode_now(self, raw: bytes | str, model: type[B]) -> B:
        """Decodes JSON as `model` on the calling thread. Raises NotJson, InvalidRequest."""
        raw = unmarked(raw)
        try:
            body: B = reader(model).decode(raw)
        except FAILURES:
            body = read_again(raw, model)
        if model.alone is not None and getattr(body, model.alone) is not None:
            try:
                document = reader(dict[str, object]).decode(raw)
            except FAILURES:  # a body that only `read_again` accepts
                document = from_json(raw)
            if others := {name for name, value in document.items() if value is not None} - {model.alone}:
                raise InvalidRequest(f"`{model.alone}` excludes other fields; found `{min(others)}`")
        return body


def inflated(raw: bytes, encoding: str, most: int) -> bytes:
    """Decompresses a body. Reads no further than a byte over `most`. A body in gzip may have several members (RFC 1952,
    section 2.2). Raises InvalidRequest for a damaged body and for more than MOST_MEMBERS members, and TooLarge for more
    than `most` bytes."""

    def refused(why: str) -> InvalidRequest:
        return InvalidRequest(f"{ENCODING} is {encoding}, but the {why}", ENCODING)

    parts, size, rest = list[bytes](), 0, raw
    while not parts or rest:
        if len(parts) == MOST_MEMBERS:
            raise refused(f"body has more than {MOST_MEMBERS} members")
        inflater = zlib.decompressobj(WBITS[encoding])
        try:
            parts.append(inflater.decompress(rest, most + 1 - size))
        except zlib.error as error:
            raise refused(f"body is not valid {encoding}: {error}") from error
        size += len(parts[-1])
        if size > most:
            raise TooLarge(f"the decompressed body is too long; at most {most} bytes are accepted")
        if not inflater.eof:
            raise refused(f"{encoding} data is incomplete")
        rest = inflater.unused_data
        if rest and (encoding == "deflate" or not rest.startswith(MEMBER)):
            raise refused(f"body has bytes after the {encoding} data")
    return b"".join(parts)


async def uncompressed(request: Request, raw: bytes) -> bytes:
    """Returns a received body without its `Content-Encoding`. The decompressed bytes count towards the receive budget
    until the request is answered. Raises UnsupportedMedia, Overloaded, DeadlineExceeded and the errors of
    `inflated`."""
    request_context, app = context(request.scope), request.app
    if request_context.header(ENCODING) is None:
        return raw
    lines = [value.decode("latin-1") for name, value in request.scope["headers"] if name == ENCODING.encode()]
    encoding = ", ".join(lines).strip().lower()
    if encoding in ("", "identity"):
        return raw
    if encoding not in WBITS:
        raise UnsupportedMedia(
            f"content-encoding {truncate_repr(encoding)} is not supported; the server accepts gzip and deflate"
        )
    most: int = app.state.settings.max_body_bytes
    connection = connection_of(request.scope)
    decoder: Decoder = app.state.decoder
    largest, body = min(most, MOST_INFLATED * len(raw)), b""
    async with until(request_context.deadline), decoder.inflating:
        if connection is not None and not connection.hold(largest):
            raise Overloaded("the server is receiving too much data: try again later")
        try:
            body = await decoder.run(inflated, raw, encoding, most, deadline=request_context.deadline)
        finally:
            if connection is not None:
                connection.hold(len(body) - largest)
    return body


def unmarked(raw: bytes | str) -> bytes | str:
    """Returns a body without its byte-order mark."""
    mark = MARKS[isinstance(raw, str)]
    return raw[len(mark) :] if raw.startswith(mark) else raw  # type: ignore[arg-type]


async def decode(request: Request, model: type[B], empty: bytes = b"") -> B:
    """Reads and decodes the body as `model`, and admits the request by its cost (`Body.cost`). Reads an empty body as
    `empty`.

    Raises NotJson, InvalidRequest, TooLarge, RateLimited, BodyTimeout, DeadlineExceeded, Abandoned.
    """
    raw: bytes | None = request.scope.get(WHOLE_BODY)
    if raw is None:
        raw = await read(request)
    decoder: Decoder = request.app.state.decoder
    if len(raw) <= LARGE_BYTES:
        body = decoder.decode_now(raw or empty, model)
    else:
        body = await decoder.decode(raw, model, deadline=context(request.scope).deadline)
    admit(request, body.cost(request.app.state.settings))
    return body


async def read(request: Request) -> bytes:
    """Reads the whole body, and decompresses it. Raises BodyTimeout, DeadlineExceeded, Abandoned and the errors of
    `uncompressed`."""
    request_context = context(request.scope)
    deadline = request_context.deadline
    if deadline is not None and request_context.body_timeout_s < request_context.timeout_s:
        deadline -= request_context.timeout_s - request_context.body_timeout_s
    try:
        async with asyncio.timeout_at(deadline):
            raw = b"".join([part async for part in request.stream()])  # `body()` would keep it until the request ends
    except ClientDisconnect:
        raise Abandoned("the client hung up before its request was read") from None
    except TimeoutError:
        if deadline == request_context.deadline:
            raise DeadlineExceeded("the deadline passed before the whole body was received") from None
        raise BodyTimeout(f"the body was not complete after {request_context.body_timeout_s:g} s") from None
    return await uncompressed(request, raw)


ONE_TOKEN = StreamBody(tokens=(0,))
"""Stands for every step that `only_token` recognises. Its options have their default values. Its token is not used."""

SHORT = 64  # in bytes; a longer message has several tokens or another field, so it is not parsed here


class OneToken(msgspec.Struct, forbid_unknown_fields=True):
    """A step with one token and no other field. Most steps have this form."""

    tokens: tuple[int]


def only_token(raw: bytes | str | None) -> int | None:
    """Returns the token of a step with one token and no other field. Returns None for any other step, valid or
    invalid."""
    if raw is None or len(raw) > SHORT:
        return None
    try:
        token: int = reader(OneToken).decode(raw).tokens[0]
    except FAILURES:
        return None
    return token


class PlainStep(msgspec.Struct, forbid_unknown_fields=True):
    """A step with one token and no option but `expected_position`."""

    session: str
    tokens: tuple[int]
    expected_position: Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITION)] | None = None


class PlainSteps(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a call with plain steps."""

    steps: tuple[PlainStep, ...]
    format: StepsFormat = StepsFormat.DOCUMENTS


def plain_steps(raw: bytes, most: int) -> PlainSteps | None:
    """Returns the steps of a call. Returns None if the body is invalid, has more than `most` steps, has a step with an
    option that `PlainStep` lacks, or has two steps of one session. Most calls have only plain steps, which need no
    requests of their own."""
    try:
        body: PlainSteps = reader(PlainSteps).decode(raw)
    except FAILURES:
        return None
    sessions = {step.session for step in body.steps}
    if not 0 < len(sessions) == len(body.steps) <= most or not all(map(is_session_id, sessions)):
        return None
    return body


async def tokens_of(
    engine: Engine, sequence: InputSequence, deadline: float | None, *, document: bool = False
) -> EventTokens:
    """Returns the tokens of the input `sequence`: a text, events or token ids. If `document` is true, the input is for
    scoring, which has a larger limit on the number of tokens. Raises TooLarge and DeadlineExceeded. Raises
    InvalidRequest for a text without tokens, for events that the model refuses, and if the model does not read this
    kind of input."""
    if isinstance(sequence, EventInput):
        engine.limits.length(len(sequence.events), document=document)
        return await engine.events.read(sequence.events, sequence.unknown)
    if not isinstance(sequence, str):
        return EventTokens(sequence if isinstance(sequence, array) else as_array(sequence))
    tokens = await engine.encode(sequence, deadline, document=document)
    if not tokens:
        raise InvalidRequest("the input is empty: there is no token in the text", "input")
    return EventTokens(as_array(tokens))


async def filter_of(engine: Engine, body: RankedBody) -> Filter:
    """Returns the filter that selects the tokens that the answer may list. Converts the names of a long list on another
    thread. Raises InvalidRequest."""
    flags = body.exclude_seen or body.include_end or body.include_unknown
    if body.exclude is None and body.candidates is None and not flags:
        return NO_FILTER
    is_long = len(body.exclude or ()) + len(body.candidates or ()) >= HEAVY_TOKENS
    return await asyncio.to_thread(engine.events.filter, body) if is_long else engine.events.filter(body)
