"""Serves liveness, readiness and metrics to operators, and the page that documents the API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from wane.service.api import docs_page, encode
from wane.service.api.exchange import registry
from wane.service.api.openapi import Router, answers
from wane.service.api.routes.console import file_reply, files
from wane.service.api.schemas.models import FailedModel, Liveness, ModelStanding, Readiness, StoreStanding
from wane.service.observability.metrics import Metrics

router = Router(tags=["operations"])


@router.on_get("/healthz", Liveness)
async def healthz() -> Response:
    """Answers 200 while the process is alive."""
    return encode.reply(Liveness(live=True))


@router.on_get(
    "/readyz",
    Readiness,
    responses=answers(
        Readiness, status=503, description="the process is loading or draining, or it cannot reach its session store"
    ),
)
async def readyz(request: Request) -> Response:
    """Answers 200 if every model has loaded or failed to load, the process is not draining, and the session store is
    reachable. Answers 503 otherwise. A model answers requests as soon as it is loaded, even before the process is
    ready. A process that cannot reach the session store still answers requests without a session."""
    models = registry(request)
    store = models.store
    ready = models.ready and store is not None and store.reachable
    served = models.served
    unknown = models.device == "auto" or (models.status == "loading" and not served)
    certificates = [(engine.identity, engine.manifest.certificate) for engine in served]
    readiness = Readiness(
        ready=ready,
        status="store_unavailable" if models.ready and not ready else models.status,
        device=None if unknown else models.device,
        models=[ModelStanding(*identity, proof.certified, proof.reason) for identity, proof in certificates],
        loading=[*models.loading],
        failed=[FailedModel(name, failure.reason) for name, failure in models.failures.items()],
        store=None if store is None else StoreStanding(store.kind, store.reachable),
    )
    return encode.reply(readiness, 200 if ready else 503)


@router.on_get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Returns the metrics in Prometheus's text format. Returns them as OpenMetrics, with exemplars, if the client
    accepts that format."""
    measured: Metrics = request.app.state.metrics
    text, content_type = await measured.scrape(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})


@router.on_get("/docs", include_in_schema=False)
async def docs() -> Response:
    """Returns the page that documents all routes."""
    return HTMLResponse(docs_page.PAGE, headers=docs_page.HEADERS)


@router.on_get("/docs/{name}", include_in_schema=False)
async def docs_file(request: Request, name: str) -> Response:
    """Returns a file of the page, or 304 if the browser has its latest version. Raises NotFound."""
    return file_reply(request, files(docs_page.SWAGGER_UI, "swagger-ui*").get(name), docs_page.HEADERS)
