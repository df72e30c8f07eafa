"""Serves the Open Inference Protocol's model repository extension, which lists, loads and unloads models. Also serves
the protocol's readiness probe for one model.

A load can replace a model's version while the model has live sessions. See `service/registry/registry.py`.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.body import decode
from wane.service.api.deps import deadline, note_model
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import registry
from wane.service.api.openapi import json_body
from wane.service.api.schemas.models import (
    IndexBody,
    LoadBody,
    LoadedDocument,
    ModelReadyDocument,
    ProtocolFailureDocument,
    UnloadBody,
    UnloadedDocument,
)
from wane.service.errors import Unavailable
from wane.service.registry.registry import IndexEntry

FAILURE: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "any failure, in the Open Inference Protocol's format",
        "content": {"application/json": {"schema": TypeAdapter(ProtocolFailureDocument).json_schema()}},
    }
}

router = APIRouter(prefix="/v2", tags=["repository"], responses=FAILURE)


@router.post(
    "/repository/index",
    response_model=list[IndexEntry],
    openapi_extra=json_body(IndexBody, required=False),
)
async def index(request: Request) -> Response:
    """Lists the models with their versions and states. The list contains served models, models that are being loaded or
    unloaded, and models in the bundles' folder."""
    body = await decode(request, IndexBody, empty=b"{}")
    entries = await registry(request).index()
    found = [one for one in entries if one.state == "READY" or not body.ready]
    return encode.reply(found)


@router.post(
    "/repository/models/{name}/unload",
    response_model=UnloadedDocument,
    openapi_extra=json_body(UnloadBody, required=False),
)
async def unload(request: Request, name: str) -> Response:
    """Unloads a model. The model's sessions are kept until they expire, and can continue if the model is loaded again
    before then."""
    await decode(request, UnloadBody, empty=b"{}")
    await registry(request).unload_model(name, deadline(request))
    unloaded: UnloadedDocument = {"name": name, "state": "UNAVAILABLE"}
    return encode.reply(unloaded)


@router.post(
    "/repository/models/{name}/load", response_model=LoadedDocument, openapi_extra=json_body(LoadBody, required=False)
)
async def load(request: Request, name: str) -> Response:
    """Loads the current version of a model's bundle. The new version replaces the served version, if there is one. The
    response is sent after the replacement. If the load fails, the server continues to serve the earlier version, and
    `error` gives the reason."""
    await decode(request, LoadBody, empty=b"{}")
    with until_hangup(request):
        engine = await registry(request).load_model(name, deadline(request))
    note_model(request, engine)
    loaded: LoadedDocument = {"name": engine.name, "version": engine.version, "state": "READY"}
    return encode.reply(loaded)


@router.head("/models/{name}/ready", include_in_schema=False)
@router.get("/models/{name}/ready", response_model=ModelReadyDocument)
async def ready(request: Request, name: str) -> Response:
    """Answers 200 if a model is ready. Answers 503 while the model loads or the server stops, and 404 with the reason
    if the model is not served."""
    models = registry(request)
    engine = models.get(name)
    if engine not in models.served:
        raise Unavailable("the server is stopping")
    document: ModelReadyDocument = {"name": engine.name, "ready": True}
    return encode.reply(document)
