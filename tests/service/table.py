"""Lists of the application's routes."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Route, WebSocketRoute

from wane.service.app import ROUTERS, ROUTES


def every_route(app: FastAPI) -> list[tuple[str, str]]:
    """Returns the methods and paths of all HTTP routes, including the routes of the HTML pages and of the framework."""
    found = set()
    for route in routes(app):
        if isinstance(route, Route):
            path = route.path.replace("{session}", "s").replace("{name}", "fake").replace("{path:path}", "app.js")
            found |= {(method, path) for method in route.methods or ()}
    return sorted(found)


def every_socket(app: FastAPI) -> list[str]:
    """Returns every WebSocket path."""
    return [route.path.replace("{session}", "s") for route in routes(app) if isinstance(route, WebSocketRoute)]


def routes(app: FastAPI) -> list[Route | WebSocketRoute]:
    """Returns all routes. Fails if a route is of an unknown kind, because no test would cover it."""
    # Leaves out the routes of these routers from `app.routes`, because ROUTES already lists them.
    included = {id(router) for router in ROUTERS}
    found = [*ROUTES, *(route for route in app.routes if id(getattr(route, "original_router", None)) not in included)]
    known = [route for route in found if isinstance(route, Route | WebSocketRoute)]
    assert known == found
    return known
