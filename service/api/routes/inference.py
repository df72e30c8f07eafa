"""The Open Inference Protocol: health, metadata, statistics and inference. `repository.py` serves the protocol's model
repository.

The requested outputs determine what an inference computes: a prediction after each sequence of a batch, the
log-probabilities of the given tokens, or both. An inference with a `sequence_id` is a step of the session `MODEL:ID`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode, openapi, signature, tensors
from wane.service.api.cost import of_outputs
from wane.service.api.deps import model_engine, owner, settings
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import note_answer, registry
from wane.service.api.infer_call import ROWS_AT_ONCE, InferCall, decoded_call, rows_of
from wane.service.api.inference_statistics import InferenceCounter
from wane.service.api.openapi import headers, json_body
from wane.service.api.routes.repository import FAILURE
from wane.service.api.schemas.inference import (
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
from wane.service.api.schemas.models import ReadyModel
from wane.service.api.sequences import (
    delete_sequence,
    fork_of,
    no_sequence,
    sequence_engine,
    sequence_id,
    sequence_key,
    start_sequence,
)
from wane.service.api.signature import (
    ERROR_BOUND,
    EVENTS,
    LOGITS,
    POSITION,
    PREDICTED,
    TOKEN_LOGPROBS,
    TOP1_PROVED,
    TOP_IDS,
    TOP_LOGPROBS,
)
from wane.service.api.tensors import HEADER_LENGTH, Rows
from wane.service.engine.engine import Engine
from wane.service.engine.event_names import EventTokens
from wane.service.errors import InvalidRequest, Unavailable, UnknownModel, UnknownSession, truncate_repr
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.body import anchored
from wane.service.types.common import Mode
from wane.service.types.request import ContinuationsRequest, Filter, Latency, PredictRequest, ScoreRequest, StepRequest
from wane.service.types.text import Score

Version = Annotated[str, Path(examples=["2"], description="the served version")]

NO_LATENCY = Latency(0.0, 0.0, 0.0)

INFER_BODY = json_body(InferBody)
INFER_BODY["requestBody"]["content"]["application/octet-stream"] = {
    "schema": {"type": "string", "format": "binary"},
}
INFER: dict[str, Any] = INFER_BODY | headers(
    {
        HEADER_LENGTH: (
            "the length in bytes of the JSON header, which precedes the binary tensors",
            {"pattern": anchored("0*[1-9][0-9]{0,14}")},
        ),
    }
)
ANSWERS = openapi.answers(InferenceDocument, description="the outputs, as JSON or with binary tensors after the JSON")
ANSWERS[200]["content"]["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}

router = APIRouter(prefix="/v2", tags=["inference"], responses=FAILURE)


# Health


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live", response_model=None, responses=openapi.answers(ServerLiveDocument))
async def live() -> Response:
    """Answers 200 while the process is alive."""
    return encode.reply(ServerLiveDocument(True))


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready", response_model=None, responses=openapi.answers(ServerReadyDocument))
async def server_ready(request: Request) -> Response:
    """Answers 200 if every model has loaded or failed to load, the process is not draining, and the session store is
    reachable. Answers 503 otherwise, like /readyz."""
    models = registry(request)
    if not models.ready:
        raise Unavailable(f"the server is {models.status}")
    if models.store is None or not models.store.reachable:
        raise Unavailable("the session store cannot be reached")
    return encode.reply(ServerReadyDocument(True))


# Metadata


@router.head("", include_in_schema=False)
@router.get("", response_model=None, responses=openapi.answers(ServerDocument))
async def server(request: Request) -> Response:
    """Returns the server's name, the server's version, and the protocol extensions that the server supports."""
    return encode.reply(ServerDocument("wane", request.app.version, signature.EXTENSIONS))


@router.head("/models/stats", include_in_schema=False)
@router.get("/models/stats", response_model=None, responses=openapi.answers(StatisticsDocument))
async def all_statistics(request: Request) -> Response:
    """Returns the statistics of the inference requests for every model."""
    return _statistics(request, registry(request).list())


@router.head("/models/{name}/stats", include_in_schema=False)
@router.get("/models/{name}/stats", response_model=None, responses=openapi.answers(StatisticsDocument))
async def statistics(request: Request, name: str) -> Response:
    """Returns the statistics of a model's inference requests since the model was loaded."""
    return _statistics(request, [await _served(request, name)])


