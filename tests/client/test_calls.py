"""Tests of the calls without a session, against a real server. Each test runs with both kinds of client."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.client.alike import Both
from tests.service.versions import EVENT_MODEL, TEXT_MODEL
from wane.client import Answer, InvalidRequest, Prediction, TooLarge, Unauthorized, UnknownModel, Unreachable
from wane.client.errors import NotWane

TEXT = "The history of the town"


def test_a_prediction_is_that_of_the_api(wane: Any, http: httpx.Client) -> None:
    body = {"input": TEXT, "mode": "both", "window": 2, "top_k": 3}
    answer, document = wane.predict(TEXT, mode="both", window=2, top_k=3), http.post("/v1/predict", json=body).json()
    assert isinstance(answer, Answer) and isinstance(answer.predictions[0], Prediction)
    assert [one.token_id for one in answer.predictions] == [one["token_id"] for one in document["predictions"]]
    assert answer.agreement is not None and answer.modes is not None
    assert answer.agreement.total_variation == pytest.approx(document["agreement"]["total_variation"], abs=1e-6)
    assert answer.modes["window"].predictions[0].token == document["modes"]["window"]["predictions"][0]["token"]
    assert (answer.model, answer.mode, answer.window) == (TEXT_MODEL, "both", 2)


def test_token_ids_and_names_of_events_are_inputs(wane: Any) -> None:
    tokens = wane.score(TEXT).tokens
    assert wane.predict(tokens).predictions == wane.predict(TEXT).predictions
    answer = wane.predict(["event 5", "event 6"], model=EVENT_MODEL, exclude=["event 7"], top_k=2048)
    assert wane.predict([5, 6], model=EVENT_MODEL).predictions[0].token_id != 7
    assert "event 7" not in {one.token for one in answer.predictions}
    assert "event 8" in {one.token for one in answer.predictions}


def test_modes_are_compared(wane: Any) -> None:
    (compared,) = wane.compare(TEXT, windows=[1, 2], repeat=2)
    assert [one.window for one in compared.windows] == [1, 2]
    assert compared.recurrent.agreement is None
    assert compared.windows[0].agreement.total_variation > 0
    assert compared.recurrent.latency["compute"].p50_ms > 0


def test_a_score_with_progress_is_the_same_score(wane: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ({}, {"top_k": 2}, {"truncated": True}):
        plain, shown = wane.score(TEXT, **options), wane.score(TEXT, progress=True, **options)
        assert (shown.tokens, shown.logprobs, shown.perplexity) == (plain.tokens, plain.logprobs, plain.perplexity)
        assert (shown.error_bounds, shown.predictions) == (plain.error_bounds, plain.predictions)
        assert "100%" in capsys.readouterr().err


def test_a_generation_comes_whole_or_token_by_token(wane: Any) -> None:
    whole = wane.generate(TEXT, max_tokens=6, seed=4)
    stream = wane.generate_stream(TEXT, max_tokens=6, seed=4)
    tokens = list(stream)
    assert "".join(token.text for token in tokens) == whole.text == stream.result.text
    assert tuple(token.token_id for token in tokens) == whole.tokens == stream.result.tokens
    assert tuple(token.logprob for token in tokens) == pytest.approx(whole.logprobs, abs=1e-5)
    assert stream.result.finish_reason == whole.finish_reason == "length"


def test_a_generation_can_be_left(wane: Any) -> None:
    for _ in wane.generate_stream(TEXT, max_tokens=500, seed=4):
        break
    assert wane.predict(TEXT).predictions


def test_models_and_report_are_read(wane: Any) -> None:
    wane.predict(TEXT)
    assert [(one.id, one.vocabulary.kind) for one in wane.models()] == [(TEXT_MODEL, "bpe"), (EVENT_MODEL, "events")]
    report = wane.report()
    (of_text,) = [one for one in report.models if one.model == TEXT_MODEL]
    assert of_text.modes["recurrent"].requests >= 1
    assert of_text.modes["recurrent"].latency["total"].count >= 1
    assert report.document["models"][0]["modes"]


def test_the_servers_refusals_are_raised(wane: Any) -> None:
    with pytest.raises(UnknownModel, match="there is no model 'nobody'"):
        wane.predict(TEXT, model="nobody")
    with pytest.raises(InvalidRequest) as raised:
        wane.predict([10**9])
    assert raised.value.field == "tokens"
    with pytest.raises(InvalidRequest):
        list(wane.generate_stream(TEXT, max_tokens=2, mode="auto", window=3))
    with pytest.raises(TooLarge):
        wane.generate([5] * 100_000)


def test_a_key_is_asked_for_and_sent(both: Both) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        told = request.headers.get("authorization")
        if told == "Bearer secret":
            return httpx.Response(200, json={"data": []})
        return httpx.Response(401, json={"code": "unauthorized", "detail": f"the key is {told}"})

    assert both("http://wane", key="secret", transport=httpx.MockTransport(respond)).models() == ()
    with pytest.raises(Unauthorized, match="the key is None"):
        both("http://wane", transport=httpx.MockTransport(respond)).models()


@pytest.mark.parametrize(
    ("content", "kind", "why"),
    [
        (b"event: token\ndata: {}\n\n", NotWane, "token_id: the field is missing"),
        (b"event: token\ndata: {\n\n", NotWane, "the body is not JSON"),
        (b'event: error\ndata: {"status": 404, "code": "unknown_model", "detail": "gone"}\n\n', UnknownModel, "gone"),
        (b"event: token\nda", Unreachable, "was cut off: it ended early"),
    ],
)
def test_a_stream_that_fails_says_why(both: Both, content: bytes, kind: type[Exception], why: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    with pytest.raises(kind, match=why):
        list(both("http://wane", transport=transport).generate_stream(TEXT))


SERVED = '"model": "m", "model_version": "1", "device": "cpu", "state": "full", "error_bound": null'
LATENCY = '"latency": {"queue_ms": 1, "compute_ms": 1, "total_ms": 2}'
WHOLE = f'{{{SERVED}, {LATENCY}, "text": "", "tokens": [1], "finish_reason": "stop", "mode": "auto", "window": null}}'


def test_a_line_of_a_stream_ends_at_a_line_feed_only(both: Both) -> None:
    strange = "".join(map(chr, (0x0B, 0x0C, 0x1C, 0x85, 0x2028, 0x2029)))
    token = '{"token_id": 1, "token": "a", "logprob": -1.0, "text": "' + strange[3:] + '"}'
    content = f"event: token\ndata: {token}\n\nevent: finish\ndata: {WHOLE}\n\n".encode()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    stream = both("http://wane", transport=transport).generate_stream(TEXT)
    assert [one.text for one in stream] == [strange[3:]]
    assert stream.result.finish_reason == "stop"
    with pytest.raises(RuntimeError, match="only once"):
        list(stream)


def test_comments_and_what_a_newer_server_adds_to_a_stream_are_passed_over(both: Both) -> None:
    token = '{"token_id": 1, "token": "a", "logprob": -1.0, "text": "a", "new": {}}'
    events = [": ping", "event: thinking\ndata: [1]", f"id: 7\nevent:token\ndata:{token}", "retry: 5", ""]
    content = "\n\n".join([*events, f": end\nevent: finish\ndata: {WHOLE}\n\n"]).encode()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    assert [one.text for one in both("http://wane", transport=transport).generate_stream(TEXT)] == ["a"]


def test_a_progress_may_have_more_fields(both: Both) -> None:
    score = f'{{{SERVED}, {LATENCY}, "perplexity": 1, "chunks": 1, "rounds": 1, "max_residual": 0}}'
    events = ('progress\ndata: {"done": 1, "total": 1, "rate": 0.5}', 'tokens\ndata: {"tokens": [1], "logprobs": [-1]}')
    content = "".join(f"event: {event}\n\n" for event in (*events, f"finish\ndata: {score}")).encode()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    assert both("http://wane", transport=transport).score(TEXT, progress=True).tokens == (1,)
