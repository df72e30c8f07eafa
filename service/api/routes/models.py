"""Which models there are, in OpenAI's list shape, and how they have done so far."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.deps import deadline, model_engine, registry
from wane.service.api.schemas.models import ModelCardDocument, ModelListDocument
from wane.service.api.schemas.ops import ReportDocument

router = APIRouter(tags=["models"])


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", response_model=ModelListDocument)
async def models(request: Request) -> Response:
    """Every model, the default first, with its family, its k, its certificate but for the curve, and its quality.

    Answered once every model is loaded, or failed to be.
    """
    await registry(request).wait_for_all(deadline(request))
    return encode.reply({"object": "list", "data": [encode.model_summary(one) for one in registry(request).list()]})


@router.head("/v1/models/{name}", include_in_schema=False)
@router.get("/v1/models/{name}", response_model=ModelCardDocument)
async def model(request: Request, name: str) -> Response:
    """One model, with its certificate's curve: the error bound of a window of k tokens, for every k."""
    return encode.reply(encode.model_card(await model_engine(request, name)))


@router.head("/v1/report", include_in_schema=False)
@router.get("/v1/report", response_model=ReportDocument)
async def report(request: Request) -> Response:
    """What was measured while serving: latency by mode, agreement over all comparisons, sessions. Waits as the list of
    models does."""
    await registry(request).wait_for_all(deadline(request))
    return encode.reply(await registry(request).report())
