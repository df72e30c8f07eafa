"""The Open Inference Protocol: health, metadata, statistics and inference. `repository.py` has its model repository.

An inference is a prediction after each sequence of a batch, a score of the given tokens, or both: what the requested
outputs need, and nothing else. With a `sequence_id` it is a step of the session `MODEL:ID`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode, signature, tensors
from wane.service.api.body import LARGE_BYTES, Decoder, headers, json_body, read
from wane.service.api.deps import (
    charge,
    deadline,
    header,
    model_engine,
    note_model,
    owner,
    session_engine,
    session_key,
    settings,
)
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import WHOLE_BODY, context, note_answer, registry
from wane.service.api.inference_statistics import InferenceCounter
from wane.service.api.routes.repository import FAILURE
from wane.service.api.schemas.common import anchored
from wane.service.api.schemas.inference import (
    LARGEST_ID,
    InferBody,
    InferenceDocument,
    InferParameters,
    ModelConfigDocument,
    ModelMetadataDocument,
    ServerDocument,
    ServerLiveDocument,
    ServerReadyDocument,
    StatisticsDocument,
)
from wane.service.api.schemas.models import ModelReadyDocument
from wane.service.api.signature import (
    DEFAULT_OUTPUTS,
    ERROR_BOUND,
    EVENTS,
    INPUTS,
    LENGTHS,
    LOGITS,
    OUTPUTS,
    POSITION,
    PREDICTED,
    SOURCES,
    TEXT,
    TOKEN_LOGPROBS,
    TOP1_PROVED,
    TOP_IDS,
    TOP_LOGPROBS,
)
from wane.service.api.tensors import ENCODING, HEADER_LENGTH, OutputFormat, Tensor
from wane.service.engine.engine import Engine
from wane.service.errors import (
    InvalidRequest,
    SessionExists,
    TooLarge,
    Unavailable,
    UnknownModel,
    UnknownSession,
    truncate_repr,
)
from wane.service.types import (
    Answer,
    Latency,
    Mode,
    PredictRequest,
    Score,
    ScoreRequest,
    StepRequest,
)

Version = Annotated[str, Path(examples=["1"], description="the served version")]

SEQUENCE_STARTS = 3
"""Attempts to start a sequence that another client starts at the same time."""

NO_LATENCY = Latency(0.0, 0.0, 0.0)

INFER_BODY = json_body(InferBody)
INFER_BODY["requestBody"]["content"]["application/octet-stream"] = {
    "schema": {"type": "string", "format": "binary"},
}
INFER: dict[str, Any] = INFER_BODY | headers(
    {
        HEADER_LENGTH: ("bytes of the JSON before the binary tensors", {"pattern": anchored("0*[1-9][0-9]{0,14}")}),
        ENCODING: ("of the body", {"enum": ["gzip", "deflate", "identity"]}),
    }
)
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the outputs, as JSON or with binary tensors after the JSON",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}

router = APIRouter(prefix="/v2", tags=["inference"], responses=FAILURE)


# Health


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live", response_model=ServerLiveDocument)
async def live() -> Response:
    """Whether the process is alive."""
    return encode.reply({"live": True})


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready", response_model=ServerReadyDocument)
async def server_ready(request: Request) -> Response:
    """Whether every model has loaded or failed, and the session store is reachable: like /readyz."""
    models = registry(request)
    if not models.ready:
        raise Unavailable(f"the server is {models.status}")
    if models.store is None or not models.store.ready:
        raise Unavailable("the session store is unavailable")
    return encode.reply({"ready": True})


# Metadata


@router.head("", include_in_schema=False)
@router.get("", response_model=ServerDocument)
async def server(request: Request) -> Response:
    """Returns the server's name, its version, and the protocol's extensions that it has."""
    document: ServerDocument = {
        "name": "wane",
        "version": request.app.version,
        "extensions": [*signature.EXTENSIONS],
    }
    return encode.reply(document)


@router.head("/models/stats", include_in_schema=False)
@router.get("/models/stats", response_model=StatisticsDocument)
async def all_statistics(request: Request) -> Response:
    """Returns the statistics of every model."""
    return _statistics(request, registry(request).list())


@router.head("/models/{name}/stats", include_in_schema=False)
@router.get("/models/{name}/stats", response_model=StatisticsDocument)
async def statistics(request: Request, name: str) -> Response:
    """Returns the statistics of a model's inference requests since it was loaded."""
    return _statistics(request, [await _served(request, name)])


