"""Serves the Open Inference Protocol's model repository extension, which lists, loads and unloads models.

A load can replace a model's version while the model has live sessions. See `service/registry/registry.py`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.body import decode
from wane.service.api.deps import deadline, note_model
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import registry
from wane.service.api.openapi import Router, answers
from wane.service.api.schemas.models import (
    IndexBody,
    LoadBody,
    LoadedModel,
    ProtocolFailure,
    UnloadBody,
    UnloadedModel,
)
from wane.service.registry.registry import IndexEntry

FAILURE = answers(ProtocolFailure, status="default", description="any failure, in the Open Inference Protocol's format")

router = Router(prefix="/v2", tags=["repository"], responses=FAILURE)


@router.on_post("/repository/index", IndexBody, required=False, responses=answers(IndexEntry, is_list=True))
async def index(request: Request) -> Response:
    """Lists the models with their versions and states. The list contains served models, models that are being loaded or
    unloaded, and models in the bundles' folder."""
    body = await decode(request, IndexBody, empty=b"{}")
    entries = await registry(request).index()
    return encode.reply([entry for entry in entries if entry.state == "READY" or not body.ready])


@router.on_post("/repository/models/{name}/unload", UnloadBody, UnloadedModel, required=False)
async def unload(request: Request, name: str) -> Response:
    """Unloads a model. The model's sessions are kept until they expire, and can continue if the model is loaded again
    before then."""
    await decode(request, UnloadBody, empty=b"{}")
    await registry(request).unload_model(name, deadline(request))
    return encode.reply(UnloadedModel(name, "UNAVAILABLE"))


@router.on_post("/repository/models/{name}/load", LoadBody, LoadedModel, required=False)
async def load(request: Request, name: str) -> Response:
    """Loads the current version of a model's bundle. The new version replaces the served version, if there is one. The
    response is sent after the replacement. If the load fails, the server continues to serve the earlier version, and
    `error` gives the reason."""
    await decode(request, LoadBody, empty=b"{}")
    with until_hangup(request):
        engine = await registry(request).load_model(name, deadline(request))
    note_model(request, engine)
    return encode.reply(LoadedModel(engine.name, engine.version, "READY"))
