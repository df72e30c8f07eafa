"""The routes that are asked for every token, called without the framework.

The framework describes every route, and calls most of them. Its way to a function that takes the request as it came and
gives an answer that is made already costs several times what the function does; these few are found here by their own
method and path, and called. They are the same functions, behind the same door.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

Endpoint = Callable[..., Awaitable[Response]]


class HotRoutes:
    """The ASGI application of some of the routes in `routes`: of those whose functions are in `endpoints`."""

    def __init__(self, routes: Iterable[BaseRoute], endpoints: frozenset[Endpoint]) -> None:
        self.routes = [route for route in routes if isinstance(route, Route) and route.endpoint in endpoints]
        assert len(self.routes) == len(endpoints), "a function without a route: this is a bug"

    def takes(self, scope: Scope) -> bool:
        """Whether a request is for one of the routes, which it is then marked with."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return False
        for route in self.routes:
            match = route.path_regex.fullmatch(scope["path"])
            if match is not None:
                scope["route"], scope["path_params"] = route, match.groupdict()
                return True
        return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request that `takes` has taken."""
        endpoint = cast(Endpoint, scope["route"].endpoint)
        response = await endpoint(Request(scope, receive, send), **scope["path_params"])
        await response(scope, receive, send)
