"""Calls the endpoints of the most frequent routes without the framework.

The framework's routing takes several times as long as the endpoint itself. The `Dispatcher` finds these endpoints by
method and path. It calls each endpoint as the framework does, with the request and the path's parameters. The
dispatcher is called in one of two ways:

- The HTTP protocol calls `dispatch` for a request whose whole body arrived with its head. The endpoint starts
immediately, in an `EagerTask`.
- For all other requests to these endpoints, the dispatcher is an ASGI application behind the same middleware as the
framework.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from wane.service.api.body import LARGE_BYTES, read
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import WHOLE_BODY, HttpExchange, RequestPolicy, ResponseSink

Endpoint = Callable[..., Awaitable[Response]]


class Dispatcher:
    """Matches requests to the routes of selected endpoints, and calls these endpoints."""

    def __init__(
        self, app: ASGIApp, policy: RequestPolicy, routes: Iterable[BaseRoute], endpoints: frozenset[Endpoint]
    ) -> None:
        """`app` is the application that contains the `routes`. `endpoints` are the endpoint functions that the
        dispatcher calls directly, without the application."""
        self._app = app
        self._policy = policy
        found = [route for route in routes if isinstance(route, Route) and route.endpoint in endpoints]
        assert len(found) == len(endpoints), "an endpoint has no route: this is a bug"
        self._by_path = {route.path: route for route in found if not route.param_convertors}
        self._by_pattern = [route for route in found if route.param_convertors]
        self.max_body_bytes = min(LARGE_BYTES, policy.max_body_bytes)
        """The longest body in bytes that `dispatch` accepts."""

    def matches(self, scope: Scope) -> bool:
        """Returns whether a request matches one of the routes. Stores the route in the request's scope."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return False
        path = scope["path"]
        route = self._by_path.get(path)
        if route is not None:
            scope["route"], scope["path_params"] = route, {}
            return True
        for route in self._by_pattern:
            match = route.path_regex.fullmatch(path)
            if match is not None:
                scope["route"], scope["path_params"] = route, match.groupdict()
                return True
        return False

    def dispatch(self, scope: Scope, body: bytes, sink: ResponseSink) -> HttpExchange:
        """Starts the endpoint of a matching request whose whole body has arrived."""
        scope["app"] = self._app
        scope[WHOLE_BODY] = body
        exchange = HttpExchange(self._policy, scope)
        exchange.start(partial(call, Request(scope)), sink)
        return exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a matching request as an ASGI application. The dispatcher must run behind the middleware."""
        scope["app"] = self._app
        request = Request(scope, receive, send)
        body = await read(request)
        with until_hangup(request):
            scope[WHOLE_BODY] = body
            response = await call(request)
        await response(scope, receive, send)


def call(request: Request) -> Awaitable[Response]:
    """Calls the endpoint of a matching request."""
    scope = request.scope
    endpoint: Endpoint = scope["route"].endpoint
    return endpoint(request, **scope["path_params"])
