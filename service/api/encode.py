"""Encodes results as JSON objects. A JSON object has the fields of the result's class in `service/types.py`. `reply`
builds the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import orjson
from pydantic_core import to_jsonable_python
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wane.service.api.schemas.predict import AnswerDocument, StepColumnsDocument
from wane.service.engine.columns import StepAnswer, StepResults
from wane.service.engine.engine import Engine
from wane.service.types import (
    Answer,
    Latency,
    LatencyDocument,
    Mode,
    ModelDocument,
    Prediction,
    PredictionDocument,
    StateSource,
    id_of,
)

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


def json_bytes(value: object) -> bytes:
    """Encodes a result, a document, or a value in a document as JSON. Every number must be finite, because JSON has no
    NaN and no infinity."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_PASSTHROUGH_DATACLASS)


def _plain(value: object) -> object:
    """Converts a value that orjson does not encode. `json_bytes` tells orjson not to encode dataclasses, because orjson
    would also encode the fields that `members` omits."""
    if isinstance(value, Prediction):
        return prediction(value)
    if isinstance(value, Latency):
        return latency(value)
    if is_dataclass(value):
        return members(value)
    return to_jsonable_python(value)


def members(result: Any) -> dict[str, object]:
    """Returns the members of a result's JSON object. Omits a field if its default is None and its value is None."""
    named = ((field, getattr(result, field.name)) for field in fields(result))
    return {field.name: value for field, value in named if value is not None or field.default is not None}


async def encode_long(document: Mapping[str, object]) -> bytes:
    """Returns the same bytes as `json_bytes`. Encodes a long list in pieces, and lets the event loop run other work
    between two pieces."""
    parts: list[bytes] = []
    for name, value in document.items():
        parts += (b"," if parts else b"{", json_bytes(name), b":")
        if not isinstance(value, list | tuple) or len(value) <= VALUES_AT_ONCE:
            parts.append(json_bytes(value))
            continue
        for start in range(0, len(value), VALUES_AT_ONCE):
            await asyncio.sleep(0)
            piece = json_bytes(value[start : start + VALUES_AT_ONCE])
            parts += (b"," if start else b"[", piece[1:-1])
        parts.append(b"]")
    parts.append(b"}" if parts else b"{}")
    return b"".join(parts)


MADE_AT_ONCE = 32
"""The number of answers of one request that are converted to documents in one iteration of the event loop."""


