"""Liveness, readiness and metrics for operators; and two plain HTML pages, without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from wane.service.api import encode
from wane.service.api.exchange import registry
from wane.service.api.schemas.ops import LivenessDocument, ModelStandingDocument, ReadinessDocument, StoreDocument
from wane.service.engine.engine import Engine
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.store import StoreHealth

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}
"""Headers that forbid a browser to load other resources, to run scripts, and to show the page in a frame."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ font-family: sans-serif; max-width: 60em; margin: 2em auto }} td {{ padding: 0 1em 0.5em 0 }}</style>
{content}
</html>
"""
FIRST = """<p>Wane serves recurrent next-token models whose memory provably fades, as a stream or as a window of the
last k tokens, and says how far the two are apart: read the <a href="docs">list of routes</a>, or its <a
href="openapi.json">description</a> for programs, the <a href="v1/models">models</a> and the <a
href="v1/report">report</a>.</p>"""


def first() -> str:
    """Returns the start page."""
    return PAGE.format(title="Wane", content=FIRST)


def reference(openapi: Mapping[str, Any]) -> str:
    """Returns a page that lists the routes of an OpenAPI description."""
    rows = "\n".join(_rows(openapi))
    about = escape(openapi["info"].get("description", ""))
    content = f'<p>{about} All routes: <a href="openapi.json">openapi.json</a>.</p>\n<table>\n{rows}\n</table>'
    return PAGE.format(title="Wane: the API", content=content)


def _rows(openapi: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            text = escape(operation.get("description") or operation.get("summary", ""))
            yield f"<tr><td>{method.upper()}</td><td><code>{escape(path)}</code></td><td>{text}</td></tr>"


router = APIRouter(tags=["operations"])


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", response_model=LivenessDocument)
async def healthz() -> Response:
    """Whether the process is alive."""
    return encode.reply({"live": True})


@router.head("/readyz", include_in_schema=False)
@router.get(
    "/readyz",
    response_model=ReadinessDocument,
    responses={503: {"model": ReadinessDocument, "description": "loading or draining, or the store is unavailable"}},
)
async def readyz(request: Request) -> Response:
    """Whether every model has loaded or failed. Not ready while the process drains, or while the session store is
    unavailable and steps need it. A model answers requests as soon as it is loaded."""
    models = registry(request)
    store = models.store
    ready = models.ready and store is not None and store.ready
    served = models.served
    unknown = models.device == "auto" or (models.status == "loading" and not served)
    document = {
        "ready": ready,
        "status": "store_unavailable" if models.ready and not ready else models.status,
        "device": None if unknown else models.device,
        "models": [_standing(engine) for engine in served],
        "loading": [*models.loading],
        "failed": [{"model": name, "reason": failure.reason} for name, failure in models.failures.items()],
        "store": None if store is None else _health(store),
    }
    return encode.reply(document, 200 if ready else 503)


def _standing(engine: Engine) -> ModelStandingDocument:
    certificate = engine.manifest.certificate
    return {**encode.model(engine), "certified": certificate.certified, "reason": certificate.reason}


def _health(store: StoreHealth) -> StoreDocument:
    return {"kind": store.kind, "reachable": store.reachable, "not_durable": store.not_durable}


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus metrics; as OpenMetrics, with exemplars, if the client accepts it."""
    found: Metrics = request.app.state.metrics
    text, content_type = found.render(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page() -> Response:
    """A start page for people."""
    return HTMLResponse(first(), headers=HEADERS)


@router.head("/docs", include_in_schema=False)
@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """A list of routes for people."""
    return HTMLResponse(reference(request.app.openapi()), headers=HEADERS)
