"""The Open Inference Protocol: health, metadata, statistics and inference. `repository.py` serves the protocol's model
repository.

The requested outputs determine what an inference computes: a prediction after each sequence of a batch, the
log-probabilities of the given tokens, or both. An inference with a `sequence_id` is a step of the session `MODEL:ID`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import numpy as np
from fastapi import Path
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode, openapi, signature, tensors
from wane.service.api.cost import of_outputs
from wane.service.api.deps import model_engine, owner, settings
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import note_answer, registry
from wane.service.api.infer_call import ROWS_AT_ONCE, InferCall, decoded_call, rows_of
from wane.service.api.openapi import Router, headers, json_body
from wane.service.api.routes.repository import FAILURE
from wane.service.api.schemas.inference import (
    InferBody,
    InferenceDocument,
    InferParameters,
    InferStatisticsDocument,
    ModelConfigDocument,
    ModelMetadataDocument,
    ModelStatisticsDocument,
    ServerDocument,
    ServerReadyDocument,
    StatisticsDocument,
    TimedDocument,
)
from wane.service.api.schemas.models import Liveness, ReadyModel
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
VERSION: dict[str, Any] = {"name": "version", "in": "path", "required": True, "description": "the served version"}
OF_VERSION = {"parameters": [VERSION | {"schema": {"type": "string", "examples": ["2"]}}]}

router = Router(prefix="/v2", tags=["inference"], responses=FAILURE)


class InferenceCounter(WeakKeyDictionary[Engine, ModelStatisticsDocument]):
    """The statistics of the requests to `infer`, for each model version. The statistics of a version are deleted
    together with its engine. `/v1/report` has the statistics of all requests."""

    def of(self, engine: Engine) -> ModelStatisticsDocument:
        """Returns the statistics of a model version. The counts of cache hits and misses and of batches stay empty,
        because Wane has no response cache, and no batch belongs to one request."""
        if engine not in self:
            phases = InferStatisticsDocument(*[TimedDocument(0, 0) for _ in InferStatisticsDocument.__struct_fields__])
            self[engine] = ModelStatisticsDocument(engine.name, engine.version, 0, 0, 0, phases, [])
        return self[engine]


# Health


@router.on_get("/health/live", Liveness)
async def live() -> Response:
    """Answers 200 while the process is alive."""
    return encode.reply(Liveness(live=True))


@router.on_get("/health/ready", ServerReadyDocument)
async def server_ready(request: Request) -> Response:
    """Answers 200 if every model has loaded or failed to load, the process is not draining, and the session store is
    reachable. Answers 503 otherwise, like /readyz."""
    models = registry(request)
    if not models.ready:
        raise Unavailable(f"the server is {models.status}")
    if models.store is None or not models.store.reachable:
        raise Unavailable("the session store cannot be reached")
    return encode.reply(ServerReadyDocument(True))


@router.on_get("/models/{name}/versions/{version}/ready", ReadyModel, openapi_extra=OF_VERSION)
@router.on_get("/models/{name}/ready", ReadyModel)
async def ready(request: Request, name: str) -> Response:
    """Answers 200 if a model is ready. Answers 503 while the model loads or the server stops, and 404 with the reason
    if the model is not served."""
    models = registry(request)
    engine = _of_version(request, models.get(name))
    if engine not in models.served:
        raise Unavailable("the server is stopping")
    return encode.reply(ReadyModel(engine.name, ready=True))


# Metadata


@router.on_get("", ServerDocument)
async def server(request: Request) -> Response:
    """Returns the server's name, the server's version, and the protocol extensions that the server supports."""
    return encode.reply(ServerDocument("wane", request.app.version, signature.EXTENSIONS))


@router.on_get("/models/stats", StatisticsDocument)
async def all_statistics(request: Request) -> Response:
    """Returns the statistics of the inference requests for every model."""
    return encode.reply(StatisticsDocument([*map(_counter(request).of, registry(request).list())]))


@router.on_get("/models/{name}/versions/{version}/stats", StatisticsDocument, openapi_extra=OF_VERSION)
@router.on_get("/models/{name}/stats", StatisticsDocument)
async def statistics(request: Request, name: str) -> Response:
    """Returns the statistics of a model's inference requests since the model was loaded."""
    return encode.reply(StatisticsDocument([_counter(request).of(await _served(request, name))]))


@router.on_get("/models/{name}/versions/{version}/config", ModelConfigDocument, openapi_extra=OF_VERSION)
@router.on_get("/models/{name}/config", ModelConfigDocument)
async def config(request: Request, name: str) -> Response:
    """Returns a model's configuration, in Triton's format."""
    return encode.reply(signature.configuration(await _served(request, name), settings(request)))


