"""The served models, their facts, and the Open Inference Protocol's model repository."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, WithJsonSchema
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from wane.models.manifest import Certificate, Contraction, Quality, Rounding, VocabularyInfo
from wane.service.api.schemas.common import Body
from wane.service.batching.cost_model import Costs
from wane.service.types import Condition


class IndexBody(Body):
    """Selects the models to list. Optional, like the other bodies of the model repository."""

    examples = ({}, {"ready": True})

    ready: bool = Field(default=False, description="only models that accept requests")


class LoadParameters(Body):
    """The parameters of a load: none, because the bundle describes the model."""


class LoadBody(Body):
    """A load of the model in the path."""

    examples = ({},)

    parameters: Annotated[LoadParameters, WithJsonSchema(LoadParameters.model_json_schema())] = Field(
        default=LoadParameters()
    )


class UnloadParameters(Body):
    """The parameters that the protocol's own clients send."""

    unload_dependents: bool = Field(default=False, description="ignored: no model depends on another")


class UnloadBody(Body):
    """An unload of the model in the path."""

    examples = ({"parameters": {"unload_dependents": False}},)

    parameters: Annotated[UnloadParameters, WithJsonSchema(UnloadParameters.model_json_schema())] = Field(
        default=UnloadParameters()
    )


class ModelFactsDocument(TypedDict):
    """OpenAI's fields, and the manifest's. `k_epsilon`: for each bound on the total variation, the smallest k from
    which on every window's bound is within it; null if there is none."""

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
    """One model, with its whole certificate, and the costs of its runs on this server."""

    certificate: Certificate
    costs: Costs


class CertificateSummary(BaseModel, from_attributes=True):
    """The certificate without its curve; `reason` explains why a model is not certified."""

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
    """Every served model, the default first."""

    object: Literal["list"]
    data: list[ModelSummaryDocument]


class LoadedDocument(TypedDict):
    """A newly loaded model."""

    name: str
    version: str
    state: Condition


class UnloadedDocument(TypedDict):
    """An unloaded model."""

    name: str
    state: Condition


class ModelReadyDocument(TypedDict):
    """A model that is ready."""

    name: str
    ready: bool


class ProtocolFailureDocument(TypedDict):
    """A failure in the Open Inference Protocol's format; `code` is that of a problem document."""

    error: str
    code: str
    retryable: bool
    request_id: str