@router.head("/models/{name}/versions/{version}/stats", include_in_schema=False)
@router.get(
    "/models/{name}/versions/{version}/stats", response_model=None, responses=openapi.answers(StatisticsDocument)
)
async def version_statistics(request: Request, name: str, version: Version) -> Response:
    """Answers like `/v2/models/{name}/stats`, if this version is served."""
    return _statistics(request, [await _served(request, name, version)])


def _statistics(request: Request, engines: Sequence[Engine]) -> Response:
    counter = _counter(request)
    return encode.reply(StatisticsDocument([counter.of(engine).document(engine) for engine in engines]))


@router.head("/models/{name}/config", include_in_schema=False)
@router.get("/models/{name}/config", response_model=None, responses=openapi.answers(ModelConfigDocument))
async def config(request: Request, name: str) -> Response:
    """Returns a model's configuration, in Triton's format."""
    return encode.reply(signature.configuration(await _served(request, name), settings(request)))


@router.head("/models/{name}/versions/{version}/config", include_in_schema=False)
@router.get(
    "/models/{name}/versions/{version}/config", response_model=None, responses=openapi.answers(ModelConfigDocument)
)
async def version_config(request: Request, name: str, version: Version) -> Response:
    """Answers like `/v2/models/{name}/config`, if this version is served."""
    return encode.reply(signature.configuration(await _served(request, name, version), settings(request)))


@router.head("/models/{name}/versions/{version}/ready", include_in_schema=False)
@router.get("/models/{name}/versions/{version}/ready", response_model=None, responses=openapi.answers(ReadyModel))
async def version_ready(request: Request, name: str, version: Version) -> Response:
    """Answers like `/v2/models/{name}/ready`, if this version is served."""
    models = registry(request)
    engine = _of_version(models.get(name), version)
    if engine not in models.served:
        raise Unavailable("the server is stopping")
    return encode.reply(ReadyModel(engine.name, True))


@router.head("/models/{name}", include_in_schema=False)
@router.get("/models/{name}", response_model=None, responses=openapi.answers(ModelMetadataDocument))
async def metadata(request: Request, name: str) -> Response:
    """Returns a model's name, version, inputs and outputs."""
    return encode.reply(signature.metadata(await _served(request, name), settings(request)))


@router.head("/models/{name}/versions/{version}", include_in_schema=False)
@router.get("/models/{name}/versions/{version}", response_model=None, responses=openapi.answers(ModelMetadataDocument))
async def version_metadata(request: Request, name: str, version: Version) -> Response:
    """Answers like `/v2/models/{name}`, if this version is served."""
    return encode.reply(signature.metadata(await _served(request, name, version), settings(request)))


async def _served(request: Request, name: str, version: str | None = None) -> Engine:
    """Returns the engine of a model, like `model_engine`. Raises UnknownModel if `version` is not the served
    version."""
    return _of_version(await model_engine(request, name), version)


def _of_version(engine: Engine, version: str | None) -> Engine:
    if version not in (None, engine.version):
        raise UnknownModel(
            f"model {engine.name} has version {engine.version}; version {truncate_repr(version)} is not served"
        )
    return engine


def _counter(request: Request) -> InferenceCounter:
    counter: InferenceCounter = request.app.state.inference_counter
    return counter


# Inference


@router.post("/models/{name}/infer", response_model=None, openapi_extra=INFER, responses=ANSWERS)
async def infer(request: Request, name: str) -> Response:
    """Predicts the next token after each sequence, scores the given tokens, or both. The requested outputs determine
    which of these is computed. With a `sequence_id`, appends the tokens to that sequence."""
    return await _infer(request, await _served(request, name))


