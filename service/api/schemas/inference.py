"""The JSON documents of inference in the Open Inference Protocol: requests, answers, metadata and statistics."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NotRequired

from msgspec import field
from typing_extensions import TypedDict  # pydantic requires this TypedDict before Python 3.12

from wane.service.api.schemas.common import (
    Body,
    IncludeUnknown,
    Natural,
    Tolerance,
    UnknownEvents,
    Window,
    keywords,
)
from wane.service.types.common import Mode, says

LARGEST_ID = 2**64 - 1
CONTENT_TYPE = {"type": ["string", "null"], "description": "ignored"}
SHAPE = keywords(minItems=1, maxItems=2, items={"type": "integer", "minimum": 1})
DATA = keywords(minItems=1)
SequenceId = Annotated[int, keywords(minimum=0, maximum=LARGEST_ID)] | Annotated[str, keywords(maxLength=126)]
Value = bool | float | str | None


class InputTensor(Body, kw_only=True):
    """An input tensor. If `parameters` has `binary_data_size`, the values are in the binary part of the body. Otherwise
    the values are in `data`."""

    name: Annotated[str, keywords(enum=["tokens", "text", "events", "lengths"])]
    shape: Annotated[list[Any], SHAPE]
    datatype: Annotated[str, keywords(enum=["INT64", "BYTES"])]
    parameters: Annotated[
        dict[str, Any],
        keywords(
            properties={
                "binary_data_size": {"type": ["integer", "null"], "minimum": 0},
                "content_type": CONTENT_TYPE,
            },
            additionalProperties=False,
        ),
    ] = field(default_factory=dict)
    data: Annotated[
        Annotated[list[Any], DATA] | None, says("the values in row-major order, flat or nested like the shape")
    ] = None


class OutputTensor(Body, kw_only=True):
    """A requested output tensor. `parameters.binary_data` overrides the request's `binary_data_output`."""

    name: str
    parameters: Annotated[
        dict[str, Any],
        keywords(
            properties={"binary_data": {"type": ["boolean", "null"]}, "content_type": CONTENT_TYPE},
            additionalProperties=False,
        ),
    ] = field(default_factory=dict)


class InferParameters(Body, kw_only=True):
    """The parameters of an inference. `PredictBody` describes the parameters that /v1/predict has, too."""

    mode: Annotated[
        Mode | None, says("the mode, as in /v1/predict; default: auto, or the mode of the sequence's session")
    ] = None
    window: Window | None = None
    tolerance: Tolerance | None = None
    truncated: Annotated[bool | None, says("true: the tokens are the end of a longer sequence")] = None
    expected_position: Annotated[
        Natural | None, says("the sequence's position before the request; a repeated request gets the same answer")
    ] = None
    unknown: UnknownEvents | None = None
    include_unknown: IncludeUnknown | None = None
    priority: Annotated[Natural | None, says("must be valid, but has no effect: all requests wait in one queue")] = None
    timeout: Annotated[
        Natural | None, says("timeout of the request in microseconds; 0: only the server's timeout applies")
    ] = None
    sequence_id: Annotated[
        SequenceId | None, says("id of the sequence, which is the session `MODEL:ID`; 0 and '' mean no sequence")
    ] = None
    sequence_start: Annotated[
        bool | None, says("true: start the sequence at position 0, and drop an existing sequence with this id")
    ] = None
    sequence_end: Annotated[bool | None, says("true: delete the sequence after the answer")] = None
    continuations: Annotated[
        bool | None,
        says("true: each row is a continuation of the sequence, which does not change; see /v1/sessions"),
    ] = None
    content_type: Annotated[str | None, says("ignored")] = None
    binary_data_output: Annotated[
        bool | None, says("true: the values of all outputs are binary, unless an output has its own `binary_data`")
    ] = None


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
    parameters: Annotated[InferParameters, keywords(default={})] = field(default_factory=InferParameters)
    inputs: Annotated[
        list[InputTensor], says("exactly one of tokens, text and events; also lengths, if rows have different lengths")
    ]
    outputs: Annotated[list[OutputTensor] | None, says("default: top_ids, top_logprobs, error_bound, position")] = None


class BinarySizeDocument(TypedDict):
    """The parameters of an output tensor: its size in bytes in the binary part of the answer."""

    binary_data_size: int


