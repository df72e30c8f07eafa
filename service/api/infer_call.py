"""An inference request of the Open Inference Protocol: decodes its body, and converts its input tensors to rows of
token ids."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass

from msgspec.structs import replace
from starlette.requests import Request

from wane.service.api import tensors
from wane.service.api.body import LARGE_BYTES, Decoder, read
from wane.service.api.cost import Cost, admit_body
from wane.service.api.deps import deadline, header
from wane.service.api.disconnect import WHOLE_BODY
from wane.service.api.exchange import context
from wane.service.api.schemas.inference import InferBody
from wane.service.api.signature import (
    DEFAULT_OUTPUTS,
    EVENTS,
    INPUTS,
    LENGTHS,
    OUTPUTS,
    PREDICTED,
    SOURCES,
    TEXT,
    TOKEN_LOGPROBS,
)
from wane.service.api.tensors import HEADER_LENGTH, OutputFormat, Tensor
from wane.service.deadline import TOO_LATE
from wane.service.engine.engine import Engine
from wane.service.engine.event_names import EventTokens, as_array
from wane.service.errors import DeadlineExceeded, InvalidRequest, truncate_repr
from wane.service.settings import Settings

ROWS_AT_ONCE = 32
"""The number of rows that are converted in one iteration of the event loop."""


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
    admit_body(request, body)
    if len(raw) <= LARGE_BYTES:
        inputs = tensors.read_tensors(body.inputs, binary, INPUTS)
    else:
        inputs = await decoder.run(tensors.read_tensors, body.inputs, binary, INPUTS, deadline=until)
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


# Inputs


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
            engine.check_tokens(row.tokens, where, document=document)
        elif name == EVENTS:
            start = index * shape[1]
            names = values[start : start + (shape[1] if lengths is None else lengths[index])]
            engine.events.check_events(EVENTS)
            engine.check_event_count(len(names), document=document)
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