@router.head("/models/{name}/versions/{version}/stats", include_in_schema=False)
@router.get("/models/{name}/versions/{version}/stats", response_model=StatisticsDocument)
async def version_statistics(request: Request, name: str, version: Version) -> Response:
    """Like `/v2/models/{name}/stats`, if this version is served."""
    return _statistics(request, [await _served(request, name, version)])


def _statistics(request: Request, engines: Sequence[Engine]) -> Response:
    counter = _counter(request)
    return encode.reply({"model_stats": [counter.of(engine).document(engine) for engine in engines]})


@router.head("/models/{name}/config", include_in_schema=False)
@router.get("/models/{name}/config", response_model=ModelConfigDocument)
async def config(request: Request, name: str) -> Response:
    """Returns a model's configuration, in Triton's shape."""
    return encode.reply(signature.configuration(await _served(request, name), settings(request)))


@router.head("/models/{name}/versions/{version}/config", include_in_schema=False)
@router.get("/models/{name}/versions/{version}/config", response_model=ModelConfigDocument)
async def version_config(request: Request, name: str, version: Version) -> Response:
    """Like `/v2/models/{name}/config`, if this version is served."""
    return encode.reply(signature.configuration(await _served(request, name, version), settings(request)))


@router.head("/models/{name}/versions/{version}/ready", include_in_schema=False)
@router.get("/models/{name}/versions/{version}/ready", response_model=ModelReadyDocument)
async def version_ready(request: Request, name: str, version: Version) -> Response:
    """Whether this version of a model is ready: like `/v2/models/{name}/ready`."""
    models = registry(request)
    engine = _of_version(models.get(name), version)
    if engine not in models.served:
        raise Unavailable("the server is stopping")
    return encode.reply({"name": engine.name, "ready": True})


@router.head("/models/{name}", include_in_schema=False)
@router.get("/models/{name}", response_model=ModelMetadataDocument)
async def metadata(request: Request, name: str) -> Response:
    """Returns a model's inputs and outputs."""
    return encode.reply(signature.metadata(await _served(request, name), settings(request)))


@router.head("/models/{name}/versions/{version}", include_in_schema=False)
@router.get("/models/{name}/versions/{version}", response_model=ModelMetadataDocument)
async def version_metadata(request: Request, name: str, version: Version) -> Response:
    """Like `/v2/models/{name}`, if this version is served."""
    return encode.reply(signature.metadata(await _served(request, name, version), settings(request)))


async def _served(request: Request, name: str, version: str | None = None) -> Engine:
    """Returns the engine of a model. Raises UnknownModel if another version is served; see also `model_engine`."""
    return _of_version(await model_engine(request, name), version)


def _of_version(engine: Engine, version: str | None) -> Engine:
    if version not in (None, engine.version):
        raise UnknownModel(
            f"model {engine.name} has version {engine.version}, and not {truncate_repr(version)}, which is not served"
        )
    return engine


def _counter(request: Request) -> InferenceCounter:
    found: InferenceCounter = request.app.state.inference_counter
    return found


# Inference


@router.post("/models/{name}/infer", response_model=InferenceDocument, openapi_extra=INFER, responses=ANSWERS)
async def infer(request: Request, name: str) -> Response:
    """Predicts the next token after each sequence, or scores the given tokens, by the requested outputs. With a
    `sequence_id` it appends the tokens to a sequence."""
    return await _infer(request, await _served(request, name))


@router.post(
    "/models/{name}/versions/{version}/infer", response_model=InferenceDocument, openapi_extra=INFER, responses=ANSWERS
)
async def version_infer(request: Request, name: str, version: Version) -> Response:
    """Like `/v2/models/{name}/infer`, if this version is served."""
    return await _infer(request, await _served(request, name, version))


