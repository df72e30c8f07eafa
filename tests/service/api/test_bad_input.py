"""Tests that the error for invalid input names the invalid field or token id, the index of an invalid item, or the
exceeded limit."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service.live_server import LiveServer
from tests.service.problems import assert_problem
from wane.service.api.exchange import MOST_PARAMETERS

SEQUENCE_ROUTES = ["/v1/predict", "/v1/compare", "/v1/score", "/v1/generate", "/v1/sessions/{session}/tokens"]


@pytest.fixture
def session(http: httpx.Client) -> str:
    session: str = http.post("/v1/sessions", json={}).json()["session"]
    return session


@pytest.fixture(scope="module")
def card(http: httpx.Client) -> dict[str, Any]:
    """The default model's document in the list of models."""
    card: dict[str, Any] = http.get("/v1/models").json()["data"][0]
    return card


@pytest.mark.parametrize("path", SEQUENCE_ROUTES)
@pytest.mark.parametrize("body", [{"input": ""}, {"tokens": []}], ids=str)
def test_an_empty_input_is_refused(http: httpx.Client, session: str, path: str, body: object) -> None:
    response = http.post(path.format(session=session), json=body)
    assert "empty" in assert_problem(response, 422, "invalid_request")["detail"]


@pytest.mark.parametrize("path", SEQUENCE_ROUTES)
@pytest.mark.parametrize("wrong", ["-1", "size", "10**30"])
def test_a_token_id_out_of_range_is_named_with_its_position_and_the_vocabulary_size(
    http: httpx.Client, session: str, card: dict[str, Any], path: str, wrong: str
) -> None:
    size = card["vocabulary"]["size"]
    token = {"-1": -1, "size": size, "10**30": 10**30}[wrong]
    response = http.post(path.format(session=session), json={"tokens": [1, 2, token]})
    detail = assert_problem(response, 422, "invalid_request")["detail"]
    assert "tokens[2]" in detail and str(token) in detail and str(size) in detail


@pytest.mark.parametrize("path", SEQUENCE_ROUTES)
@pytest.mark.parametrize("as_text", [True, False], ids=["text", "ids"])
def test_an_input_over_the_limit_is_refused_with_the_limit(
    http: httpx.Client, session: str, path: str, as_text: bool
) -> None:
    limit = 262_144 if path == "/v1/score" else 65_536
    body = {"input": "a b\n" * (limit // 2)} if as_text else {"tokens": [1] * (limit + 1)}
    response = http.post(path.format(session=session), json=body)
    assert str(limit) in assert_problem(response, 413, "too_large")["detail"]


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"", "line 1 column 0"),
        (b"input=The", "line 1 column 1"),
        (b'{"input": "a"', "line 1 column 13"),
        (b'{"input": "a"} {}', "line 1 column 16"),
        (b'{"input": \n"\xff"}', "line 2 column 2"),
        (b'{"input": "\\ud800"}', "line 1 column 18"),
        (b"[" * 10_000, "recursion limit"),
    ],
    ids=["nothing", "a form", "truncated", "two documents", "not UTF-8", "half a surrogate pair", "too deep"],
)
def test_a_body_that_is_not_json_is_refused_with_the_place_of_the_error(
    http: httpx.Client, content: bytes, where: str
) -> None:
    assert where in assert_problem(http.post("/v1/predict", content=content), 400, "not_json")["detail"]


@pytest.mark.parametrize("content", [b"[]", b"null", b'"text"', b"NaN"])
def test_json_other_than_an_object_is_refused(http: httpx.Client, content: bytes) -> None:
    document = assert_problem(http.post("/v1/predict", content=content), 422, "invalid_request")
    assert document["detail"] == "the body must be a JSON object"


@pytest.mark.parametrize("path", [*SEQUENCE_ROUTES[:4], "/v1/sessions", "/v1/models/gpt"])
def test_an_unknown_model_is_refused_by_name(http: httpx.Client, path: str) -> None:
    body = {"model": "gpt"} if path == "/v1/sessions" else {"tokens": [1], "model": "gpt"}
    response = http.get(path) if path.endswith("gpt") else http.post(path, json=body)
    assert "'gpt'" in assert_problem(response, 404, "unknown_model")["detail"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"history": [5, 6]}, "`history` holds the last tokens before a position: give `position`, too"),
        ({"input": "the town"}, "`input` holds the last tokens before a position: give `position`, too"),
        ({"history": [5], "input": "the", "position": 3}, "give `history` or `input`, not both"),
        ({"position": 3}, "position is 3, but the history is empty"),
        ({"history": [], "position": 3}, "position is 3, but the history is empty"),
        ({"input": "", "position": 3}, "the input is empty"),
        ({"history": [5, 6, 7], "position": 2}, "the history has 3 tokens, but must have at most 2"),
        ({"history": [5], "position": -1}, "position is -1"),
        ({"history": [5], "position": 2**62}, "position is 4611686018427387904"),
        ({"history": [5], "position": 1.5}, "position is 1.5, but must be an integer"),
        ({"history": ["a"], "position": 3}, 'history[0] is "a", but must be an integer'),
        ({"history": [5, -1], "position": 3}, "history[1] is -1, but the vocabulary has"),
    ],
    ids=str,
)
def test_an_invalid_history_is_refused(http: httpx.Client, body: object, said: str) -> None:
    assert said in assert_problem(http.post("/v1/sessions", json=body), 422, "invalid_request")["detail"]


