"""Serves the list of models, in OpenAI's format, and the report of the server's measurements."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from fastapi import APIRouter
from msgspec import convert
from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.deps import deadline, model_engine
from wane.service.api.exchange import registry
from wane.service.api.openapi import answers
from wane.service.api.schemas.models import CertificateSummary, ModelCard, ModelList, ModelSummary
from wane.service.engine.engine import Engine
from wane.service.engine.stats import Report

EPSILONS = ("1e-1", "1e-2", "1e-3", "1e-4")
"""The bounds for which a model's document gives `k_epsilon` (see `ModelFacts`)."""

router = APIRouter(tags=["models"])


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", response_model=None, responses=answers(ModelList))
async def models(request: Request) -> Response:
    """Lists every model with its family, k (the length of its window), quality, and certificate without the lists of
    error bounds. The default model is the first.

    Waits until every model has loaded or failed.
    """
    await registry(request).wait_for_all(deadline(request))
    return encode.reply(ModelList("list", tuple(map(_summary, registry(request).list()))))


@router.head("/v1/models/{name}", include_in_schema=False)
@router.get("/v1/models/{name}", response_model=None, responses=answers(ModelCard))
async def model(request: Request, name: str) -> Response:
    """Returns one model with its whole certificate. The certificate's list `error_bound` has the error bound of windows
    of k tokens for each k."""
    engine = await model_engine(request, name)
    card = ModelCard(**_facts(engine), certificate=engine.manifest.certificate, costs=engine.cost_model)
    return encode.reply(card)


def _summary(engine: Engine) -> ModelSummary:
    summary = convert(engine.manifest.certificate, CertificateSummary, from_attributes=True)
    return ModelSummary(**_facts(engine), certificate=summary)


def _facts(engine: Engine) -> dict[str, Any]:
    """Returns the fields of `ModelFacts`."""
    manifest = engine.manifest
    smallest = manifest.certificate.smallest_window
    return {
        "id": manifest.name,
        "object": "model",
        "created": _unix_time(manifest.provenance.created),
        "owned_by": "wane",
        "model_version": manifest.version,
        "device": engine.device,
        "description": manifest.description,
        "family": manifest.architecture.family,
        "parameters": manifest.architecture.model_dump() | {"hidden": manifest.architecture.hidden},
        "k": manifest.window,
        "max_window": manifest.max_window,
        "k_epsilon": {epsilon: smallest(float(epsilon)) for epsilon in EPSILONS},
        "vocabulary": manifest.vocabulary,
        "unknown": manifest.unknown,
        "start": manifest.start,
        "quality": manifest.quality,
        "attribution": manifest.provenance.attribution,
    }


def _unix_time(iso: str) -> int:
    """Returns the seconds since 1970, or 0 for an invalid date."""
    try:
        return int(datetime.fromisoformat(iso).timestamp())
    except ValueError:
        return 0


@router.head("/v1/report", include_in_schema=False)
@router.get("/v1/report", response_model=None, responses=answers(Report))
async def report(request: Request) -> Response:
    """Returns measurements of this server: the latency of each mode, the agreement of recurrent mode and windows over
    all comparisons, and statistics of sessions. Waits until every model has loaded or failed."""
    await registry(request).wait_for_all(deadline(request))
    return encode.reply(to_jsonable_python(await registry(request).report()))