async def _infer(request: Request, engine: Engine) -> Response:
    started_s = time.perf_counter()
    counted = _counter(request).of(engine)
    try:
        asked = await _decoded(request)
        results = await _answered(request, engine, asked)
        encoding_s = time.perf_counter()
        head: dict[str, object] = {"model_name": results.engine.name, "model_version": results.engine.version}
        if asked.body.id is not None:
            head["id"] = asked.body.id
        answer = await tensors.reply(head, asked.wanted, results.arrays(asked, settings(request)))
    except BaseException:
        counted.fail.add(time.perf_counter() - started_s)
        raise
    ended_s = time.perf_counter()
    counted.succeeded(
        len(results.rows), results.latency, results.ready_s - started_s, ended_s - encoding_s, ended_s - started_s
    )
    return answer


@dataclass(frozen=True, slots=True)
class InferCall:
    """A decoded request: its JSON, its tensors by name, the requested outputs, and its deadline."""

    body: InferBody
    given: dict[str, Tensor]
    wanted: tuple[OutputFormat, ...]
    names: frozenset[str]
    deadline: float | None

    @property
    def is_predicted(self) -> bool:
        """Whether an output needs a prediction."""
        return bool(self.names & PREDICTED)

    @property
    def is_scored(self) -> bool:
        """Whether the given tokens are scored."""
        return TOKEN_LOGPROBS in self.names


@dataclass(slots=True)
class InferResults:
    """The engine that answered, the token ids of each row, and its answers and scores, if they were asked for.
    `ready_s`: when the engine's work began."""

    engine: Engine
    rows: Sequence[tuple[int, ...]]
    ready_s: float
    answers: Sequence[Answer] = ()
    scores: Sequence[Score] = ()

    @property
    def latency(self) -> Latency:
        """The latency of the engine's work: of the slowest row, because rows run together."""
        found = [one.latency for one in (*self.answers, *self.scores)]
        return max(found, key=lambda latency: latency.total_ms, default=NO_LATENCY)

    def arrays(self, asked: InferCall, limits: Any) -> dict[str, NDArray[Any]]:
        """Returns the requested outputs."""
        answers, names = self.answers, asked.names
        found: dict[str, NDArray[Any]] = {}
        k = signature.listed(self.engine, limits)
        if TOP_IDS in names:
            ids = [[one.token_id for one in answer.predictions[:k]] for answer in answers]
            found[TOP_IDS] = np.array(ids, np.int64)
        if TOP_LOGPROBS in names:
            logprobs = [[one.logprob for one in answer.predictions[:k]] for answer in answers]
            found[TOP_LOGPROBS] = np.array(logprobs, np.float32)
        if LOGITS in names:
            found[LOGITS] = np.stack([answer.logits for answer in answers if answer.logits is not None])
        if ERROR_BOUND in names:
            found[ERROR_BOUND] = np.array([answer.error_bound for answer in answers], np.float32)  # None is NaN
        if TOP1_PROVED in names:
            found[TOP1_PROVED] = np.array([answer.top1_proved for answer in answers], np.bool_)
        if POSITION in names:
            positions = [
                len(row) if not answers or answers[index].position is None else answers[index].position
                for index, row in enumerate(self.rows)
            ]
            found[POSITION] = np.array(positions, np.int64)
        if TOKEN_LOGPROBS in names:
            scored = np.full((len(self.rows), max(map(len, self.rows))), np.nan, np.float32)
            for index, score in enumerate(self.scores):
                scored[index, : len(score.logprobs)] = score.logprobs  # None is NaN
            found[TOKEN_LOGPROBS] = scored
        return found


