"""The documents of served models, and the bodies of the Open Inference Protocol's model repository."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import field
from pydantic import BaseModel
from typing_extensions import TypedDict  # pydantic requires this TypedDict before Python 3.12

from wane.models.manifest import Certificate, Contraction, Quality, Readout, Rounding, Start, Unknown, VocabularyInfo
from wane.service.api.schemas.common import Body
from wane.service.batching.cost_model import Costs
from wane.service.types.common import Condition, says


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

    parameters: LoadParameters = field(default_factory=LoadParameters)


class UnloadParameters(Body, kw_only=True):
    """The parameters of a request to unload a model. The protocol's own clients send them."""

    unload_dependents: Annotated[bool, says("ignored: no model depends on another")] = False


class UnloadBody(Body, kw_only=True):
    """A request to unload the model in the path."""

    examples = ({"parameters": {"unload_dependents": False}},)

    parameters: UnloadParameters = field(default_factory=UnloadParameters)


class ModelFactsDocument(TypedDict):
    """A model, with OpenAI's fields and the fields of its manifest. `k_epsilon` has a number k for each bound on the
    total variation between the predictions of window mode and recurrent mode. k is the smallest number of tokens such
    that all windows of k or more tokens satisfy the bound, or null if there is no such number."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    model_version: str
    device: str
    description: str
    family: str
    parameters: dict[str, object]
    k: int
    max_window: int
    k_epsilon: dict[str, int | None]
    vocabulary: VocabularyInfo
    unknown: Unknown
    start: Start
    quality: Quality | None
    attribution: str | None


class ModelCardDocument(ModelFactsDocument):
    """One model with its whole certificate, and with the durations of its runs that were measured on this server."""

    certificate: Certificate
    costs: Costs


class CertificateSummary(BaseModel, from_attributes=True):
    """The certificate without its lists of error bounds (`state_error` and `error_bound`). `reason` explains why a
    model is not certified."""

    contractive: bool
    certified: bool
    reason: str | None
    layers: tuple[Contraction, ...]
    head_diameter: float
    rounding: Rounding | None
    readout: Readout | None


class ModelSummaryDocument(ModelFactsDocument):
    """A model in the list of models."""

    certificate: CertificateSummary


class ModelListDocument(TypedDict):
    """All served models. The default model is the first."""

    object: Literal["list"]
    data: list[ModelSummaryDocument]


class VocabularyEntry(TypedDict):
    """The name of an event, or the text of a token, and its id."""

    id: int
    name: str


class VocabularyDocument(TypedDict):
    """A page of a vocabulary. `next` is the parameter `after` of the next page, or null on the last page."""

    events: list[VocabularyEntry]
    next: int | None


class LoadedDocument(TypedDict):
    """The answer to a request to load a model."""

    name: str
    version: str
    state: Condition


class UnloadedDocument(TypedDict):
    """The answer to a request to unload a model."""

    name: str
    state: Condition


class ModelReadyDocument(TypedDict):
    """The answer to a readiness probe for a model that is ready."""

    name: str
    ready: bool


class ProtocolFailureDocument(TypedDict):
    """A failure in the Open Inference Protocol's format. `code` is the same as in a problem document."""

    error: str
    code: str
    retryable: bool
    request_id: str
