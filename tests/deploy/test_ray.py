"""Tests of Wane's additions to Ray Serve, without Ray: the middleware in Ray's proxies, and the configuration."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from deploy.ray.front import CALLBACK, RESTART, middlewares
from deploy.stack.local import ROOT
from wane.service.server import KEEP_ALIVE_S
from wane.service.settings import Settings

DOCUMENT: Any = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text(encoding="utf-8"))
(APPLICATION,) = DOCUMENT["applications"]
(DEPLOYMENT,) = APPLICATION["deployments"]
DEFAULTS = Settings()


async def tell(request: Request) -> Response:
    """Returns the values of the header x-session-id that Ray's router would receive. The answer has the header
    x-request-id twice."""
    answer = JSONResponse(request.headers.getlist("x-session-id"))
    answer.raw_headers += [(b"x-request-id", b"a"), (b"X-Request-ID", b"a")]
    return answer


async def greet(socket: WebSocket) -> None:
    """A WebSocket route that receives one message. If the message is `end`, the route closes the WebSocket. Otherwise
    it returns without closing the WebSocket."""
    await socket.accept()
    if await socket.receive_text() == "end":
        await socket.close(1000)


async def be_killed(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application that returns without an answer, as Ray's proxy does after a replica has exited."""


def through_the_front(app: ASGIApp) -> TestClient:
    (middleware,) = middlewares()
    return TestClient(middleware.cls(app, *middleware.args, **middleware.kwargs))


@pytest.mark.parametrize(
    ("path", "given", "seen"),
    [
        ("/v1/sessions/one", None, ["one"]),
        ("/v1/sessions/one/tokens", None, ["one"]),
        ("/v1/sessions/one/tokens", "another", ["one"]),
        ("/v1/sessions/%C3%A9/tokens", None, ["Ã©"]),
        ("/v1/sessions", "named", ["named"]),
        ("/v1/sessions/tokens", "named", ["named"]),
        ("/v1/sessions/tokens", None, []),
        ("/v1/predict", None, []),
    ],
)
def test_the_session_is_taken_from_the_path_or_else_from_the_header(
    path: str, given: str | None, seen: list[str]
) -> None:
    client = through_the_front(Starlette(routes=[Route("/{path:path}", tell)]))
    answer = client.get(path, headers={} if given is None else {"x-session-id": given})
    assert answer.json() == seen
    assert answer.headers.get_list("x-request-id") == ["a"]


def test_an_unanswered_request_gets_a_problem_document() -> None:
    answer = through_the_front(be_killed).post("/v1/sessions/one/tokens", headers={"x-request-id": "r"})
    assert answer.status_code == 502
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["request_id"] == "r" and answer.json()["code"] == "unanswered"


@pytest.mark.parametrize(("message", "code"), [("end", 1000), ("vanish", RESTART)])
def test_a_websocket_is_closed_by_its_replica_or_with_1012(message: str, code: int) -> None:
    client = through_the_front(Starlette(routes=[WebSocketRoute("/", greet)]))
    with client.websocket_connect("/") as socket:
        socket.send_text(message)
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_text()
    assert closed.value.code == code


def test_the_configuration_names_existing_objects() -> None:
    module, name = APPLICATION["import_path"].split(":")
    assert f"def {name}(" in (ROOT / (module.replace(".", "/") + ".py")).read_text()
    assert f'NAME = "{DEPLOYMENT["name"]}"' in (ROOT / "deploy/ray/application.py").read_text()
    assert f"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH={CALLBACK}" in (ROOT / "deploy/ray/serve.yaml").read_text()


def test_the_arguments_of_the_application_are_settings() -> None:
    assert Settings.read({}, Namespace(**APPLICATION["args"])).log_level == "info"


def test_a_stopping_replica_has_time_for_a_request_and_its_drain() -> None:
    assert DEPLOYMENT["graceful_shutdown_timeout_s"] * 1000 > DEFAULTS.request_timeout_ms + DEFAULTS.drain_timeout_ms
    assert DOCUMENT["http_options"]["keep_alive_timeout_s"] == KEEP_ALIVE_S


def test_replicas_are_chosen_by_consistent_hashing_and_scaled_by_requests_in_flight() -> None:
    assert DEPLOYMENT["request_router_config"]["request_router_class"].endswith(":ConsistentHashRouter")
    scaling = DEPLOYMENT["autoscaling_config"]
    assert 2 <= scaling["min_replicas"] < scaling["max_replicas"]
    assert scaling["target_ongoing_requests"] < DEFAULTS.max_batch_size < DEPLOYMENT["max_ongoing_requests"]
