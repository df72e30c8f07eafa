"""The documents of the server and of served models, and the bodies of the Open Inference Protocol's model
repository."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import field

from wane.models.manifest import Certificate, Contraction, Quality, Readout, Rounding, Start, Unknown, VocabularyInfo
from wane.service.batching.cost_model import Costs
from wane.service.types.body import Body
from wane.service.types.common import Condition, Result, Served, says


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


class ModelFacts(Result):
    """A model, with OpenAI's fields and the fields of its manifest."""

    id: Annotated[str, says("the model's name")]
    object: Annotated[Literal["model"], says("always model, as in OpenAI's API")]
    created: Annotated[int, says("when the bundle was made, in seconds since 1970")]
    owned_by: Annotated[str, says("always wane")]
    model_version: Annotated[str, says("the version of the model's bundle")]
    device: Annotated[str, says("the device that runs the model, such as cpu")]
    description: Annotated[str, says("what the model was trained for, in the words of its bundle")]
    family: Annotated[str, says("the kind of recurrent network")]
    parameters: Annotated[dict[str, Any], says("the network's sizes and options")]
    k: Annotated[int, says("the number of tokens of a window if the request has no `window`")]
    max_window: Annotated[int, says("the largest `window` of a request, in tokens")]
    k_epsilon: Annotated[
        dict[str, int | None],
        says(
            "for each bound on the total variation between the predictions of window mode and recurrent mode, the "
            "smallest number k of tokens such that all windows of k or more tokens satisfy the bound; null: there is "
            "none"
        ),
    ]
    vocabulary: Annotated[VocabularyInfo, says("the tokenizer that the model was trained with")]
    unknown: Annotated[Unknown, says("what the server does with an event that the vocabulary lacks")]
    start: Annotated[Start, says("what the model reads first: token: the start token <eos>; zero: the first token")]
    quality: Annotated[Quality | None, says("the perplexities that the bundle claims; null: it claims none")]
    attribution: Annotated[str | None, says("the source of the training data; null: the bundle names none")]


class ModelCard(ModelFacts):
    """One model with its whole certificate, and with the durations of its runs that were measured on this server."""

    certificate: Annotated[Certificate, says("the bounds of the error of windows, for all tokens")]
    costs: Costs


class CertificateSummary(Result):
    """The certificate without its lists of error bounds (`state_error` and `error_bound`)."""

    contractive: Annotated[bool, says("true: every layer with fading memory has a contraction factor below 1")]
    certified: Annotated[bool, says("true: the error bound of the largest window is at most 1e-3")]
    reason: Annotated[str | None, says("why the model is not certified")]
    layers: Annotated[tuple[Contraction, ...], says("the contraction of each layer with fading memory")]
    head_diameter: Annotated[float, says("the largest 2-norm distance of two rows of the output matrix, or a bound")]
    rounding: Annotated[Rounding | None, says("the rounding of the graphs, from measured errors of one step")]
    readout: Annotated[Readout | None, says("the rounding of the graphs by a theorem, for some residual networks")]


class ModelSummary(ModelFacts):
    """A model in the list of models."""

    certificate: Annotated[CertificateSummary, says("the model's certificate without its lists of error bounds")]


class ModelList(Result):
    """All served models."""

    object: Annotated[Literal["list"], says("always list, as in OpenAI's API")]
    data: Annotated[tuple[ModelSummary, ...], says("the models; the first is the default model")]


class VocabularyEntry(Result):
    """The name of an event, or the text of a token, and its id."""

    id: Annotated[int, says("the token's id")]
    name: Annotated[str, says("the event's name, or the token's text")]


class VocabularyPage(Result):
    """A page of a vocabulary."""

    events: Annotated[list[VocabularyEntry], says("the names of the page, by ascending id")]
    next: Annotated[int | None, says("the parameter `after` of the next page; null on the last page")]


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


class Liveness(Result):
    """The answer to a liveness probe while the process is alive."""

    live: Annotated[bool, says("true")]


class ModelStanding(Served):
    """A served model."""

    certified: Annotated[bool, says("true: the error bound of the model's largest window is at most 1e-3")]
    reason: Annotated[str | None, says("why the model is not certified")]


class StoreStanding(Result):
    """The session store."""

    kind: Annotated[str, says("memory or redis")]
    reachable: Annotated[bool, says("false: requests to sessions are answered with 503")]


class FailedModel(Result):
    """A model that failed to load."""

    model: Annotated[str, says("the model's name, or the name of the bundle's folder if the name cannot be read")]
    reason: Annotated[str, says("why the model failed to load")]


class Readiness(Result):
    """The readiness of the server."""

    ready: Annotated[
        bool,
        says(
            "true: every model has loaded or failed to load, the server is not draining, and the session store is "
            "reachable"
        ),
    ]
    status: Annotated[str, says("the phase of the server", enum=["loading", "ready", "draining", "store_unavailable"])]
    device: Annotated[str | None, says("the device that runs the models; null until the first model is loaded")]
    models: Annotated[list[ModelStanding], says("the models that are ready")]
    loading: Annotated[list[str], says("the models that are being loaded; requests for them wait")]
    failed: Annotated[list[FailedModel], says("the models that failed to load")]
    store: Annotated[StoreStanding | None, says("the session store; null until it is open")]