async def _decoded(request: Request) -> InferCall:
    """Decodes the body and its tensors. Raises InvalidRequest, NotJson, TooLarge, UnsupportedMedia, and see `decode`."""
    raw: bytes | None = request.scope.get(WHOLE_BODY)
    if raw is None:
        raw = await read(request)
    decoder: Decoder = request.app.state.decoder
    until, encoding = deadline(request), header(request, ENCODING)
    if tensors.is_encoded(encoding):
        most = settings(request).max_body_bytes
        raw = await decoder.run(tensors.inflated, raw, encoding, most, deadline=until)
    head, binary = tensors.divided(raw, header(request, HEADER_LENGTH))
    body = await decoder.decode(head, InferBody, until)
    if len(raw) <= LARGE_BYTES:
        given = tensors.read_tensors(body.inputs, binary, INPUTS)
    else:
        given = await decoder.run(tensors.read_tensors, body.inputs, binary, INPUTS, deadline=until)
    parameters = body.parameters
    wanted: list[OutputFormat] = []
    is_binary = bool(parameters.binary_data_output)
    for output in body.outputs or ():
        if output.name not in OUTPUTS:
            there = ", ".join(sorted(OUTPUTS))
            raise InvalidRequest(f"there is no output {truncate_repr(output.name)}; there are {there}", "outputs")
        if any(one.name == output.name for one in wanted):
            raise InvalidRequest(f"output {output.name} is asked for twice", output.name)
        wanted.append(tensors.output_format(output.name, output.parameters, binary=is_binary))
    if not wanted:
        wanted = [OutputFormat(name, is_binary) for name in DEFAULT_OUTPUTS]
    here = context(request.scope)
    if parameters.timeout is not None and parameters.timeout < 0:
        raise InvalidRequest(f"timeout is {parameters.timeout}, but must be at least 0 microseconds", "timeout")
    if parameters.timeout and until is not None:
        until = min(until, until - here.timeout_s + parameters.timeout / 1e6)
    if parameters.priority is not None and parameters.priority < 0:
        raise InvalidRequest(f"priority is {parameters.priority}, but must be at least 0", "priority")
    return InferCall(body, given, tuple(wanted), frozenset(one.name for one in wanted), until)


async def _answered(request: Request, engine: Engine, asked: InferCall) -> InferResults:
    """Runs what the requested outputs need."""
    parameters = asked.body.parameters
    sequence = _sequence_id(parameters)
    if sequence is not None:
        return await _step(request, engine, asked, sequence)
    for name in ("expected_position", "sequence_start", "sequence_end"):
        if getattr(parameters, name) not in (None, False):
            raise InvalidRequest(f"{name} is given without a sequence_id", name)
    if not asked.is_predicted:
        for name in ("mode", "window", "tolerance"):
            if getattr(parameters, name) is not None:
                raise InvalidRequest(f"{name} is given, but no requested output is a prediction", name)
    rows = await _rows(engine, asked, settings(request).max_batch_inputs, settings(request).max_scored_tokens)
    charge(request, len(rows))
    results = InferResults(engine, rows, time.perf_counter())
    if asked.is_predicted:
        wanted = [_prediction(request, engine, asked, tokens) for tokens in rows]
        results.answers = await _predicted(engine, wanted)
        note_answer(request.scope, results.answers[0])
    if asked.is_scored:
        with until_hangup(request):
            truncated = bool(parameters.truncated)
            results.scores = [
                await engine.score(ScoreRequest(tokens, deadline=asked.deadline, truncated=truncated))
                for tokens in rows
            ]
    return results


def _prediction(request: Request, engine: Engine, asked: InferCall, tokens: tuple[int, ...]) -> PredictRequest:
    parameters = asked.body.parameters
    return PredictRequest(
        tokens=tokens,
        mode=Mode.AUTO if parameters.mode is None else parameters.mode,
        window=parameters.window,
        tolerance=parameters.tolerance,
        top_k=_top_k(request, engine, asked),
        deadline=asked.deadline,
        truncated=bool(parameters.truncated),
        logits=LOGITS in asked.names,
    )


def _top_k(request: Request, engine: Engine, asked: InferCall) -> int:
    """Returns the number of tokens to list: 1 if none is asked for."""
    return signature.listed(engine, settings(request)) if asked.names & {TOP_IDS, TOP_LOGPROBS} else 1