def reply(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a result or a document as a response."""
    return Reply(json_bytes(document), status, headers)


async def long_reply(result: object) -> Response:
    """Returns a result with long lists as a response. Encodes the lists in several iterations of the event loop."""
    return Reply(await encode_long(members(result)))


def model(engine: Engine) -> ModelDocument:
    return {"model": engine.name, "model_version": engine.version, "device": engine.device}


def prediction(given: Prediction) -> PredictionDocument:
    document: PredictionDocument = {
        "token_id": given.token_id,
        "token": given.token,
        "probability": given.probability,
        "logprob": given.logprob,
    }
    if given.token_bytes is not None:
        document["bytes"] = list(given.token_bytes)
    return document


def latency(given: Latency) -> LatencyDocument:
    return {"queue_ms": given.queue_ms, "compute_ms": given.compute_ms, "total_ms": given.total_ms}


def answer(engine: Engine, given: Answer) -> AnswerDocument:
    if isinstance(given, StepAnswer):
        return _step(engine, given.results, given.row)
    document: AnswerDocument = {
        "model": engine.name,
        "model_version": engine.version,
        "device": engine.device,
        "mode": given.mode,
        "window": given.window,
        "predictions": [prediction(one) for one in given.predictions],
        "latency": latency(given.latency),
        "state": given.state,
        "error_bound": given.error_bound,
        "state_error_bound": given.state_error_bound,
        "top1_proved": given.top1_proved,
    }
    if given.modes is not None:
        document["modes"] = {mode.value: part for mode, part in given.modes.items()}
    if given.agreement is not None:
        document["agreement"] = given.agreement
    if given.session is not None:
        document["session"] = id_of(given.session)
    if given.position is not None:
        document["position"] = given.position
    if given.replayed is not None:
        document["replayed"] = given.replayed
    if given.created:
        document["created"] = True
    if given.durable is not None:
        document["durable"] = given.durable
    if given.cache_tokens is not None:
        document["cache_tokens"] = given.cache_tokens
    if given.unknown is not None:
        document["unknown"] = list(given.unknown)
    if given.seen_tokens is not None:
        document["seen_tokens"] = given.seen_tokens
    return document


def _step(engine: Engine, results: StepResults, row: int) -> AnswerDocument:
    """Returns the same document as `answer` for one step of a batch. The step's values are in row `row` of
    `results`."""
    vocabulary, most = results.vocabulary, results.top_k[row]
    texts, ids, bound = vocabulary.texts, results.ids[row][:most], results.bounds[row]
    found: list[PredictionDocument] = [
        {"token_id": token, "token": texts[token], "probability": probability, "logprob": logprob}
        for token, probability, logprob in zip(ids, results.probabilities[row], results.logprobs[row], strict=False)
    ]
    if not vocabulary.partial_ids.isdisjoint(ids):
        for document in found:
            if (partial := vocabulary.partials[document["token_id"]]) is not None:
                document["bytes"] = list(partial)
    whole: AnswerDocument = {
        "model": engine.name,
        "model_version": engine.version,
        "device": engine.device,
        "mode": Mode.RECURRENT,
        "window": None,
        "predictions": found,
        "latency": {
            "queue_ms": results.queue_ms[row],
            "compute_ms": results.compute_ms,
            "total_ms": results.total_ms[row],
        },
        "state": StateSource.RESIDENT,
        "error_bound": None if bound is None else bound.variation,
        "state_error_bound": None if bound is None else bound.state,
        "top1_proved": results.proved[row],
        "session": id_of(results.sessions[row]),
        "position": results.positions[row],
        "replayed": False,
    }
    if results.cache_tokens is not None:
        whole["cache_tokens"] = results.cache_tokens[row]
    return whole


StepResult = tuple[Engine, Answer] | Exception
"""The result of one step: the engine and its answer, or the exception of a failed step."""

COLUMNS = (
    "mode",
    "window",
    "state",
    "position",
    "replayed",
    "created",
    "durable",
    "error_bound",
    "state_error_bound",
    "top1_proved",
    "cache_tokens",
)
"""The columns of the answers to many steps that have the name of a field of `Answer`. Such a column lists the field's
value in each answer."""

SELDOM = ("unknown", "seen_tokens")
"""Further columns with the names of fields of `Answer`. Such a column is omitted if no step has a value for it, as in
most calls.
"""

LATENCY = ("queue_ms", "compute_ms", "total_ms")


def step_columns(
    sessions: Sequence[str], results: Sequence[StepResult], failure: Callable[[Exception], dict[str, object]]
) -> StepColumnsDocument:
    """Returns the answers to many steps as one list for each field. `failure` converts an exception to a problem
    document."""
    given = [None if isinstance(result, Exception) else result[1] for result in results]
    columns: dict[str, object] = {
        name: [None if one is None else getattr(one, name) for one in given] for name in COLUMNS
    }
    for name in SELDOM:
        values = [None if one is None else getattr(one, name) for one in given]
        if any(value is not None for value in values):
            columns[name] = values
    latencies = [one.latency for one in given if one is not None]
    columns |= {
        "session": sessions,
        "model": [None if isinstance(result, Exception) else result[0].name for result in results],
        "token_id": [None if one is None else [first.token_id for first in one.predictions] for one in given],
        "logprob": [None if one is None else [first.logprob for first in one.predictions] for one in given],
        "error": [failure(result) if isinstance(result, Exception) else None for result in results],
        "latency": {name: max((getattr(one, name) for one in latencies), default=0.0) for name in LATENCY},
    }
    return cast(StepColumnsDocument, columns)