@router.post("/models/{name}/versions/{version}/infer", response_model=None, openapi_extra=INFER, responses=ANSWERS)
async def version_infer(request: Request, name: str, version: Version) -> Response:
    """Answers like `/v2/models/{name}/infer`, if this version is served."""
    return await _infer(request, await _served(request, name, version))


async def _infer(request: Request, engine: Engine) -> Response:
    started_s = time.perf_counter()
    counted = _counter(request).of(engine)
    try:
        asked = await decoded_call(request)
        results = await _answered(request, engine, asked)
        encoding_s = time.perf_counter()
        head: dict[str, object] = {"model_name": results.engine.name, "model_version": results.engine.version}
        if asked.body.id is not None:
            head["id"] = asked.body.id
        if unknown := [name for row in results.rows for name in row.unknown]:
            head["parameters"] = {"unknown": json.dumps(unknown, ensure_ascii=False)}
        answer = await tensors.reply(head, asked.wanted, await results.arrays(asked, settings(request)))
    except BaseException:
        counted.fail.add(time.perf_counter() - started_s)
        raise
    ended_s = time.perf_counter()
    counted.succeeded(
        len(results.rows), results.latency, results.ready_s - started_s, ended_s - encoding_s, ended_s - started_s
    )
    return answer


@dataclass(slots=True)
class InferResults:
    """The results of an inference. `engine` is the engine that computed the results. `rows` has the tokens of each row.
    `answers` has one prediction for each row, if the request asked for predictions. `scores` has one score for each
    row, if the request asked for scores. `ready_s` is when the engine's work began, by `time.perf_counter`."""

    engine: Engine
    rows: Sequence[EventTokens]
    ready_s: float
    answers: Sequence[Answer] = ()
    scores: Sequence[Score] = ()

    @property
    def latency(self) -> Latency:
        """The latency of the prediction or score that took longest. For predictions, this is the latency of the whole
        batch, because the predictions of all rows run at the same time."""
        latencies = [result.latency for result in self.answers] + [result.latency for result in self.scores]
        return max(latencies, key=lambda latency: latency.total_ms, default=NO_LATENCY)

    async def arrays(self, asked: InferCall, limits: Settings) -> dict[str, Rows]:
        """Returns the values of the requested outputs, by name. Raises InvalidRequest if a row has no known event and
        the model predicts nothing before the first event."""
        answers, names = self.answers, asked.names
        if names & PREDICTED and not all(answer.predictions for answer in answers):
            raise InvalidRequest(
                f"model {self.engine.name} predicts nothing before the first event, and the vocabulary has none of the "
                "given events",
                EVENTS,
            )
        outputs: dict[str, Rows] = {}
        k = signature.listed(self.engine, limits)
        if TOP_IDS in names:
            outputs[TOP_IDS] = await _each(
                answers, lambda answer: np.array([p.token_id for p in answer.predictions[:k]], np.int64)
            )
        if TOP_LOGPROBS in names:
            outputs[TOP_LOGPROBS] = await _each(
                answers, lambda answer: np.array([p.logprob for p in answer.predictions[:k]], np.float32)
            )
        if LOGITS in names:
            outputs[LOGITS] = [answer.logits for answer in answers if answer.logits is not None]
        if ERROR_BOUND in names:
            outputs[ERROR_BOUND] = np.array([answer.error_bound for answer in answers], np.float32)  # None becomes NaN
        if TOP1_PROVED in names:
            outputs[TOP1_PROVED] = np.array([answer.top1_proved for answer in answers], np.bool_)
        if POSITION in names:
            positions = [
                len(row.tokens) if not answers or answers[index].position is None else answers[index].position
                for index, row in enumerate(self.rows)
            ]
            outputs[POSITION] = np.array(positions, np.int64)
        if TOKEN_LOGPROBS in names:
            width = max(len(row.tokens) + len(row.skipped) for row in self.rows)
            scored = np.full((len(self.rows), width), np.nan, np.float32)
            for index, score in enumerate(self.scores):
                scored[index, : len(score.logprobs)] = score.logprobs  # None becomes NaN
                await _turn(index)
            if not self.scores:
                for index, (row, answer) in enumerate(zip(self.rows, answers, strict=True)):
                    skipped = np.array(row.skipped, np.intp)
                    places = np.delete(np.arange(len(row.tokens) + len(row.skipped)), skipped)
                    scored[index, places] = answer.token_logprobs or ()
            outputs[TOKEN_LOGPROBS] = scored
        return outputs