def test_a_history_over_the_limit_is_too_large(http: httpx.Client) -> None:
    response = http.post("/v1/sessions", json={"history": [5] * 65_537, "position": 10**6})
    assert_problem(response, 413, "too_large")


WRONG_IDS = ["", "a/b", "a\\b", "e\u0301", "a\nb", "a\u202eb", "a\u200bb", "\ufffd", "..", "x" * 129]


@pytest.mark.parametrize("wrong", WRONG_IDS, ids=ascii)
def test_an_invalid_session_id_is_refused(http: httpx.Client, wrong: str) -> None:
    document = assert_problem(http.post("/v1/sessions", json={"session": wrong}), 422, "invalid_request")
    assert document["field"] == "session"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/generate", "temperature"),
        ("/v1/generate", "top_p"),
        ("/v1/predict", "tolerance"),
        ("/v1/score", "tolerance"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_name(http: httpx.Client, path: str, field: str, value: str) -> None:
    content = f'{{"tokens": [1], "{field}": {value}}}'
    document = assert_problem(http.post(path, content=content), 422, "invalid_request")
    assert document["field"] == field
    shown = str(float(value)) if value != "1e999" else "inf"
    assert document["detail"].startswith(f"{field} is {shown}, but must be ")


@pytest.mark.parametrize("body", [{}, {"input": "a", "tokens": [1]}, {"inputs": ["a"], "session": "s"}], ids=str)
def test_a_prediction_without_exactly_one_input_is_refused(http: httpx.Client, body: object) -> None:
    assert "exactly one" in assert_problem(http.post("/v1/predict", json=body), 422, "invalid_request")["detail"]


def test_a_session_cannot_be_truncated(http: httpx.Client, session: str) -> None:
    response = http.post("/v1/predict", json={"session": session, "truncated": True})
    assert assert_problem(response, 422, "invalid_request")["field"] == "truncated"


def test_a_step_with_two_positions_is_refused(http: httpx.Client, session: str) -> None:
    response = http.post(
        f"/v1/sessions/{session}/tokens", json={"tokens": [7], "expected_position": 0}, headers={"x-wane-position": "1"}
    )
    assert assert_problem(response, 422, "invalid_request")["field"] == "expected_position"


LONG = "x" * 60_000


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/predict", {"tokens": [1], "model": LONG}),
        ("POST", "/v1/predict", {"tokens": [1], "mode": LONG}),
        ("POST", "/v1/predict", {"tokens": [1], LONG: 1}),
        ("POST", "/v1/predict", {"tokens": [10**4000]}),
        ("POST", "/v1/predict", {"tokens": [1], "mode": "window", "window": 10**4000}),
        ("POST", "/v1/predict", {"tokens": [1], "top_k": -(10**4000)}),
        ("POST", "/v1/predict", {"session": LONG}),
        ("POST", "/v1/compare", {"tokens": [1], "models": [LONG]}),
        ("POST", "/v1/compare", {"tokens": [1], "windows": [10**4000]}),
        ("POST", "/v1/sessions", {"session": LONG}),
        ("POST", "/v1/sessions/{session}/tokens", {"tokens": [1], "expected_position": 10**4000}),
        ("POST", "/v1/sessions/{session}/rewind", {"position": 10**4000}),
        ("GET", f"/v1/sessions/{LONG}", None),
        ("DELETE", f"/v1/sessions/{LONG}", None),
        ("GET", f"/v1/models/{LONG}", None),
        ("GET", f"/{LONG}", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_error_for_a_long_value_is_short(
    http: httpx.Client, live: LiveServer, session: str, method: str, path: str, body: object
) -> None:
    response = http.request(method, path.format(session=session), json=body, headers={"x-request-id": session})
    assert response.is_client_error and len(response.content) < 1000, response.text[:1000]
    assert len(live.read_until("request", request_id=session, status=response.status_code)["path"]) <= 256


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/sessions/a\\b", None),
        ("DELETE", "/v1/sessions/a\\b", None),
        ("POST", "/v1/sessions/a\\b/tokens", {"tokens": [1]}),
        ("POST", "/v1/sessions/a\\b/rewind", {"position": 0}),
        ("POST", "/v1/predict", {"session": "a\\b"}),
    ],
)
def test_an_invalid_session_id_is_not_looked_up(http: httpx.Client, method: str, path: str, body: object) -> None:
    document = assert_problem(http.request(method, path, json=body), 422, "invalid_request")
    assert document["field"] == "session"


@pytest.mark.parametrize("path", ["/healthz", "/openapi.json", "/v1/models/rnn-stable/vocabulary", "/nothing"])
def test_a_query_of_many_parameters_is_refused(http: httpx.Client, path: str) -> None:
    """The framework reads a query of 64 KiB for more than 20 ms."""
    refused = http.get(f"{path}?{'a=1&' * MOST_PARAMETERS}a=1")
    assert refused.status_code == 422 and "the query has more than 64 parameters" in refused.text
    assert "the query has" not in http.get(f"{path}?{'a=1&' * (MOST_PARAMETERS - 1)}a=1").text
