"""Every route that there is."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Route, WebSocketRoute

from wane.service.app import ROUTERS, ROUTES


def every_route(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path that the application has, its own pages and those of the framework included."""
    found = set()
    for route in routes(app):
        if isinstance(route, Route):
            path = route.path.replace("{session}", "s").replace("{name}", "fake")
            found |= {(method, path) for method in route.methods or ()}
    return sorted(found)


def every_socket(app: FastAPI) -> list[str]:
    """Every path of a WebSocket."""
    return [route.path.replace("{session}", "s") for route in routes(app) if isinstance(route, WebSocketRoute)]


def routes(app: FastAPI) -> list[Route | WebSocketRoute]:
    """All of them: what is of another kind would be seen by no test, and is refused here."""
    included = {id(router) for router in ROUTERS}  # what these have is in ROUTES
    found = [*ROUTES, *(route for route in app.routes if id(getattr(route, "original_router", None)) not in included)]
    known = [route for route in found if isinstance(route, Route | WebSocketRoute)]
    assert known == found
    return known
