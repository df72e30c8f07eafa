"""Inference in the Open Inference Protocol.

The requested outputs determine what an inference computes: a prediction after each sequence of a batch, the
log-probabilities of the given tokens, or both. An inference with a `sequence_id` is a step of the session `MODEL:ID`.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import Path
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import openapi, tensors
from wane.service.api.body import LARGE_BYTES, Decoder, read
from wane.service.api.deps import deadline, header, owner, settings
from wane.service.api.disconnect import WHOLE_BODY, until_hangup
from wane.service.api.exchange import admit, context, note_answer
from wane.service.api.openapi import Router, json_body, parameters_in
from wane.service.api.routes.inference import FAILURE, counter, served_engine
from wane.service.api.schemas.inference import InferBody, InferenceDocument, InferParameters
from wane.service.api.sequences import (
    delete_sequence,
    fork_of,
    no_sequence,
    sequence_engine,
    sequence_id,
    sequence_key,
    start_sequence,
)
from wane.service.api.tensors import (
    DEFAULT_OUTPUTS,
    ERROR_BOUND,
    EVENTS,
    HEADER_LENGTH,
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
    OutputFormat,
    Rows,
    Tensor,
)
from wane.service.deadline import TOO_LATE
from wane.service.engine.engine import Engine
from wane.service.engine.event_names import EventTokens
from wane.service.errors import DeadlineExceeded, InvalidRequest, UnknownSession, truncate_repr
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.body import anchored, as_array
from wane.service.types.common import Mode
from wane.service.types.cost import Cost
from wane.service.types.request import ContinuationsRequest, Filter, Latency, PredictRequest, ScoreRequest, StepRequest
from wane.service.types.text import Score

Version = Annotated[str, Path(examples=["2"], description="the served version")]

INFER_BODY = json_body(InferBody)
INFER_BODY["requestBody"]["content"]["application/octet-stream"] = {
    "schema": {"type": "string", "format": "binary"},
}
LENGTH = "the length in bytes of the JSON header, which precedes the binary tensors"
LENGTH_HEADER = parameters_in("header", {HEADER_LENGTH: (LENGTH, {"pattern": anchored("0*[1-9][0-9]{0,14}")})})
INFER: dict[str, Any] = INFER_BODY | {"parameters": LENGTH_HEADER}
ANSWERS = openapi.answers(InferenceDocument, description="the outputs, as JSON or with binary tensors after the JSON")
ANSWERS[200]["content"]["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}

router = Router(prefix="/v2", tags=["inference"], responses=FAILURE)

ROWS_AT_ONCE = 32
"""The number of rows that are converted in one iteration of the event loop."""


@router.post("/models/{name}/versions/{version}/infer", response_model=None, openapi_extra=INFER, responses=ANSWERS)
async def version_infer(request: Request, name: str, version: Version) -> Response:  # noqa: ARG001
    """Answers like `/v2/models/{name}/infer`, if this version is served."""
    return await infer(request, name)


@router.post("/models/{name}/infer", response_model=None, openapi_extra=INFER, responses=ANSWERS)
async def infer(request: Request, name: str) -> Response:
    """Predicts the next token after each sequence, scores the given tokens, or both. The requested outputs determine
    which of these is computed. With a `sequence_id`, appends the tokens to that sequence."""
    engine = await served_engine(request, name)
    started_s = time.perf_counter()
    counted = counter(request).of(engine)
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
        specs = tensors.outputs(self.engine, limits)
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
    wide = [(widths[name], is_binary) for name, is_binary in asked.wanted if name in widths]
    tensors.of_outputs(len(rows), wide).check(limits)
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
        "top_k": tensors.listed(engine, limits) if asked.names & {TOP_IDS, TOP_LOGPROBS} else 1,
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


@dataclass(frozen=True, slots=True)
class InferCall:
    """A decoded request. `body` is its JSON without the inputs. `inputs` has its input tensors by name. `wanted` are
    the formats of the requested outputs, and `names` their names. `deadline` is in seconds on the event loop's clock.
    """

    body: InferBody
    inputs: dict[str, Tensor]
    wanted: tuple[OutputFormat, ...]
    names: frozenset[str]
    deadline: float | None

    @property
    def is_predicted(self) -> bool:
        """Whether a requested output needs a prediction."""
        return bool(self.names & PREDICTED)

    @property
    def is_scored(self) -> bool:
        """Whether the request asks for the log-probabilities of the tokens that it gives."""
        return TOKEN_LOGPROBS in self.names


async def decoded_call(request: Request) -> InferCall:
    """Decodes the body and its tensors. Raises InvalidRequest, NotJson, TooLarge, UnsupportedMedia, BodyTimeout,
    DeadlineExceeded, Abandoned."""
    started_s = time.perf_counter()
    raw: bytes | None = request.scope.get(WHOLE_BODY)
    if raw is None:
        raw = await read(request)
    decoder: Decoder = request.app.state.decoder
    until = deadline(request)
    head, binary = tensors.divided(raw, header(request, HEADER_LENGTH))
    body = await decoder.decode(head, InferBody, until)
    admit(request, body.cost(settings(request)))
    if len(raw) <= LARGE_BYTES:
        inputs = tensors.read_tensors(body.inputs, binary)
    else:
        inputs = await decoder.run(tensors.read_tensors, body.inputs, binary, deadline=until)
    parameters = body.parameters
    wanted: list[OutputFormat] = []
    is_binary = bool(parameters.binary_data_output)
    for output in body.outputs or ():
        if output.name not in OUTPUTS:
            there = ", ".join(sorted(OUTPUTS))
            raise InvalidRequest(f"there is no output {truncate_repr(output.name)}; there are {there}", "outputs")
        if any(earlier.name == output.name for earlier in wanted):
            raise InvalidRequest(f"output {output.name} is requested twice", output.name)
        wanted.append(tensors.output_format(output.name, output.parameters, binary=is_binary))
    if not wanted:
        wanted = [OutputFormat(name, is_binary) for name in DEFAULT_OUTPUTS]
    request_context = context(request.scope)
    if parameters.timeout is not None and parameters.timeout < 0:
        raise InvalidRequest(f"timeout is {parameters.timeout}, but must be at least 0 microseconds", "timeout")
    if parameters.timeout and until is not None:
        until = min(until, until - request_context.timeout_s + parameters.timeout / 1e6)
        # The event loop's clock is coarser than a microsecond, so a finer clock measures the elapsed time.
        if parameters.timeout / 1e6 <= time.perf_counter() - started_s:
            raise DeadlineExceeded(TOO_LATE)
    if parameters.priority is not None and parameters.priority < 0:
        raise InvalidRequest(f"priority is {parameters.priority}, but must be at least 0", "priority")
    body = replace(body, inputs=[])  # the garbage collector would visit each of its values while the request runs
    return InferCall(body, inputs, tuple(wanted), frozenset(output.name for output in wanted), until)


async def rows_of(engine: Engine, asked: InferCall, limits: Settings, most_rows: int) -> list[EventTokens]:
    """Returns the tokens of each row of the input tensor. Raises InvalidRequest with the tensor's name, TooLarge,
    DeadlineExceeded."""
    inputs = asked.inputs
    sources = [name for name in SOURCES if name in inputs]
    if len(sources) != 1:
        present = " and ".join(sources) or "none of them"
        raise InvalidRequest(f"give exactly one of the inputs {', '.join(SOURCES)}; found {present}", "inputs")
    name = sources[0]
    shape, values = inputs[name]
    if shape[0] > most_rows:
        raise InvalidRequest(f"{name} is a batch of {shape[0]} rows, but a batch has at most {most_rows}", name)
    document, unknown = not asked.is_predicted, asked.body.parameters.unknown
    lengths = _lengths(inputs, name)
    rows: list[EventTokens] = []
    total = 0
    for index in range(shape[0]):
        where = f"{name}[{index}]"
        if not isinstance(values, list):
            row = EventTokens(array("q", values[index, : None if lengths is None else lengths[index]].tobytes()))
            engine.limits.tokens(row.tokens, where, document=document)
        elif name == EVENTS:
            start = index * shape[1]
            names = values[start : start + (shape[1] if lengths is None else lengths[index])]
            engine.events.check_events(EVENTS)
            engine.limits.length(len(names), document=document)
            try:
                row = await engine.events.read(names, unknown, where)
            except InvalidRequest as error:
                raise InvalidRequest(error.message, EVENTS) from error
        else:
            try:
                row = EventTokens(as_array(await engine.encode(values[index], asked.deadline, document=document)))
            except InvalidRequest as error:
                raise InvalidRequest(f"{where}: {error.message}", name) from error
            if not row.tokens:
                raise InvalidRequest(f"{where} is empty: there is no token in the text", name)
        rows.append(row)
        if index % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
            await asyncio.sleep(0)
        total += len(row.tokens)
        Cost(tokens=total).check(limits)
    return rows


def _lengths(inputs: dict[str, Tensor], name: str) -> list[int] | None:
    """Returns the number of values in each row without its padding. Returns None if no row is padded."""
    if LENGTHS not in inputs:
        return None
    if name == TEXT:
        raise InvalidRequest(f"{LENGTHS} is given with {TEXT}, which has no padding", LENGTHS)
    (rows, longest), (count,) = inputs[name].shape, inputs[LENGTHS].shape
    if count != rows:
        raise InvalidRequest(f"{LENGTHS} has {count} values, but {name} has {rows} rows", LENGTHS)
    values = inputs[LENGTHS].values
    assert not isinstance(values, list), "the values of lengths are texts, not INT64: this is a bug"
    lengths: list[int] = values.tolist()
    for index, length in enumerate(lengths):
        if not 1 <= length <= longest:
            raise InvalidRequest(f"{LENGTHS}[{index}] is {length}, but must be from 1 to {longest}", LENGTHS)
    return lengths
