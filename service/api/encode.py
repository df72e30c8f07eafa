"""Encodes results as JSON. The members of a result's JSON object are the fields of its class in `service/types.py`.
`reply` builds the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec
from pydantic_core import to_jsonable_python
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wane.service.engine.engine import Engine
from wane.service.types import COLUMNS, SELDOM, Answer, Latency, ModelDocument, Result

VALUES_AT_ONCE = 16_384
"""The number of values of a long list that are encoded in one iteration of the event loop. The encoder holds the
interpreter lock, so encoding on another thread would block the event loop for the same time."""

CONTENT_TYPE = (b"content-type", b"application/json")


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


json_bytes = msgspec.json.Encoder(enc_hook=to_jsonable_python).encode
"""Encodes a result, a document, or a value in a document as JSON. A number that is not finite becomes null."""


def members(result: Result) -> dict[str, object]:
    """Returns the members of a result's JSON object. Omits a field that has its default value, None."""
    given = msgspec.structs.asdict(result)
    return {
        one.name: given[one.name]
        for one in msgspec.structs.fields(result)
        if one.required or given[one.name] is not None
    }


async def encode_long(document: Mapping[str, object]) -> bytes:
    """Returns the same bytes as `json_bytes`. Encodes a long list in pieces, and lets the event loop run other work
    between two pieces."""
    parts: list[bytes] = []
    for name, value in document.items():
        parts += (b"," if parts else b"{", json_bytes(name), b":")
        if not isinstance(value, list | tuple) or len(value) <= (rows := _rows_at_once(value)):
            parts.append(json_bytes(value))
            continue
        for start in range(0, len(value), rows):
            await asyncio.sleep(0)
            piece = json_bytes(value[start : start + rows])
            parts += (b"," if start else b"[", piece[1:-1])
        parts.append(b"]")
    parts.append(b"}" if parts else b"{}")
    return b"".join(parts)


def _rows_at_once(values: Sequence[object]) -> int:
    """Returns how many items of a list have VALUES_AT_ONCE values together, if each has as many as the first item that
    is not null."""
    item = next((one for one in values if one is not None), None)
    count = 1
    while isinstance(item, list | tuple) and item:
        count *= len(item)
        item = item[0]
    if isinstance(item, msgspec.Struct):
        count *= len(item.__struct_fields__)
    return max(1, VALUES_AT_ONCE // count)


def reply(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a result or a document as a response."""
    return Reply(json_bytes(document), status, headers)


async def long_reply(result: Result) -> Response:
    """Returns a result with long lists as a response. Encodes the lists in several iterations of the event loop."""
    return Reply(await encode_long(members(result)))


def model(engine: Engine) -> ModelDocument:
    return {"model": engine.name, "model_version": engine.version, "device": engine.device}


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
        "token_id": [None if listed is None else [one.token_id for one in listed] for listed in predictions],
        "logprob": [None if listed is None else [one.logprob for one in listed] for listed in predictions],
        "error": [failure(result) if isinstance(result, Exception) else None for result in results],
        "latency": Latency(*map(max, zip(*phases, strict=True))) if phases else Latency(0.0, 0.0, 0.0),
    }