async def _predicted(engine: Engine, wanted: Sequence[PredictRequest]) -> Sequence[Answer]:
    """Returns the answers. Raises the first error among them."""
    if len(wanted) == 1:
        return [await engine.submit(wanted[0])]
    answers: list[Answer] = []
    for outcome in await engine.predict_many(wanted):
        if isinstance(outcome, Exception):
            raise outcome
        answers.append(outcome)
    return answers


# Inputs


async def _rows(engine: Engine, asked: InferCall, most_rows: int, most_tokens: int) -> list[tuple[int, ...]]:
    """Returns the token ids of each row. Raises InvalidRequest naming the tensor, TooLarge, DeadlineExceeded."""
    given = asked.given
    sources = [name for name in SOURCES if name in given]
    if len(sources) != 1:
        found = " and ".join(sources) or "none of them"
        raise InvalidRequest(f"give exactly one of the inputs {', '.join(SOURCES)}; found {found}", "inputs")
    name = sources[0]
    shape, values = given[name]
    if shape[0] > most_rows:
        raise InvalidRequest(f"{name} is a batch of {shape[0]}, but a batch has at most {most_rows}", name)
    document = not asked.is_predicted
    lengths = _lengths(given, name)
    rows: list[tuple[int, ...]] = []
    total = 0
    for index in range(shape[0]):
        where = f"{name}[{index}]"
        length = None if lengths is None else lengths[index]
        if isinstance(values, list):
            text = _text(engine, name, shape, values, index, length)
            rows.append(await _encoded(engine, text, where, name, asked.deadline, document=document))
            if index % encode.MADE_AT_ONCE == encode.MADE_AT_ONCE - 1:
                await asyncio.sleep(0)
        else:
            rows.append(tuple(values[index, :length].tolist()))
            engine.check_tokens(rows[-1], where, document=document)
        total += len(rows[-1])
        if total > most_tokens:
            raise TooLarge(f"{name} has more than {most_tokens} tokens")
    return rows


def _lengths(given: dict[str, Tensor], name: str) -> list[int] | None:
    """Returns the length of each row; None if all rows are full."""
    if LENGTHS not in given:
        return None
    if name == TEXT:
        raise InvalidRequest(f"{LENGTHS} is given with {TEXT}, which has no padding", LENGTHS)
    (rows, longest), (count,) = given[name].shape, given[LENGTHS].shape
    if count != rows:
        raise InvalidRequest(f"{LENGTHS} has {count} values, but {name} has {rows} rows", LENGTHS)
    found = given[LENGTHS].values
    assert not isinstance(found, list), "lengths are INT64: this is a bug"
    lengths: list[int] = found.tolist()
    for index, length in enumerate(lengths):
        if not 1 <= length <= longest:
            raise InvalidRequest(f"{LENGTHS}[{index}] is {length}, but must be from 1 to {longest}", LENGTHS)
    return lengths


def _text(
    engine: Engine, name: str, shape: tuple[int, ...], values: Sequence[str], index: int, length: int | None
) -> str:
    """Returns the text of a row; the names of events are lines of it."""
    if name == TEXT:
        return values[index]
    if engine.vocabulary.kind != "events":
        raise InvalidRequest(f"{EVENTS} is for models of events, but the vocabulary of {engine.name} is text", EVENTS)
    start = index * shape[1]
    names = values[start : start + (shape[1] if length is None else length)]
    for place, event in enumerate(names):
        if not event or event != event.strip() or "\n" in event:
            raise InvalidRequest(
                f"{EVENTS}[{index}][{place}] is {truncate_repr(event)}, but a name is one line without space around it",
                EVENTS,
            )
    return "\n".join(names)


async def _encoded(
    engine: Engine, text: str, where: str, name: str, until: float | None, *, document: bool
) -> tuple[int, ...]:
    try:
        tokens = await engine.encode(text, until, document=document)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}", name) from error
    if not tokens:
        raise InvalidRequest(f"{where} is empty: there is no token in the text", name)
    return tokens


# Sequences


