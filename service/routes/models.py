"""Which models there are, in OpenAI's list shape, and how they have done so far."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.documents.models import ModelCardDocument, ModelListDocument
from service.documents.report import ReportDocument
from service.routes import answers
from service.routes.context import catalog

router = APIRouter(tags=["models"])


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", response_model=ModelListDocument)
async def models(request: Request) -> Response:
    """Every model, the default first, with its family, its k, its certificate but for the curve, and its quality."""
    return answers.reply({"object": "list", "data": [answers.model_summary(one) for one in catalog(request).list()]})


@router.head("/v1/models/{name}", include_in_schema=False)
@router.get("/v1/models/{name}", response_model=ModelCardDocument)
async def model(request: Request, name: str) -> Response:
    """One model, with its certificate's curve: the error bound of a window of k tokens, for every k."""
    return answers.reply(answers.model_card(catalog(request).get(name)))


@router.head("/v1/report", include_in_schema=False)
@router.get("/v1/report", response_model=ReportDocument)
async def report(request: Request) -> Response:
    """What was measured while serving: latency by mode, agreement over all comparisons, sessions."""
    return answers.reply(await catalog(request).report())
