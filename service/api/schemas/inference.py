"""The JSON documents of inference in the Open Inference Protocol: requests, answers, metadata and statistics."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

from msgspec import field

from wane.service.settings import Settings
from wane.service.types.body import (
    Body,
    IncludeUnknown,
    Natural,
    Tolerance,
    UnknownEvents,
    Window,
    keywords,
)
from wane.service.types.common import Mode, says
from wane.service.types.cost import Cost

LARGEST_ID = 2**64 - 1
BINARY_DATA = {"type": ["boolean", "null"], "description": "overrides the request's `binary_data_output`"}
CONTENT_TYPE = {"type": ["string", "null"], "description": "ignored"}
SHAPE = keywords(minItems=1, maxItems=2, items={"type": "integer", "minimum": 1})
DATA = keywords(minItems=1)
SequenceId = Annotated[int, keywords(minimum=0, maximum=LARGEST_ID)] | Annotated[str, keywords(maxLength=126)]
Value = bool | float | str | None


class InputTensor(Body, kw_only=True):
    """An input tensor. If `parameters` has `binary_data_size`, the values are in the binary part of the body. Otherwise
    the values are in `data`."""

    name: Annotated[str, says("the input's name", enum=["tokens", "text", "events", "lengths"])]
    shape: Annotated[list[Any], SHAPE, says("the size of each dimension")]
    datatype: Annotated[str, says("the type of the values", enum=["INT64", "BYTES"])]
    parameters: Annotated[
        dict[str, Any],
        says(
            "where the values are",
            properties={
                "binary_data_size": {
                    "type": ["integer", "null"],
                    "minimum": 0,
                    "description": "the size of the values in the binary part of the body, in bytes",
                },
                "content_type": CONTENT_TYPE,
            },
            additionalProperties=False,
        ),
    ] = field(default_factory=dict)
    data: Annotated[list[Any], DATA] | None = None
    """the values in row-major order, flat or nested like the shape"""


class OutputTensor(Body, kw_only=True):
    """A requested output tensor."""

    name: Annotated[str, says("the output's name")]
    parameters: Annotated[
        dict[str, Any],
        says(
            "how the values are sent",
            properties={"binary_data": BINARY_DATA, "content_type": CONTENT_TYPE},
            additionalProperties=False,
        ),
    ] = field(default_factory=dict)


class InferParameters(Body, kw_only=True):
    """The parameters of an inference. `PredictBody` describes the parameters that /v1/predict has, too."""

    mode: Mode | None = None
    """the mode, as in /v1/predict; default: auto, or the mode of the sequence's session"""
    window: Window | None = None
    tolerance: Tolerance | None = None
    truncated: Annotated[bool | None, says("true: the tokens are the end of a longer sequence")] = None
    expected_position: Natural | None = None
    """the sequence's position before the request; a repeated request gets the same answer"""
    unknown: UnknownEvents | None = None
    include_unknown: IncludeUnknown | None = None
    priority: Annotated[Natural | None, says("must be valid, but has no effect: all requests wait in one queue")] = None
    timeout: Natural | None = None
    """timeout of the request in microseconds; 0: only the server's timeout applies"""
    sequence_id: SequenceId | None = None
    """id of the sequence, which is the session `MODEL:ID`; 0 and '' mean no sequence"""
    sequence_start: bool | None = None
    """true: start the sequence at position 0, and drop an existing sequence with this id"""
    sequence_end: Annotated[bool | None, says("true: delete the sequence after the answer")] = None
    fork_of: SequenceId | None = None
    """with `sequence_start`: the id of the sequence whose tokens the new sequence starts from, up to
    `expected_position`, by default all"""
    continuations: bool | None = None
    """true: each row is a continuation of the sequence, which does not change; see /v1/sessions"""
    content_type: Annotated[str | None, says("ignored")] = None
    binary_data_output: bool | None = None
    """true: the values of all outputs are binary, unless an output has its own `binary_data`"""


class InferBody(Body, kw_only=True):
    """Predict the next token after each sequence of a batch, or score the given tokens."""

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["The game was released on"]}]},
        {
            "id": "7",
            "inputs": [{"name": "tokens", "shape": [2, 3], "datatype": "INT64", "data": [[5, 6, 7], [8, 9, 10]]}],
            "outputs": [{"name": "top_ids"}, {"name": "token_logprobs"}],
            "parameters": {"mode": "recurrent"},
        },
        {
            "inputs": [{"name": "tokens", "shape": [1, 1], "datatype": "INT64", "data": [5]}],
            "parameters": {"sequence_id": 7, "sequence_start": True, "sequence_end": True},
        },
    )

    id: Annotated[str | None, says("the request's id, which the answer repeats")] = None
    parameters: Annotated[InferParameters, says("options of the inference", default={})] = field(
        default_factory=InferParameters
    )
    inputs: list[InputTensor]
    """exactly one of tokens, text and events; also lengths, if rows have different lengths"""
    outputs: Annotated[list[OutputTensor] | None, says("default: top_ids, top_logprobs, error_bound, position")] = None

    def cost(self, settings: Settings) -> Cost:  # noqa: ARG002
        rows = [tensor.shape[0] for tensor in self.inputs if tensor.shape and type(tensor.shape[0]) is int]
        field = next((tensor.name for tensor in self.inputs), "inputs")
        return Cost(max(rows, default=1), rows_field=field)


class OutputTensorDocument(TypedDict):
    """An output tensor."""

    name: Annotated[str, says("the output's name")]
    datatype: Annotated[Literal["INT64", "FP32", "BOOL"], says("the type of the values")]
    shape: Annotated[list[int], says("the size of each dimension")]
    parameters: NotRequired[
        Annotated[
            dict[Literal["binary_data_size"], int],
            says("only for values in the binary part of the answer: `binary_data_size` is their size in bytes"),
        ]
    ]
    data: NotRequired[
        Annotated[
            list[Value], says("the values in row-major order; absent if they are in the binary part of the answer")
        ]
    ]


class InferenceDocument(TypedDict):
    """The answer to an inference."""

    model_name: Annotated[str, says("the model's name")]
    model_version: Annotated[str, says("the version of the model's bundle")]
    id: NotRequired[Annotated[str, says("only if the request has an id: the same id")]]
    parameters: NotRequired[
        Annotated[
            dict[str, str],
            says(
                "only if the vocabulary lacks some of the request's events: `unknown` has their names, as the text of "
                "a JSON list"
            ),
        ]
    ]
    outputs: Annotated[list[OutputTensorDocument], says("the requested outputs, in the order of the request")]
