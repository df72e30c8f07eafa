"""The models and the server in the Open Inference Protocol: health, metadata, configuration, statistics, and the model
repository, which lists, loads and unloads models. `infer.py` serves inference.

A load can replace a model's version while the model has live sessions. See `service/registry/registry.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal
from weakref import WeakKeyDictionary

from msgspec import field
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.body import decode
from wane.service.api.deps import deadline, model_engine, note_model, settings
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import registry
from wane.service.api.openapi import Router, answers, parameters_in
from wane.service.api.routes.ops import Liveness
from wane.service.api.tensors import INPUTS, outputs
from wane.service.engine.engine import Engine
from wane.service.errors import Unavailable, UnknownModel, truncate_repr
from wane.service.registry.registry import IndexEntry
from wane.service.settings import Settings
from wane.service.types.body import Body
from wane.service.types.common import Condition, Result, says

OF_VERSION = {"parameters": parameters_in("path", {"version": ("the served version", {"examples": ["2"]})})}

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

TYPES = {"BYTES": "TYPE_STRING", "INT64": "TYPE_INT64", "FP32": "TYPE_FP32", "BOOL": "TYPE_BOOL"}
"""The datatypes in Triton's notation."""


class ServerDocument(Result):
    """The server."""

    name: Annotated[str, says("the server's name")]
    version: Annotated[str, says("the server's version")]
    extensions: Annotated[tuple[str, ...], says("the protocol extensions that the server supports")]


class ServerReadyDocument(Result):
    """The answer to a readiness probe while the server is ready."""

    ready: Annotated[bool, says("true; `/readyz` describes when the server is ready")]


class TensorDocument(Result):
    """An input or output tensor of a model."""

    name: Annotated[str, says("the tensor's name")]
    datatype: Annotated[str, says("the type of the values")]
    shape: Annotated[tuple[int, ...], says("the size of each dimension; -1: any size")]


class ModelMetadataDocument(Result):
    """A model's name, version, inputs and outputs. Models differ only in the sizes of their outputs."""

    name: Annotated[str, says("the model's name")]
    versions: Annotated[list[str], says("the versions that are served")]
    platform: Annotated[str, says("the software that runs the model")]
    inputs: Annotated[list[TensorDocument], says("the inputs that a request may have")]
    outputs: Annotated[list[TensorDocument], says("the outputs that a request may ask for")]


class ConfiguredOutputDocument(Result):
    """An output in a model's configuration."""

    name: Annotated[str, says("the tensor's name")]
    data_type: Annotated[str, says("the type of the values, in Triton's notation")]
    dims: Annotated[tuple[int, ...], says("the size of each dimension; -1: any size")]


class ConfiguredInputDocument(ConfiguredOutputDocument):
    """An input in a model's configuration."""

    optional: Annotated[bool, says("true: a request need not have the input")]


class InstanceGroupDocument(Result):
    """The kind of device that the model runs on, and the number of model instances."""

    name: Annotated[str, says("the model's name")]
    kind: Annotated[str, says("KIND_CPU or KIND_GPU")]
    count: Annotated[int, says("the number of instances of the model")]


class ControlDocument(Result):
    """A control signal of sequences, and its values for false and true."""

    kind: Annotated[str, says("the control signal")]
    fp32_false_true: Annotated[list[float] | None, says("the values for false and true")] = None
    data_type: Annotated[str | None, says("the type of the value, if it is neither true nor false")] = None


class ControlInputDocument(Result):
    """The parameter of a request that carries a control signal of sequences."""

    name: Annotated[str, says("the parameter of a request")]
    control: Annotated[list[ControlDocument], says("the control signals that the parameter carries")]


class SequenceBatchingDocument(Result):
    """The sequences of a model."""

    max_sequence_idle_microseconds: Annotated[int, says("how long an idle sequence is kept, in microseconds")]
    control_input: Annotated[list[ControlInputDocument], says("the control signals of sequences")]