class OutputTensorDocument(TypedDict):
    """An output tensor. The values are in `data` in row-major order, or in the binary part of the answer. In the latter
    case, `parameters` has the size of the values."""

    name: str
    datatype: Literal["INT64", "FP32", "BOOL"]
    shape: list[int]
    parameters: NotRequired[BinarySizeDocument]
    data: NotRequired[list[Value]]


class InferenceDocument(TypedDict):
    """The answer to an inference. It has the requested outputs in the order of the request. If the vocabulary lacks
    some of the request's events, the parameter `unknown` has their names, as the text of a JSON list."""

    model_name: str
    model_version: str
    id: NotRequired[str]
    parameters: NotRequired[dict[str, str]]
    outputs: list[OutputTensorDocument]


class ServerDocument(TypedDict):
    """The server's name and version, and the protocol extensions that the server supports."""

    name: str
    version: str
    extensions: list[str]


class ServerLiveDocument(TypedDict):
    """The answer to a liveness probe while the process is alive."""

    live: bool


class ServerReadyDocument(TypedDict):
    """The answer to a readiness probe while the server is ready. `/readyz` describes when the server is ready."""

    ready: bool


class TensorDocument(TypedDict):
    """An input or output tensor of a model. A dimension of -1 has any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadataDocument(TypedDict):
    """A model's name, version, inputs and outputs. Models differ only in the sizes of their outputs."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorDocument]
    outputs: list[TensorDocument]


class ConfiguredInputDocument(TypedDict):
    """An input in a model's configuration."""

    name: str
    data_type: str
    dims: list[int]
    optional: bool


class ConfiguredOutputDocument(TypedDict):
    """An output in a model's configuration."""

    name: str
    data_type: str
    dims: list[int]


class VersionsDocument(TypedDict):
    """The versions that are served."""

    versions: list[int]


class VersionPolicyDocument(TypedDict):
    """The rule that only the listed versions are served."""

    specific: VersionsDocument


class InstanceGroupDocument(TypedDict):
    """The kind of device that the model runs on, and the number of model instances."""

    name: str
    kind: str
    count: int


class ControlDocument(TypedDict):
    """A control signal of sequences, and its values for false and true."""

    kind: str
    fp32_false_true: NotRequired[list[float]]
    data_type: NotRequired[str]


class ControlInputDocument(TypedDict):
    """The parameter of a request that carries a control signal of sequences."""

    name: str
    control: list[ControlDocument]


class SequenceBatchingDocument(TypedDict):
    """The sequences of a model: how long an idle one is kept, in microseconds, and its control signals."""

    max_sequence_idle_microseconds: int
    control_input: list[ControlInputDocument]


class TextDocument(TypedDict):
    """The value of a parameter in a model's configuration."""

    string_value: str


class ModelConfigDocument(TypedDict):
    """Triton's model configuration. `max_batch_size` is 0 because `dims` includes the batch dimension."""

    name: str
    platform: str
    backend: str
    version_policy: VersionPolicyDocument
    max_batch_size: int
    input: list[ConfiguredInputDocument]
    output: list[ConfiguredOutputDocument]
    instance_group: list[InstanceGroupDocument]
    sequence_batching: SequenceBatchingDocument
    parameters: dict[str, TextDocument]


class TimedDocument(TypedDict):
    """The number of requests, and the sum of their durations in nanoseconds."""

    count: int
    ns: int


class InferStatisticsDocument(TypedDict):
    """The number and the duration of requests by outcome, and of the successful requests by phase."""

    success: TimedDocument
    fail: TimedDocument
    queue: TimedDocument
    compute_input: TimedDocument
    compute_infer: TimedDocument
    compute_output: TimedDocument
    cache_hit: TimedDocument
    cache_miss: TimedDocument


class ModelStatisticsDocument(TypedDict):
    """Statistics of the requests to `infer` since the model version was loaded. `last_inference` is when the last
    request was answered, in milliseconds since 1970, or 0 if there was none. `inference_count` is the number of
    sequences, and `execution_count` the number of requests."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatisticsDocument
    batch_stats: list[dict[str, int]]


class StatisticsDocument(TypedDict):
    """The inference statistics of one model or of all models."""

    model_stats: list[ModelStatisticsDocument]