@router.on_get("/models/{name}/versions/{version}", ModelMetadataDocument, openapi_extra=OF_VERSION)
@router.on_get("/models/{name}", ModelMetadataDocument)
async def metadata(request: Request, name: str) -> Response:
    """Returns a model's name, version, inputs and outputs."""
    return encode.reply(signature.metadata(await _served(request, name), settings(request)))


async def _served(request: Request, name: str) -> Engine:
    """Returns the engine of a model, like `model_engine`. Raises UnknownModel if the path has another version than the
    served one."""
    return _of_version(request, await model_engine(request, name))


def _of_version(request: Request, engine: Engine) -> Engine:
    version = request.path_params.get("version", engine.version)
    if version != engine.version:
        raise UnknownModel(
            f"model {engine.name} has version {engine.version}; version {truncate_repr(version)} is not served"
        )
    return engine


def _counter(request: Request) -> InferenceCounter:
    counter: InferenceCounter = request.app.state.inference_counter
    return counter


# Inference


@router.post("/models/{name}/versions/{version}/infer", response_model=None, openapi_extra=INFER, responses=ANSWERS)
async def version_infer(request: Request, name: str, version: Version) -> Response:  # noqa: ARG001
    """Answers like `/v2/models/{name}/infer`, if this version is served."""
    return await infer(request, name)


@router.post("/models/{name}/infer", response_model=None, openapi_extra=INFER, responses=ANSWERS)
async def infer(request: Request, name: str) -> Response:
    """Predicts the next token after each sequence, scores the given tokens, or both. The requested outputs determine
    which of these is computed. With a `sequence_id`, appends the tokens to that sequence."""
    engine = await _served(request, name)
    started_s = time.perf_counter()
    counted = _counter(request).of(engine)
    phases = counted.inference_stats
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
        phases.fail.add(time.perf_counter() - started_s)
        raise
    ended_s, latency = time.perf_counter(), results.latency
    counted.last_inference = time.time_ns() // 10**6
    counted.inference_count += len(results.rows)
    counted.execution_count += 1
    phases.success.add(ended_s - started_s)
    phases.queue.add(latency.queue_ms / 1e3)
    phases.compute_input.add(results.ready_s - started_s)
    phases.compute_infer.add(latency.compute_ms / 1e3)
    phases.compute_output.add(ended_s - encoding_s)
    return answer


OF_ANSWER: Mapping[str, Callable[[Answer, int], Any]] = {
    TOP_IDS: lambda answer, k: [prediction.token_id for prediction in answer.predictions[:k]],
    TOP_LOGPROBS: lambda answer, k: [prediction.logprob for prediction in answer.predictions[:k]],
    LOGITS: lambda answer, _: answer.logits,
    ERROR_BOUND: lambda answer, _: answer.error_bound,
    TOP1_PROVED: lambda answer, _: answer.top1_proved,
}
"""Returns a predicted output of one row, from its answer and K."""


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
        return max(latencies, key=lambda latency: latency.total_ms, default=Latency(0.0, 0.0, 0.0))

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
        specs = signature.outputs(self.engine, limits)
        k = specs[TOP_IDS].shape[1]
        outputs: dict[str, Rows] = {}
        for name in names & OF_ANSWER.keys():
            values = [OF_ANSWER[name](answer, k) for answer in answers]
            # the logits are large, and are not copied into one array; an error bound of None becomes NaN
            outputs[name] = values if name == LOGITS else np.array(values, tensors.DTYPES[specs[name].datatype])
        if POSITION in names:
            positions = [answer.position for answer in answers] or [None] * len(self.rows)
            counts = [len(row.tokens) for row in self.rows]
            outputs[POSITION] = np.array(
                [count if position is None else position for position, count in zip(positions, counts, strict=True)],
                np.int64,
            )
        if TOKEN_LOGPROBS in names:
            widths = [len(row.tokens) + len(row.skipped) for row in self.rows]
            scored = outputs[TOKEN_LOGPROBS] = np.full((len(self.rows), max(widths)), np.nan, np.float32)
            for index, (row, width) in enumerate(zip(self.rows, widths, strict=True)):
                if self.scores:
                    scored[index, :width] = self.scores[index].logprobs  # None becomes NaN
                else:
                    places = np.delete(np.arange(width), np.array(row.skipped, np.intp))
                    scored[index, places] = answers[index].token_logprobs or ()
                if index % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
                    await asyncio.sleep(0)
        return outputs


