"""Tests that the error for an invalid body names the place in the body and the expected value, and does not use terms
of Python."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.service.fake_engine import FakeEngine
from wane.service.types.request import PredictRequest

PREDICT, COMPARE, SCORE, GENERATE = "/v1/predict", "/v1/compare", "/v1/score", "/v1/generate"
STEPS, LOAD, UNLOAD = "/v1/sessions/tokens", "/v2/repository/models/fake/load", "/v2/repository/models/fake/unload"
STEP = {"session": "a", "tokens": [1]}
MODES = "'auto', 'recurrent', 'window' or 'both'"
LONG = "x" * 65

SAID: list[tuple[str, Any, str]] = [
    (PREDICT, {"": 1}, "'': there is no such field"),
    (PREDICT, {" ": 1}, "' ': there is no such field"),
    (PREDICT, {"str": 1}, "str: there is no such field"),
    (PREDICT, {"list[int]": 1}, "list[int]: there is no such field"),
    (GENERATE, {"temprature": 1}, "temprature: there is no such field; did you mean `temperature`?"),
    (PREDICT, {"a\nb": 1}, "'a\\nb': there is no such field"),
    # msgspec's messages end in a path, which these names imitate.
    (PREDICT, {".0": 1}, ".0: there is no such field"),
    (PREDICT, {"a - at `$.zz`": 1}, "a - at `$.zz`: there is no such field"),
    (PREDICT, {"a - at `$.mode`": 1, "mode": "window"}, "a - at `$.mode`: there is no such field"),
    (PREDICT, {"a - at `$[3]`": 1}, "a - at `$[3]`: there is no such field"),
    (PREDICT, {LONG: 1}, f"'{LONG[:63]}...: there is no such field"),
    (PREDICT, {"inputs": [None]}, "inputs[0] is null, but must be a string, a list or an object"),
    (PREDICT, {"inputs": ["a", {"str": "b"}]}, "inputs[1].str: there is no such field"),
    (PREDICT, {"inputs": ["a", [1, "x"]]}, 'inputs[1][1] is "x", but must be an integer'),
    (PREDICT, {"inputs": [[[1]]]}, "inputs[0][0] must be an integer"),
    (PREDICT, {"inputs": "abc"}, 'inputs is "abc", but must be a list'),
    (PREDICT, {"inputs": []}, "inputs holds 0 values, but must hold at least 1"),
    (PREDICT, {"tokens": [1, 2.0]}, "tokens[1] is 2.0, but must be an integer"),
    (PREDICT, {"tokens": "1"}, 'tokens is "1", but must be a list'),
    (PREDICT, {"input": 1}, "input is 1, but must be a string"),
    (PREDICT, {"events": "a"}, 'events is "a", but must be a list'),
    (PREDICT, {"events": ["a", 5, None]}, "events[2] is null, but must be a string or an integer"),
    (PREDICT, {"events": [True]}, "events[0] is true, but must be a string or an integer"),
    (PREDICT, {"inputs": [{"events": ["a", 1.5]}]}, "inputs[0].events[1] is 1.5, but must be a string or an integer"),
    (PREDICT, {"events": ["a"], "unknown": "no"}, "unknown is \"no\", but must be 'refuse', 'skip' or 'token'"),
    (PREDICT, {"tokens": [1], "exclude": "a"}, 'exclude is "a", but must be a list'),
    (PREDICT, {"tokens": [1], "candidates": [["a"]]}, "candidates[0] must be a string or an integer"),
    (PREDICT, {"input": "a", "top_k": 2**63}, f"top_k must be less than {2**63}"),
    (PREDICT, {"input": "a", "top_k": -(2**64)}, f"top_k must be at least {-(2**63)}"),
    (PREDICT, {"input": "a", "mode": 5}, f"mode is 5, but must be {MODES}"),
    (PREDICT, {"input": "a", "model": LONG}, "model has more than 64 characters"),
    (PREDICT, {"input": "a", "tolerance": "x"}, 'tolerance is "x", but must be a number'),
    (PREDICT, {"input": "a", "tolerance": float("nan")}, "tolerance is nan, but must be a number from 0 to 1"),
    (COMPARE, {"tokens": [1], "models": ["a"] * 9}, "models holds 9 values, but must hold at most 8"),
    (COMPARE, {"tokens": [1], "models": ["a", LONG]}, "models[1] has more than 64 characters"),
    (COMPARE, {"tokens": [1], "windows": [1, "x"]}, 'windows[1] is "x", but must be an integer'),
    (COMPARE, {"tokens": [1], "windows": [1, 0]}, "windows[1] is 0, but must be at least 1"),
    (SCORE, {"tokens": [1], "method": "x"}, "method is \"x\", but must be 'parallel' or 'sequential'"),
    (SCORE, {"tokens": [1], "stream": 1}, "stream is 1, but must be true or false"),
    (GENERATE, {"tokens": [1], "logit_bias": {"5": 1, "6": "x"}}, 'logit_bias.6 is "x", but must be a number'),
    (GENERATE, {"tokens": [1], "stop": ["a", None]}, "stop[1] is null, but must be a string"),
    (GENERATE, {"tokens": [1], "stop": ["a", ""]}, "stop[1] has 0 characters, but must have 1 to 256"),
    ("/v1/sessions/s/rewind", {}, "position is missing"),
    (STEPS, {"steps": {}}, "steps must be a list"),
    (STEPS, {"steps": {"x": 1}}, "steps must be a list"),
    (STEPS, {"steps": []}, "steps holds 0 values, but must hold at least 1"),
    (STEPS, {"steps": [None]}, "steps[0] is null, but must be an object"),
    (STEPS, {"steps": [{"tokens": [1]}]}, "steps[0].session is missing"),
    (
        STEPS,
        {"steps": [{"sesion": "a", "tokens": [1]}]},
        "steps[0].sesion: there is no such field; did you mean `session`?",
    ),
    (STEPS, {"steps": [STEP, {**STEP, "": 1}]}, "steps[1].'': there is no such field"),
    (STEPS, {"steps": [{**STEP, "top_k": "x"}]}, 'steps[0].top_k is "x", but must be an integer'),
    (STEPS, {"steps": [{**STEP, "mode": "x"}]}, f'steps[0].mode is "x", but must be {MODES}'),
    (STEPS, {"steps": [{**STEP, "tokens": [1, "x"]}]}, 'steps[0].tokens[1] is "x", but must be an integer'),
    (
        STEPS,
        {"steps": [{"session": "a"}]},
        "steps[0]: give exactly one of `input`, `tokens`, `events`; found none of them",
    ),
    (LOAD, {"parameters": {"force": True}}, "parameters.force: there is no such field"),
    (LOAD, {"parameters": 5}, "parameters is 5, but must be an object"),
    (UNLOAD, {"parameters": {"unload_dependents": 1}}, "parameters.unload_dependents is 1, but must be true or false"),
]


@pytest.mark.parametrize(("path", "body", "said"), SAID, ids=lambda value: json.dumps(value)[:60])
async def test_an_invalid_body_is_refused_with_the_place_and_the_expected_value(
    client: httpx.AsyncClient, path: str, body: object, said: str
) -> None:
    response = await client.post(path, content=json.dumps(body))
    document = response.json()
    assert response.status_code == (400 if path.startswith("/v2/") else 422)
    assert document["error" if path.startswith("/v2/") else "detail"] == said
    assert said.startswith(document["field"])


@pytest.mark.parametrize("body", [{}, {"input": "a", "tokens": [1]}], ids=str)
async def test_an_error_of_the_whole_body_names_no_field(client: httpx.AsyncClient, body: object) -> None:
    document = (await client.post(SCORE, json=body)).json()
    assert document["detail"].startswith("give exactly one of `input`, `tokens`, `events`; found ")
    assert "field" not in document


@pytest.mark.parametrize("body", ['{"tokens": [5], "tokens": [6]}', '{"tokens": ["x"], "tokens": [6]}'])
async def test_a_repeated_member_counts_for_the_last_time(
    client: httpx.AsyncClient, engine: FakeEngine, body: str
) -> None:
    assert (await client.post(PREDICT, content=body)).status_code == 200
    (asked,) = engine.asked
    assert isinstance(asked, PredictRequest) and [*asked.tokens] == [6]