async def _turn(index: int) -> None:
    """Lets the event loop run other work after every ROWS_AT_ONCE rows. `index` is the index of the last row."""
    if index % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
        await asyncio.sleep(0)


async def _each(answers: Sequence[Answer], row_of: Callable[[Answer], NDArray[Any]]) -> list[NDArray[Any]]:
    """Returns the row of each answer."""
    rows: list[NDArray[Any]] = []
    for index, answer in enumerate(answers):
        rows.append(row_of(answer))
        await _turn(index)
    return rows


async def _answered(request: Request, engine: Engine, asked: InferCall) -> InferResults:
    """Runs the predictions and scores that the requested outputs need."""
    parameters = asked.body.parameters
    sequence = sequence_id(parameters)
    if sequence is not None:
        return await _step(request, engine, asked, sequence)
    for name in ("expected_position", "sequence_start", "sequence_end", "fork_of", "continuations"):
        if is_given(parameters, name):
            raise InvalidRequest(f"{name} is given without a sequence_id", name)
    if not asked.is_predicted:
        for name in ("mode", "window", "tolerance"):
            if getattr(parameters, name) is not None:
                raise InvalidRequest(f"{name} is given, but no requested output is a prediction", name)
    limits = settings(request)
    rows = await rows_of(engine, asked, limits, limits.max_batch_inputs)
    longest = max(len(row.tokens) + len(row.skipped) for row in rows)
    widths = {LOGITS: engine.vocabulary.size, TOKEN_LOGPROBS: longest}
    of_outputs(len(rows), [(widths[one.name], one.binary) for one in asked.wanted if one.name in widths]).check(limits)
    results = InferResults(engine, rows, time.perf_counter())
    if asked.is_predicted:
        results.answers = await _predicted(engine, _predictions(request, engine, asked, rows))
        note_answer(request.scope, results.answers[0])
    if asked.is_scored:
        with until_hangup(request):
            truncated = bool(parameters.truncated)
            results.scores = [
                await engine.score(
                    ScoreRequest(
                        row.tokens,
                        deadline=asked.deadline,
                        truncated=truncated,
                        unknown_names=row.unknown,
                        skipped=row.skipped,
                        owner=owner(request).name,
                    )
                )
                for row in rows
            ]
    return results


def _predictions(
    request: Request, engine: Engine, asked: InferCall, rows: Sequence[EventTokens]
) -> list[PredictRequest]:
    parameters = asked.body.parameters
    make = partial(
        PredictRequest,
        mode=Mode.AUTO if parameters.mode is None else parameters.mode,
        window=parameters.window,
        tolerance=parameters.tolerance,
        top_k=_top_k(request, engine, asked),
        deadline=asked.deadline,
        truncated=bool(parameters.truncated),
        logits=LOGITS in asked.names,
        filter=Filter(include_unknown=bool(parameters.include_unknown)),
        owner=owner(request).name,
    )
    return [make(row.tokens, unknown_names=row.unknown) for row in rows]


def _top_k(request: Request, engine: Engine, asked: InferCall) -> int:
    """Returns the number of predicted tokens to list. It is 1 if no requested output lists tokens."""
    return signature.listed(engine, settings(request)) if asked.names & {TOP_IDS, TOP_LOGPROBS} else 1