async def _answered(request: Request, engine: Engine, asked: InferCall) -> InferResults:
    """Runs the predictions and scores that the requested outputs need."""
    parameters = asked.body.parameters
    sequence = sequence_id(parameters)
    if sequence is not None:
        return await _step(request, engine, asked, sequence)
    _refuse(
        parameters,
        ("expected_position", "sequence_start", "sequence_end", "fork_of", "continuations"),
        "without a sequence_id",
    )
    if not asked.is_predicted:
        for name in ("mode", "window", "tolerance"):
            if getattr(parameters, name) is not None:
                raise InvalidRequest(f"{name} is given, but no requested output is a prediction", name)
    limits, truncated, whose = settings(request), bool(parameters.truncated), owner(request).name
    rows = await rows_of(engine, asked, limits, limits.max_batch_inputs)
    longest = max(len(row.tokens) + len(row.skipped) for row in rows)
    widths = {LOGITS: engine.vocabulary.size, TOKEN_LOGPROBS: longest}
    of_outputs(len(rows), [(widths[name], is_binary) for name, is_binary in asked.wanted if name in widths]).check(
        limits
    )
    results = InferResults(engine, rows, time.perf_counter())
    if asked.is_predicted:
        make = partial(
            PredictRequest,
            mode=Mode.AUTO if parameters.mode is None else parameters.mode,
            window=parameters.window,
            tolerance=parameters.tolerance,
            truncated=truncated,
            owner=whose,
            **_listing(engine, asked, limits),
        )
        results.answers = await _predicted(engine, [make(tokens=row.tokens, unknown_names=row.unknown) for row in rows])
        note_answer(request.scope, results.answers[0])
    if asked.is_scored:
        make_score = partial(ScoreRequest, deadline=asked.deadline, truncated=truncated, owner=whose)
        with until_hangup(request):
            results.scores = [
                await engine.score(make_score(row.tokens, unknown_names=row.unknown, skipped=row.skipped))
                for row in rows
            ]
    return results


def _listing(engine: Engine, asked: InferCall, limits: Settings) -> dict[str, Any]:
    """Returns the fields of the engine's request that say what an answer has. An answer lists one token if no requested
    output lists tokens."""
    return {
        "top_k": signature.listed(engine, limits) if asked.names & {TOP_IDS, TOP_LOGPROBS} else 1,
        "deadline": asked.deadline,
        "logits": LOGITS in asked.names,
        "filter": Filter(include_unknown=bool(asked.body.parameters.include_unknown)),
    }


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


def _refuse(parameters: InferParameters, names: Sequence[str], why: str) -> None:
    """Raises InvalidRequest if one of these parameters is in the request, and is not false."""
    for name in names:
        value = getattr(parameters, name)
        if value is not None and value is not False:
            raise InvalidRequest(f"{name} is given {why}", name)


async def _step(request: Request, engine: Engine, asked: InferCall, sequence: str) -> InferResults:
    """Appends tokens to a sequence. With `sequence_start`, starts the sequence first. With `sequence_end`, deletes the
    sequence after the answer. With `continuations`, scores and predicts each row as a continuation of the sequence
    instead."""
    parameters = asked.body.parameters
    _refuse(
        parameters,
        ("window", "tolerance", "truncated"),
        "with a sequence_id, but is only for requests without a sequence_id",
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
    key, limits, begin = sequence_key(request, engine, sequence), settings(request), None
    if source is not None:
        engine, begin = await fork_of(request, engine, key, parameters, source)
    elif not start:
        engine = await sequence_engine(request, engine, key, sequence)
    listing = _listing(engine, asked, limits)
    if parameters.continuations:
        changing = ("mode", "expected_position", "sequence_start", "sequence_end")
        _refuse(parameters, changing, "with continuations, which do not change the sequence")
    rows = await rows_of(engine, asked, limits, limits.max_batch_inputs if parameters.continuations else 1)
    results = InferResults(engine, rows, time.perf_counter())
    if parameters.continuations:
        tokens, unknown = tuple(row.tokens for row in rows), tuple(row.unknown for row in rows)
        with until_hangup(request):
            results.answers = (
                await engine.continuations(ContinuationsRequest(key, tokens, unknown, **listing))
            ).results
        note_answer(request.scope, results.answers[0])
        return results
    wanted = StepRequest(
        key,
        rows[0].tokens,
        parameters.mode,
        parameters.expected_position,
        token_logprobs=asked.is_scored,
        unknown_names=rows[0].unknown,
        **listing,
    )
    if start:
        with until_hangup(request):
            await start_sequence(request, engine, key, begin)
        results.ready_s = time.perf_counter()
    try:
        results.answers = [await engine.submit(wanted)]
    except UnknownSession as error:
        raise no_sequence(sequence) from error
    if parameters.sequence_end:
        with until_hangup(request):
            await delete_sequence(engine, key, asked.deadline)
    note_answer(request.scope, results.answers[0])
    return results
