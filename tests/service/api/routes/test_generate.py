"""Tests of `/v1/generate` from a session, of the errors for its invalid fields, and of the lists of most probable
tokens in the answers of `/v1/generate` and `/v1/score`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service.problems import assert_problem

SESSION = "generated"
TOKENS = [53, 100, 101]


@pytest.fixture(scope="module")
def session(http: httpx.Client) -> str:
    http.post("/v1/sessions", json={"session": SESSION})
    http.post(f"/v1/sessions/{SESSION}/tokens", json={"tokens": TOKENS, "expected_position": 0})
    return SESSION


def generate(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/generate", json={"max_tokens": 4, "temperature": 0, **body})


def test_a_session_is_continued_and_not_changed(http: httpx.Client, session: str) -> None:
    apart = generate(http, tokens=TOKENS).json()
    for _ in range(2):
        answer = generate(http, session=session, position=3).json()
        assert (answer["session"], answer["position"]) == (session, 3)
        assert answer["tokens"] == apart["tokens"] and answer["error_bound"] == 0.0
    assert http.get(f"/v1/sessions/{session}").json()["position"] == 3
    assert "session" not in apart and "predictions" not in apart


def test_a_session_s_stream_ends_with_its_position(http: httpx.Client, session: str) -> None:
    text = generate(http, session=session, stream=True).text
    assert '"position":3' in text.strip().split("\n")[-1]


def test_another_position_is_409(http: httpx.Client, session: str) -> None:
    assert assert_problem(generate(http, session=session, position=2), 409, "position_conflict")["position"] == 3


def test_an_unknown_session_is_404(http: httpx.Client) -> None:
    assert_problem(generate(http, session="nobody"), 404, "unknown_session")


def test_a_session_and_tokens_are_refused(http: httpx.Client, session: str) -> None:
    assert_problem(generate(http, session=session, tokens=TOKENS), 422, "invalid_request")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position", 3),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("logit_bias", {"07": 1}),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", {"5": -101}),
        ("top_logprobs", 101),
    ],
)
def test_an_invalid_field_is_named(http: httpx.Client, field: str, value: object) -> None:
    document = assert_problem(generate(http, tokens=TOKENS, **{field: value}), 422, "invalid_request")
    assert document["field"] == field


def test_lists_are_those_of_the_tokens(http: httpx.Client) -> None:
    answer = generate(http, tokens=TOKENS, top_logprobs=2).json()
    assert [places[0]["token_id"] for places in answer["predictions"]] == answer["tokens"]
    assert [places[0]["logprob"] for places in answer["predictions"]] == answer["logprobs"]


def test_a_score_lists_the_most_probable_tokens(http: httpx.Client) -> None:
    scored = http.post("/v1/score", json={"tokens": TOKENS, "top_k": 3}).json()
    for place, (token, logprob, places) in enumerate(
        zip(scored["tokens"], scored["logprobs"], scored["predictions"], strict=True)
    ):
        assert [one["logprob"] for one in places if one["token_id"] == token] == [logprob]
        if place:
            body = {"tokens": TOKENS[:place], "mode": "recurrent", "top_k": 3}
            expected = http.post("/v1/predict", json=body).json()["predictions"]
            assert [one["token_id"] for one in places[:3]] == [one["token_id"] for one in expected]