def _sequence_id(parameters: InferParameters) -> str | None:
    """Returns the id of the sequence; None if there is none. Raises InvalidRequest."""
    given = parameters.sequence_id
    if given is None or given == "" or given == 0:
        return None
    if isinstance(given, int) and not 0 < given <= LARGEST_ID:
        raise InvalidRequest(
            f"sequence_id is {truncate_repr(given)}, but must be from 0 to {LARGEST_ID}", "sequence_id"
        )
    return str(given)


async def _step(request: Request, engine: Engine, asked: InferCall, sequence: str) -> InferResults:
    """Appends to a sequence: starts it before, and deletes it after, if the request says so."""
    parameters = asked.body.parameters
    for name in ("window", "tolerance", "truncated"):
        if getattr(parameters, name) not in (None, False):
            raise InvalidRequest(f"{name} is given with a sequence_id; it is for requests without", name)
    start = bool(parameters.sequence_start)
    if start and parameters.expected_position:
        raise InvalidRequest(
            f"expected_position is {parameters.expected_position}, but sequence_start begins at 0", "expected_position"
        )
    if asked.is_scored:
        raise InvalidRequest(f"{TOKEN_LOGPROBS} is not available for a sequence", TOKEN_LOGPROBS)
    key = _key(request, engine, sequence)
    if not start:
        engine = await _sequence_engine(request, engine, key, sequence)
    rows = await _rows(engine, asked, 1, settings(request).max_scored_tokens)
    wanted = StepRequest(
        key,
        rows[0],
        parameters.mode,
        parameters.expected_position,
        top_k=_top_k(request, engine, asked),
        deadline=asked.deadline,
        logits=LOGITS in asked.names,
    )
    if start:
        with until_hangup(request):
            await _start(request, engine, key)
    results = InferResults(engine, rows, time.perf_counter())
    try:
        results.answers = [await engine.submit(wanted)]
    except UnknownSession as error:
        raise _no_sequence(sequence) from error
    if parameters.sequence_end:
        with until_hangup(request):
            await _delete(engine, key, asked.deadline)
    note_answer(request.scope, results.answers[0])
    return results


def _key(request: Request, engine: Engine, sequence: str) -> str:
    """Returns the key of the sequence's session. Raises InvalidRequest."""
    try:
        return session_key(request, f"{engine.name}:{sequence}")
    except InvalidRequest as error:
        raise InvalidRequest(
            f"sequence_id {truncate_repr(sequence)} with the model's name and a colon must be 1 to 128 letters, digits "
            "and . _ ~ : -",
            "sequence_id",
        ) from error


async def _sequence_engine(request: Request, engine: Engine, key: str, sequence: str) -> Engine:
    """Returns the engine of an existing sequence: that of the model, or of the version that the sequence began with.
    Raises InvalidRequest if there is no such sequence."""
    found = registry(request).resident_engine(key)
    if found is engine:
        return found
    try:
        return await session_engine(request, key, engine.name)
    except UnknownSession as error:
        raise _no_sequence(sequence) from error


async def _start(request: Request, engine: Engine, key: str) -> None:
    """Makes the sequence anew. Raises SessionExists if other clients keep starting it too."""
    until = deadline(request)
    for attempt in range(SEQUENCE_STARTS):
        try:
            older = await session_engine(request, key)
        except UnknownSession:
            pass
        else:
            await _delete(older, key, until)
        try:
            await engine.create_session(key.rpartition("/")[2], None, owner(request), None)
        except SessionExists:
            if attempt == SEQUENCE_STARTS - 1:
                raise
        else:
            break
    note_model(request, engine)


async def _delete(engine: Engine, key: str, until: float | None) -> None:
    try:
        await engine.delete_session(key, until)
    except UnknownSession:  # another client, or its time, has ended it
        pass


def _no_sequence(sequence: str) -> InvalidRequest:
    return InvalidRequest(
        f"there is no sequence {truncate_repr(sequence)}: it was not started, was ended, or has expired; begin it with "
        "sequence_start",
        "sequence_id",
    )
