"""Tests that the two routes of each pair in `benchmarks.protocols` do the same work."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.bench.connections import READ_AT_ONCE, HttpAnswers, connect
from benchmarks.protocols import (
    BUNDLE,
    LISTED,
    PROMPTS,
    SEQUENCES,
    Route,
    complete,
    generate,
    infer,
    predict,
    rate,
)
from tests.service.live_server import live_server


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with live_server(WANE_BUNDLES=str(BUNDLE)) as server:
        yield int(server.url.rpartition(":")[2])


def answer(port: int, route: Route, number: int) -> bytes:
    with connect(port) as connected:
        answers = HttpAnswers()
        connected.sendall(route.requests[number])
        while (body := answers.receive(connected.recv(READ_AT_ONCE))) is None:
            pass
    return body


def test_both_routes_list_the_same_tokens(port: int) -> None:
    for number in (0, SEQUENCES - 1):
        native = json.loads(answer(port, predict(), number))["predictions"]
        head, _, binary = answer(port, infer(), number).partition(b"}]}")
        assert json.loads(head + b"}]}")["outputs"][0]["name"] == "top_ids"
        ids = np.frombuffer(binary[: 8 * LISTED], "<i8").tolist()
        assert ids == [one["token_id"] for one in native]


def test_completions_are_the_texts_of_generate(port: int) -> None:
    choices = json.loads(answer(port, complete(), 0))["choices"]
    assert len(choices) == len(generate().requests) == PROMPTS
    for number in (0, PROMPTS - 1):
        assert choices[number]["text"] == json.loads(answer(port, generate(), number))["text"]


def test_a_rate_counts_units(port: int) -> None:
    assert rate(port, dataclasses.replace(infer(), units=10**9), 2, 0.05) > 10**8
