"""Builds the ASGI application from the middleware and the routes. Defines what the application does at startup and at
shutdown."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from itertools import chain
from typing import Any

import anyio
from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from wane.service.api.body import Decoder
from wane.service.api.cors import CrossOrigin
from wane.service.api.exchange import RequestPolicy
from wane.service.api.middleware import Endpoint, HotRoutes, RequestMiddleware
from wane.service.api.openapi import GROUPS, answers, complete
from wane.service.api.problem import (
    NOWHERE,
    PROBLEM_TYPE,
    Envelopes,
    ProblemDocument,
    Shape,
    inference_error,
    openai_response,
    problem,
    problem_with_error,
)
from wane.service.api.routes import (
    completions,
    console,
    generate,
    infer,
    inference,
    models,
    ops,
    predict,
    sessions,
    stream,
    tokenizer,
)
from wane.service.auth.guard import Authenticator
from wane.service.auth.keyring import KeySource, MakeBucket, TokenBucket
from wane.service.errors import NotFound
from wane.service.observability.logs import SERVICE
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import Tracing
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings

VERSION = "0.1.0"

DESCRIPTION = (
    "Next-token prediction with recurrent models whose memory provably fades. A prediction is computed in recurrent "
    "mode from all tokens, or in window mode from the last k tokens. The answer says how far the predictions of the "
    "two modes can be apart. Every failure is a problem document (RFC 9457)."
)

ENVELOPES: tuple[tuple[APIRouter, Shape | None], ...] = (
    (predict.router, problem),
    (generate.router, problem),
    (sessions.router, problem),
    (stream.router, problem),
    (completions.router, openai_response),
    (completions.chat, problem_with_error),
    (tokenizer.router, openai_response),
    (models.router, problem_with_error),
    (inference.router, inference_error),
    (infer.router, inference_error),
    (inference.repository, inference_error),
    (ops.router, None),
    (console.router, None),
)
"""Every router, with the function that builds the responses to failures at its routes. If a router has None instead of
a function, `BY_PATH` selects the function by the request's path."""

BY_PATH: dict[str, Shape] = {"/v1/": problem_with_error, "/v2/": inference_error, "": problem}
"""The functions that build the responses to failures at other paths, by path prefix. The first that matches is used."""

ROUTERS = tuple(router for router, _ in ENVELOPES)

ROUTES = tuple(chain.from_iterable(router.routes for router in ROUTERS))

HOT: frozenset[Endpoint] = frozenset(
    {
        sessions.append,
        sessions.append_many,
        predict.predict,
        completions.complete,
        infer.infer,
        infer.version_infer,
    }
)
"""The endpoints that are called before the framework's routing."""

PROBLEM = answers(
    ProblemDocument,
    status="default",
    media=PROBLEM_TYPE,
    description="any failure, as a problem document (RFC 9457)",
)


class Application(FastAPI):
    """FastAPI with the project's OpenAPI description, which contains every route. `HotRoutes` answers the requests to
    the most frequent routes, and FastAPI answers all others."""

    def __init__(self, *, policy: RequestPolicy, settings: Settings, **described: Any) -> None:
        super().__init__(middleware=[Middleware(RequestMiddleware, policy=policy)], **described)
        self.settings = settings
        self.hot = HotRoutes(self, ROUTES, HOT, policy=policy)

    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI description of every route. Builds it at the first call."""
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi(), self.settings)
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.hot.matches(scope):
            await self.hot(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def create_app(
    settings: Settings,
    registry: ModelRegistry,
    metrics: Metrics,
    on_load_failure: Callable[[Exception], None],
    on_default: Callable[[], None] = lambda: None,
    on_ready: Callable[[], None] = lambda: None,
    tracing: Tracing | None = None,
    make_bucket: MakeBucket = TokenBucket,
) -> Application:
    """Returns the application for a registry whose models are not loaded yet. The application accepts requests
    immediately. A request for a model waits until the model is loaded, verified and warmed up. If a required model
    fails to load, the application calls `on_load_failure` with the error. That function must end the process. The
    application calls `on_default` when the default model is ready, and `on_ready` when every model has loaded or failed
    to load. The caller must close `tracing`. `make_bucket`: see `Keyring`.
    Raises KeysError if the key file cannot be read.
    """
    keys = KeySource(settings, make_bucket)

    async def load() -> None:
        try:
            await registry.load(on_default)
        except Exception as error:
            on_load_failure(error)
            await registry.close()
        if registry.ready:  # `ready` is false while the server is draining
            on_ready()
            names = [engine.name for engine in registry.list()]
            SERVICE.info("ready", extra={"fields": {"device": registry.device, "models": names}})

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        anyio.get_cancelled_exc_class()  # loads anyio's asyncio backend; the first streamed answer would otherwise
        loading = asyncio.create_task(load())
        watching = asyncio.create_task(keys.watch())
        yield
        watching.cancel()
        loading.cancel()
        with suppress(asyncio.CancelledError):
            await loading
        await registry.close()

    shapes = [
        (route.path_regex, shape)
        for router, shape in ENVELOPES
        if shape is not None
        for route in router.routes
        if isinstance(route, Route | WebSocketRoute)
    ]
    shapes += [(re.compile(prefix + r"[\s\S]*"), shape) for prefix, shape in BY_PATH.items()]
    policy = RequestPolicy(
        max_body_bytes=settings.max_body_bytes,
        request_timeout_ms=settings.request_timeout_ms,
        body_timeout_s=settings.body_timeout_s,
        envelope=Envelopes(shapes),
        metrics=metrics,
        epochs=registry.epochs,
        tracing=tracing,
        guard=None if keys.keyring is None else Authenticator(keys.keyring, console=settings.console == "on"),
        cross_origin=None if settings.cors_origins is None else CrossOrigin(settings.cors_origins.split(",")),
    )
    app = Application(
        policy=policy,
        settings=settings,
        title="Wane",
        version=VERSION,
        description=DESCRIPTION,
        lifespan=lifespan,
        exception_handlers={HTTPException: answer_problem},
        openapi_tags=GROUPS,
        responses=PROBLEM,
        redirect_slashes=False,
        docs_url=None,  # the framework's documentation pages load scripts from other sites
        redoc_url=None,
    )
    app.state.registry = registry
    app.state.decoder = Decoder(settings)
    app.state.inference_counter = inference.InferenceCounter()
    app.state.keys = keys
    app.state.metrics = metrics
    app.state.settings = settings
    app.state.policy = policy
    for router in ROUTERS:
        if router is not console.router or settings.console == "on":
            app.include_router(router)
    nowhere = app.router.default

    async def default(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # the framework's own rejection would not be a problem document
            raise NotFound(NOWHERE)
        await nowhere(scope, receive, send)

    app.router.default = default
    return app


async def answer_problem(request: Request, error: Exception) -> Response:
    """Converts the framework's own errors to responses in the error format of the request's path (see `Envelopes`)."""
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        error = HTTPException(error.status_code, headers={"allow": ", ".join(sorted(methods_at(request)))})
    policy: RequestPolicy = request.app.state.policy
    return policy.envelope(request.scope, error)


def methods_at(request: Request) -> set[str]:
    """Returns the methods of every route at the request's path. The framework itself lists only the methods of the
    first route."""
    routes = chain(request.app.routes, ROUTES)
    matching = (
        route for route in routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    )
    return {method for route in matching for method in route.methods or ()}