async def _predicted(engine: Engine, wanted: Sequence[PredictRequest]) -> Sequence[Answer]:
    """Returns the answers to predictions. If some predictions failed, raises the first error."""
    if len(wanted) == 1:
        return [await engine.submit(wanted[0])]
    answers: list[Answer] = []
    outcomes = await engine.predict_many(wanted)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                del outcome, outcomes  # the traceback of the error holds this frame
        answers.append(outcome)
    return answers


def is_given(parameters: InferParameters, name: str) -> bool:
    """Returns whether a parameter is in the request, and is not false."""
    value = getattr(parameters, name)
    return value is not None and value is not False


async def _continued(
    request: Request, engine: Engine, asked: InferCall, key: str, rows: list[EventTokens]
) -> InferResults:
    """Scores and predicts each row as a continuation of a sequence."""
    results = InferResults(engine, rows, time.perf_counter())
    wanted = ContinuationsRequest(
        key,
        tuple(row.tokens for row in rows),
        tuple(row.unknown for row in rows),
        _top_k(request, engine, asked),
        asked.deadline,
        logits=LOGITS in asked.names,
        filter=Filter(include_unknown=bool(asked.body.parameters.include_unknown)),
    )
    with until_hangup(request):
        results.answers = (await engine.continuations(wanted)).results
    note_answer(request.scope, results.answers[0])
    return results


async def _step(request: Request, engine: Engine, asked: InferCall, sequence: str) -> InferResults:
    """Appends tokens to a sequence. With `sequence_start`, starts the sequence first. With `sequence_end`, deletes the
    sequence after the answer."""
    parameters = asked.body.parameters
    for name in ("window", "tolerance", "truncated"):
        if is_given(parameters, name):
            raise InvalidRequest(
                f"{name} is given with a sequence_id, but is only for requests without a sequence_id", name
            )
    start, source = bool(parameters.sequence_start), sequence_id(parameters, "fork_of")
    if source is not None and (not start or source == sequence):
        why = "is the sequence itself" if start else "is given without sequence_start"
        raise InvalidRequest(f"fork_of {why}", "fork_of")
    if start and parameters.expected_position and source is None:
        raise InvalidRequest(
            f"expected_position is {parameters.expected_position}, but sequence_start starts at position 0",
            "expected_position",
        )
    key, limits = sequence_key(request, engine, sequence), settings(request)
    begin = None
    if source is not None:
        engine, begin = await fork_of(request, engine, key, parameters, source)
    elif not start:
        engine = await sequence_engine(request, engine, key, sequence)
    if parameters.continuations:
        for name in ("mode", "expected_position", "sequence_start", "sequence_end"):
            if is_given(parameters, name):
                raise InvalidRequest(f"{name} is given with continuations, which do not change the sequence", name)
        return await _continued(
            request, engine, asked, key, await rows_of(engine, asked, limits, limits.max_batch_inputs)
        )
    rows = await rows_of(engine, asked, limits, 1)
    wanted = StepRequest(
        key,
        rows[0].tokens,
        parameters.mode,
        parameters.expected_position,
        top_k=_top_k(request, engine, asked),
        deadline=asked.deadline,
        logits=LOGITS in asked.names,
        token_logprobs=asked.is_scored,
        unknown_names=rows[0].unknown,
        filter=Filter(include_unknown=bool(parameters.include_unknown)),
    )
    if start:
        with until_hangup(request):
            await start_sequence(request, engine, key, begin)
    results = InferResults(engine, rows, time.perf_counter())
    try:
        results.answers = [await engine.submit(wanted)]
    except UnknownSession as error:
        raise no_sequence(sequence) from error
    if parameters.sequence_end:
        with until_hangup(request):
            await delete_sequence(engine, key, asked.deadline)
    note_answer(request.scope, results.answers[0])
    return results