class ModelConfigDocument(Result):
    """Triton's model configuration."""

    name: Annotated[str, says("the model's name")]
    platform: Annotated[str, says("the software that runs the model")]
    backend: Annotated[str, says("the software that runs the model")]
    version_policy: dict[Literal["specific"], dict[Literal["versions"], list[int]]]
    """the versions that are served"""
    max_batch_size: Annotated[int, says("0, because `dims` includes the batch dimension")]
    input: Annotated[list[ConfiguredInputDocument], says("the inputs that a request may have")]
    output: Annotated[list[ConfiguredOutputDocument], says("the outputs that a request may ask for")]
    instance_group: Annotated[list[InstanceGroupDocument], says("the device that the model runs on")]
    sequence_batching: Annotated[SequenceBatchingDocument, says("the sequences of the model")]
    parameters: dict[str, dict[Literal["string_value"], str]]
    """facts of the model and its server, each as a text"""


class TimedDocument(Result):
    """The number and the duration of requests."""

    count: Annotated[int, says("the number of requests")]
    ns: Annotated[int, says("the sum of their durations, in nanoseconds")]

    def add(self, seconds: float) -> None:
        """Counts one request with this duration."""
        self.count += 1
        self.ns += round(1e9 * seconds)


class InferStatisticsDocument(Result):
    """The number and the duration of requests by outcome, and of the successful requests by phase."""

    success: Annotated[TimedDocument, says("the answered requests")]
    fail: Annotated[TimedDocument, says("the failed requests")]
    queue: Annotated[TimedDocument, says("the time in the queue")]
    compute_input: Annotated[TimedDocument, says("the time of decoding the input")]
    compute_infer: Annotated[TimedDocument, says("the time of the runs")]
    compute_output: Annotated[TimedDocument, says("the time of encoding the output")]
    cache_hit: Annotated[TimedDocument, says("0: the server has no response cache")]
    cache_miss: Annotated[TimedDocument, says("0: the server has no response cache")]


class ModelStatisticsDocument(Result):
    """Statistics of the requests to `infer` since the model version was loaded."""

    name: Annotated[str, says("the model's name")]
    version: Annotated[str, says("the version of the model's bundle")]
    last_inference: int
    """when the last request was answered, in milliseconds since 1970; 0: there was none"""
    inference_count: Annotated[int, says("the number of sequences")]
    execution_count: Annotated[int, says("the number of requests")]
    inference_stats: Annotated[InferStatisticsDocument, says("the number and the duration of requests")]
    batch_stats: Annotated[list[dict[str, int]], says("empty")]


class StatisticsDocument(Result):
    """The inference statistics of one model or of all models."""

    model_stats: Annotated[list[ModelStatisticsDocument], says("the statistics of each model version")]


class IndexBody(Body, kw_only=True):
    """A request for the list of models. The fields select the listed models. This body is optional, like all bodies of
    the model repository."""

    examples = ({}, {"ready": True})

    ready: Annotated[bool, says("list only the models that accept requests")] = False


class LoadParameters(Body, kw_only=True):
    """The parameters of a request to load a model. There are none, because the bundle describes the model."""


class LoadBody(Body, kw_only=True):
    """A request to load the model in the path."""

    examples = ({},)

    parameters: Annotated[LoadParameters, says("absent or empty")] = field(default_factory=LoadParameters)


class UnloadParameters(Body, kw_only=True):
    """The parameters of a request to unload a model. The protocol's own clients send them."""

    unload_dependents: Annotated[bool, says("ignored: no model depends on another")] = False


class UnloadBody(Body, kw_only=True):
    """A request to unload the model in the path."""

    examples = ({"parameters": {"unload_dependents": False}},)

    parameters: Annotated[UnloadParameters, says("default: none")] = field(default_factory=UnloadParameters)


class LoadedModel(Result):
    """The answer to a request to load a model."""

    name: Annotated[str, says("the model's name")]
    version: Annotated[str, says("the version that is served now")]
    state: Annotated[Condition, says("READY")]


class UnloadedModel(Result):
    """The answer to a request to unload a model."""

    name: Annotated[str, says("the model's name")]
    state: Annotated[Condition, says("UNAVAILABLE")]


