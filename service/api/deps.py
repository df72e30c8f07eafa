"""Accessors for the objects that a route needs for a request, such as the engine, the session's key and the
deadline."""

from __future__ import annotations

from starlette.requests import HTTPConnection, Request

from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import context, registry
from wane.service.engine.engine import Engine
from wane.service.settings import Settings
from wane.service.types.generate import GenerateBody
from wane.service.types.predict import PredictBody
from wane.service.types.request import Owner, name_within


def settings(request: HTTPConnection) -> Settings:
    """Returns the server's settings."""
    current: Settings = request.app.state.settings
    return current


def deadline(request: HTTPConnection) -> float | None:
    """Returns the request's deadline, in seconds on the event loop's clock."""
    return context(request.scope).deadline


def header(request: HTTPConnection, name: str) -> str | None:
    """Returns the value of the header with this lower-case name."""
    return context(request.scope).header(name)


def owner(request: HTTPConnection) -> Owner:
    """Returns the owner of the request's API key."""
    return context(request.scope).owner


def session_key(request: HTTPConnection, session: str) -> str:
    """Returns the session's key in the engine. The key consists of the owner's name and the session's id. Raises
    InvalidRequest for an invalid id."""
    return name_within(context(request.scope).owner.name, session)


async def model_engine(request: Request, name: str | None = None) -> Engine:
    """Returns the engine of a model, or the default engine. Adds the model to the request's access log line. Waits
    while the model loads.

    Raises UnknownModel, Unavailable, DeadlineExceeded, Abandoned.
    """
    models = registry(request)
    if models.is_coming(name):
        with until_hangup(request):
            await models.wait_for(name, deadline(request))
    engine = models.get(name)
    note_model(request, engine)
    return engine


async def engine_of(request: Request, body: PredictBody | GenerateBody) -> tuple[Engine, str | None]:
    """Returns the engine of the body's session and the session's key, or the engine of the body's model and None."""
    if body.session is None:
        return await model_engine(request, body.model), None
    return await engine_and_key(request, body.session, body.model)


async def engine_and_key(request: Request, session: str, model: str | None = None) -> tuple[Engine, str]:
    """Returns a session's engine and the session's key, given its id."""
    key = session_key(request, session)
    return await session_engine(request, key, model), key


async def session_engine(request: Request, session: str, model: str | None = None) -> Engine:
    """Returns a session's engine, and adds the model to the request's access log line. See
    `ModelRegistry.engine_for`."""
    models = registry(request)
    if models.status == "loading":
        with until_hangup(request):
            engine = await models.engine_for(session, model, deadline(request))
    else:
        engine = await models.engine_for(session, model, deadline(request))
    note_model(request, engine)
    return engine


def note_model(request: HTTPConnection, engine: Engine) -> None:
    """Adds the model to the request's access log line."""
    context(request.scope).fields["model"] = engine.name
