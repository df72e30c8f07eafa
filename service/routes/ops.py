"""For operators: liveness, readiness, metrics; and a first page for people."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from service import pages
from service.documents.operations import LivenessDocument, ReadinessDocument
from service.metrics import Metrics
from service.routes import answers
from service.routes.context import catalog

router = APIRouter(tags=["operations"])


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", response_model=LivenessDocument)
async def healthz() -> Response:
    """Whether the process lives."""
    return answers.reply({"live": True})


@router.head("/readyz", include_in_schema=False)
@router.get(
    "/readyz",
    response_model=ReadinessDocument,
    responses={503: {"model": ReadinessDocument, "description": "loading or draining, or the store is away"}},
)
async def readyz(request: Request) -> Response:
    """Whether requests are taken: not while models are loaded and warmed up, nor while the process drains, nor while
    the sessions' store is away and no step can be answered without it."""
    models = catalog(request)
    store = models.store
    ready = models.ready and store is not None and store.ready
    device = None if models.status == "loading" or models.device == "auto" else models.device
    document = {
        "ready": ready,
        "status": "store_away" if models.ready and not ready else models.status,
        "device": device,
        "models": [answers.standing(engine) for engine in models.list()] if models.ready else [],
        "store": None if store is None else answers.store(store),
    }
    return answers.reply(document, 200 if ready else 503)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus metrics; with exemplars as OpenMetrics, where that is accepted."""
    found: Metrics = request.app.state.metrics
    text, content_type = found.render(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page() -> Response:
    """A first page for people."""
    return HTMLResponse(pages.first(), headers=pages.HEADERS)


@router.head("/docs", include_in_schema=False)
@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """Every route, for people."""
    return HTMLResponse(pages.reference(request.app.openapi()), headers=pages.HEADERS)