class ReadyModel(Result):
    """The answer to a readiness probe for a model that is ready."""

    name: Annotated[str, says("the model's name")]
    ready: Annotated[bool, says("true; a model that is not ready is answered with an error")]


class ProtocolFailure(Result):
    """A failure in the Open Inference Protocol's format."""

    error: Annotated[str, says("what is wrong")]
    code: Annotated[str, says("the same code as in a problem document; it does not change between releases")]
    retryable: Annotated[bool, says("true: the same request may succeed later")]
    request_id: Annotated[str, says("the request's id, which the server's log has, too")]


FAILURE = answers(ProtocolFailure, status="default", description="any failure, in the Open Inference Protocol's format")

router = Router(prefix="/v2", tags=["inference"], responses=FAILURE)
repository = Router(prefix="/v2", tags=["repository"], responses=FAILURE)


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
    return encode.reply(ServerDocument("wane", request.app.version, EXTENSIONS))


@router.on_get("/models/stats", StatisticsDocument)
async def all_statistics(request: Request) -> Response:
    """Returns the statistics of the inference requests for every model."""
    return encode.reply(StatisticsDocument([*map(counter(request).of, registry(request).list())]))


@router.on_get("/models/{name}/versions/{version}/stats", StatisticsDocument, openapi_extra=OF_VERSION)
@router.on_get("/models/{name}/stats", StatisticsDocument)
async def statistics(request: Request, name: str) -> Response:
    """Returns the statistics of a model's inference requests since the model was loaded."""
    return encode.reply(StatisticsDocument([counter(request).of(await served_engine(request, name))]))


@router.on_get("/models/{name}/versions/{version}/config", ModelConfigDocument, openapi_extra=OF_VERSION)
@router.on_get("/models/{name}/config", ModelConfigDocument)
async def config(request: Request, name: str) -> Response:
    """Returns a model's configuration, in Triton's format."""
    return encode.reply(configuration(await served_engine(request, name), settings(request)))


@router.on_get("/models/{name}/versions/{version}", ModelMetadataDocument, openapi_extra=OF_VERSION)
@router.on_get("/models/{name}", ModelMetadataDocument)
async def metadata(request: Request, name: str) -> Response:
    """Returns a model's name, version, inputs and outputs."""
    return encode.reply(metadata_of(await served_engine(request, name), settings(request)))


async def served_engine(request: Request, name: str) -> Engine:
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


def counter(request: Request) -> InferenceCounter:
    counter: InferenceCounter = request.app.state.inference_counter
    return counter


def metadata_of(engine: Engine, settings: Settings) -> ModelMetadataDocument:
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


# Repository


@repository.on_post("/repository/index", IndexBody, required=False, responses=answers(IndexEntry, is_list=True))
async def index(request: Request) -> Response:
    """Lists the models with their versions and states. The list contains served models, models that are being loaded or
    unloaded, and models in the bundles' folder."""
    body = await decode(request, IndexBody, empty=b"{}")
    entries = await registry(request).index()
    return encode.reply([entry for entry in entries if entry.state == "READY" or not body.ready])


@repository.on_post("/repository/models/{name}/unload", UnloadBody, UnloadedModel, required=False)
async def unload(request: Request, name: str) -> Response:
    """Unloads a model. The model's sessions are kept until they expire, and can continue if the model is loaded again
    before then."""
    await decode(request, UnloadBody, empty=b"{}")
    await registry(request).unload_model(name, deadline(request))
    return encode.reply(UnloadedModel(name, "UNAVAILABLE"))


@repository.on_post("/repository/models/{name}/load", LoadBody, LoadedModel, required=False)
async def load(request: Request, name: str) -> Response:
    """Loads the current version of a model's bundle. The new version replaces the served version, if there is one. The
    response is sent after the replacement. If the load fails, the server continues to serve the earlier version, and
    `error` gives the reason."""
    await decode(request, LoadBody, empty=b"{}")
    with until_hangup(request):
        engine = await registry(request).load_model(name, deadline(request))
    note_model(request, engine)
    return encode.reply(LoadedModel(engine.name, engine.version, "READY"))
