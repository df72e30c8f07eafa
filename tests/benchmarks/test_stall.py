"""Tests that no request within the limits holds the event loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from benchmarks.largest import Subject, cases
from tests.service.fake_engine import FakeRegistry
from wane.service.app import create_app
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings

ROOT = Path(__file__).parents[2]
UNSENT = {"POST /v2/repository/models/{name}/load", "POST /v2/repository/models/{name}/unload"}
"""They would take the models away from the other requests. `benchmarks/stall.py` sends one that names no model."""


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


@pytest.mark.slow
def test_a_tenth_of_the_largest_requests_holds_the_loop_for_at_most_100_ms_of_processor_time(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.stall", "--share=0.1", "--timeout-ms=1000", f"--json={file}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(file.read_text())["requests"]
    assert {one["name"]: one["loop_ms"] for one in found if one["loop_ms"] > 100} == {}
