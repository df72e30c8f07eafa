"""Serves liveness, readiness and metrics to operators, and the page `/docs`, which shows the OpenAPI description with
Swagger UI (https://github.com/swagger-api/swagger-ui). The page loads nothing from other sites: the package
`fastapi_offline` has Swagger UI's files."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Annotated

import fastapi_offline
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from wane.service.api import encode
from wane.service.api.exchange import registry
from wane.service.api.openapi import Router, answers
from wane.service.api.routes.console import PAGE_HEADERS, file_reply, files
from wane.service.observability.metrics import Metrics
from wane.service.types.common import Result, Served, says

SWAGGER_UI = Path(fastapi_offline.__file__).parent / "static"
"""The folder with Swagger UI's files."""

SCRIPT = (
    "SwaggerUIBundle({url: 'openapi.json', dom_id: '#page', deepLinking: true, tryItOutEnabled: true, "
    "defaultModelExpandDepth: 3})"
)
PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Wane: the API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>{SCRIPT}</script>
</html>
"""
DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; script-src 'self' 'sha256-{DIGEST}'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": POLICY, **PAGE_HEADERS}

router = Router(tags=["operations"])


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

    ready: bool
    """true: every model has loaded or failed to load, the server is not draining, and the session store is reachable"""
    status: Annotated[str, says("the phase of the server", enum=["loading", "ready", "draining", "store_unavailable"])]
    device: Annotated[str | None, says("the device that runs the models; null until the first model is loaded")]
    models: Annotated[list[ModelStanding], says("the models that are ready")]
    loading: Annotated[list[str], says("the models that are being loaded; requests for them wait")]
    failed: Annotated[list[FailedModel], says("the models that failed to load")]
    store: Annotated[StoreStanding | None, says("the session store; null until it is open")]


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
    return HTMLResponse(PAGE, headers=HEADERS)


@router.on_get("/docs/{name}", include_in_schema=False)
async def docs_file(request: Request, name: str) -> Response:
    """Returns a file of the page, or 304 if the browser has its latest version. Raises NotFound."""
    return file_reply(request, files(SWAGGER_UI, "swagger-ui*").get(name), HEADERS)
