"""The signature (inputs and outputs) of models in the Open Inference Protocol, and the documents that describe a model.

All models have the same inputs and outputs. Only two sizes differ between models: V is the size of the vocabulary, and
K is the number of tokens in `top_ids` (see `listed`).

    inputs    tokens INT64 [-1, -1] | text BYTES [-1] | events BYTES [-1, -1];  lengths INT64 [-1]
    outputs   top_ids INT64 [-1, K], top_logprobs FP32 [-1, K], logits FP32 [-1, V], token_logprobs FP32 [-1, -1],
              error_bound FP32 [-1], top1_proved BOOL [-1], position INT64 [-1]
"""

from __future__ import annotations

from collections.abc import Mapping

from wane.service.api.schemas.inference import (
    ConfiguredInputDocument,
    ConfiguredOutputDocument,
    ControlDocument,
    ControlInputDocument,
    InstanceGroupDocument,
    ModelConfigDocument,
    ModelMetadataDocument,
    SequenceBatchingDocument,
    TensorDocument,
)
from wane.service.api.tensors import TensorSpec
from wane.service.engine.engine import Engine
from wane.service.settings import Settings

PLATFORM = "wane"

EXTENSIONS = (
    "binary_tensor_data",
    "sequence",
    "sequence(string_id)",
    "model_repository",
    "model_configuration",
    "statistics",
    "parameters",
)

TOKENS, TEXT, EVENTS, LENGTHS = "tokens", "text", "events", "lengths"
INPUTS: Mapping[str, TensorSpec] = {
    TOKENS: TensorSpec("INT64", (-1, -1)),
    TEXT: TensorSpec("BYTES", (-1,)),
    EVENTS: TensorSpec("BYTES", (-1, -1)),
    LENGTHS: TensorSpec("INT64", (-1,)),
}
SOURCES = (TOKENS, TEXT, EVENTS)
"""The names of the input tensors that hold a sequence. A request has exactly one of these inputs."""

TOP_IDS, TOP_LOGPROBS, LOGITS, TOKEN_LOGPROBS = "top_ids", "top_logprobs", "logits", "token_logprobs"
ERROR_BOUND, TOP1_PROVED, POSITION = "error_bound", "top1_proved", "position"
DEFAULT_OUTPUTS = (TOP_IDS, TOP_LOGPROBS, ERROR_BOUND, POSITION)
PREDICTED = frozenset({TOP_IDS, TOP_LOGPROBS, LOGITS, ERROR_BOUND, TOP1_PROVED})
"""The outputs that need a prediction of the next token."""

MOST_LISTED = 16
TYPES = {"BYTES": "TYPE_STRING", "INT64": "TYPE_INT64", "FP32": "TYPE_FP32", "BOOL": "TYPE_BOOL"}


def listed(engine: Engine, settings: Settings) -> int:
    """Returns K, the number of tokens in `top_ids`. K is the smallest of 16, the setting `top_k_limit`, and the size of
    the vocabulary. In a vocabulary of events, `<eos>` and `<unk>` do not count, because they are never listed."""
    vocabulary = engine.vocabulary
    return min(MOST_LISTED, vocabulary.size - len(vocabulary.unlisted), settings.top_k_limit)


def outputs(engine: Engine, settings: Settings) -> dict[str, TensorSpec]:
    """Returns the output tensors of a model, by name."""
    k = listed(engine, settings)
    return {
        TOP_IDS: TensorSpec("INT64", (-1, k)),
        TOP_LOGPROBS: TensorSpec("FP32", (-1, k)),
        LOGITS: TensorSpec("FP32", (-1, engine.vocabulary.size)),
        TOKEN_LOGPROBS: TensorSpec("FP32", (-1, -1)),
        ERROR_BOUND: TensorSpec("FP32", (-1,)),
        TOP1_PROVED: TensorSpec("BOOL", (-1,)),
        POSITION: TensorSpec("INT64", (-1,)),
    }


OUTPUTS = PREDICTED | {TOKEN_LOGPROBS, POSITION}


def metadata(engine: Engine, settings: Settings) -> ModelMetadataDocument:
    """Returns the document with the model's name, version and signature."""
    inputs, results = INPUTS.items(), outputs(engine, settings).items()
    return ModelMetadataDocument(
        name=engine.name,
        versions=[engine.version],
        platform=PLATFORM,
        inputs=[TensorDocument(name, *tensor) for name, tensor in inputs],
        outputs=[TensorDocument(name, *tensor) for name, tensor in results],
    )


def configuration(engine: Engine, settings: Settings) -> ModelConfigDocument:
    """Returns Triton's configuration of the model. Unlike Triton, a request does not need a sequence."""
    inputs, results = INPUTS.items(), outputs(engine, settings).items()
    manifest = engine.manifest
    return ModelConfigDocument(
        name=engine.name,
        platform=PLATFORM,
        backend=PLATFORM,
        version_policy={"specific": {"versions": [int(engine.version)]}},
        max_batch_size=0,
        input=[
            ConfiguredInputDocument(name, TYPES[tensor.datatype], tensor.shape, optional=True)
            for name, tensor in inputs
        ],
        output=[ConfiguredOutputDocument(name, TYPES[tensor.datatype], tensor.shape) for name, tensor in results],
        instance_group=[InstanceGroupDocument(engine.name, "KIND_CPU" if engine.device == "cpu" else "KIND_GPU", 1)],
        sequence_batching=SequenceBatchingDocument(
            max_sequence_idle_microseconds=round(settings.session_ttl_s * 1e6),
            control_input=[
                ControlInputDocument("sequence_start", [ControlDocument("CONTROL_SEQUENCE_START", [0, 1])]),
                ControlInputDocument("sequence_end", [ControlDocument("CONTROL_SEQUENCE_END", [0, 1])]),
                ControlInputDocument("sequence_id", [ControlDocument("CONTROL_SEQUENCE_CORRID", None, "TYPE_UINT64")]),
            ],
        ),
        parameters={
            "family": {"string_value": manifest.architecture.family},
            "vocabulary": {"string_value": manifest.vocabulary.kind},
            "window": {"string_value": str(manifest.window)},
            "certified": {"string_value": str(manifest.certificate.certified).lower()},
            "max_batch_inputs": {"string_value": str(settings.max_batch_inputs)},
        },
    )
