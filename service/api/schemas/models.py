"""The models that are served, what is known of them, and the Open Inference Protocol's model repository."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, WithJsonSchema
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from wane.models.manifest import Certificate, Contraction, Quality, Rounding, VocabularyInfo
from wane.service.api.schemas.common import Body
from wane.service.batching.cost_model import Costs
from wane.service.types import Condition


class IndexBody(Body):
    """Which models to list. All of it may be left out, as of the other bodies of the model repository."""

    examples = ({}, {"ready": True})

    ready: bool = Field(default=False, description="only those that take requests")


class LoadParameters(Body):
    """A load takes none: what a model is, its bundle says."""


class LoadBody(Body):
    """Which model is in the path."""

    examples = ({},)

    parameters: Annotated[LoadParameters, WithJsonSchema(LoadParameters.model_json_schema())] = Field(
        default=LoadParameters()
    )


class UnloadParameters(Body):
    """What the protocol's own clients send."""

    unload_dependents: bool = Field(default=False, description="changes nothing: no model depends on another")


class UnloadBody(Body):
    """Which model is in the path."""

    examples = ({"parameters": {"unload_dependents": False}},)

    parameters: Annotated[UnloadParameters, WithJsonSchema(UnloadParameters.model_json_schema())] = Field(
        default=UnloadParameters()
    )


class ModelFactsDocument(TypedDict):
    """OpenAI's fields, and the manifest's beside them. `k_epsilon`: for a bound on the total variation, the smallest k
    whose bound, and that of every larger k, is within it; null where no window's is."""

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
    quality: Quality | None
    attribution: str | None


class ModelCardDocument(ModelFactsDocument):
    """One model, with the whole of its certificate, and what its runs cost here."""

    certificate: Certificate
    costs: Costs


class CertificateSummary(BaseModel, from_attributes=True):
    """The certificate without its curve; `reason` says why a model is not certified."""

    contractive: bool
    certified: bool
    reason: str | None
    layers: tuple[Contraction, ...]
    head_diameter: float
    rounding: Rounding | None


class ModelSummaryDocument(ModelFactsDocument):
    """One model of the list."""

    certificate: CertificateSummary


class ModelListDocument(TypedDict):
    """Every model that is served, the default first."""

    object: Literal["list"]
    data: list[ModelSummaryDocument]


class LoadedDocument(TypedDict):
    """A model that is served now."""

    name: str
    version: str
    state: Condition


class UnloadedDocument(TypedDict):
    """A model that is not served any more."""

    name: str
    state: Condition


class ModelReadyDocument(TypedDict):
    """A model that answers."""

    name: str
    ready: bool


class ProtocolFailureDocument(TypedDict):
    """A failure, as the Open Inference Protocol has it; `code` as in a problem document."""

    error: str
    code: str
    retryable: bool
    request_id: str
