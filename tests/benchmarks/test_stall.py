"""Tests of the requests that `benchmarks/stall` sends."""

from __future__ import annotations

from typing import cast

from benchmarks.stall.largest import Subject, cases
from tests.service.fake_engine import FakeRegistry
from wane.service.app import create_app
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings

UNSENT = {"POST /v2/repository/models/{name}/load", "POST /v2/repository/models/{name}/unload"}
"""They would take the models away from the other requests. `benchmarks/stall` sends one that names no model."""


def test_there_are_requests_to_every_route_with_lists_at_their_limits() -> None:
    subjects = [Subject("text", "1", 2048, []), Subject("shop", "1", 1002, [f"item/{index}" for index in range(1000)])]
    app = create_app(Settings(), cast(ModelRegistry, FakeRegistry()), Metrics(), on_load_failure=print)
    document = app.openapi()
    found = list(cases(document, subjects))
    routes = {
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method in operations
        if method != "delete"
    }
    assert {one.route for one in found} == routes - UNSENT
    predictions = [one.body for one in found if one.route == "POST /v1/predict" and isinstance(one.body, dict)]
    assert max(len(body.get("tokens", ())) for body in predictions) == 65_536
    assert max(len(body.get("inputs", ())) for body in predictions) == 256
    assert {100} == {body["top_k"] for body in predictions if "top_k" in body}
    pairs = {frozenset(body) & {"top_k", "candidates", "exclude"} for body in predictions}
    assert {frozenset({"top_k", "candidates"}), frozenset({"exclude", "candidates"}), frozenset({"top_k"})} <= pairs
