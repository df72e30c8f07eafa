"""Tests of every field of the JSON answers, over a fake engine with known answers."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.service import fake_engine
from tests.service.fake_engine import MANIFEST, FakeEngine, FakeRegistry
from wane.service.types.answer import Prediction
from wane.service.types.predict import ScoreMethod
from wane.service.types.request import GenerateRequest, PredictRequest, ScoreRequest, StepRequest

MODEL = {"model": "fake", "model_version": "3", "device": "cpu"}
LATENCY = {"queue_ms": 0.25, "compute_ms": 0.5, "total_ms": 1.0}
PREDICTIONS = [
    {"token_id": 7, "token": " the", "probability": 0.5, "logprob": -0.6931},
    {"token_id": 200, "token": "\ufffd", "probability": 0.25, "logprob": -1.3863, "bytes": [0xC3]},
]


async def test_a_prediction_has_its_model_latency_and_bounds(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/predict", json={"tokens": [1], "mode": "recurrent"})
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        **MODEL,
        "mode": "recurrent",
        "window": None,
        "predictions": PREDICTIONS,
        "latency": LATENCY,
        "state": "full",
        "error_bound": 0.25,
        "state_error_bound": 0.5,
        "top1_proved": True,
    }


CONTROLS = "".join(map(chr, (*range(0x80, 0xA0), 0x2028, 0x2029)))


async def test_controls_of_a_terminal_are_escaped_in_answers_and_messages(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U+009B begins a terminal's command, such as a change of the window's title, and JSON does not escape it."""
    text = f"é{CONTROLS}漢"
    monkeypatch.setattr(fake_engine, "PREDICTIONS", (Prediction(7, text, 0.5, -0.6931),))
    answer = await client.post("/v1/predict", json={"tokens": [1]})
    assert answer.json()["predictions"][0]["token"] == text
    assert "é" in answer.text and "漢" in answer.text and not {*CONTROLS} & {*answer.text}
    message = (await client.post("/v1/predict", json={"tokens": [1], "mode": text})).json()["detail"]
    assert message.startswith('mode is "') and not {*CONTROLS} & {*message}


async def test_both_modes_are_answered_with_their_agreement(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/predict", json={"tokens": [1], "mode": "both"})).json()
    assert answer["modes"] == {
        "recurrent": {"predictions": PREDICTIONS, "latency": LATENCY},
        "window": {"predictions": PREDICTIONS, "latency": LATENCY},
    }
    assert answer["agreement"] == {
        "top1_match": True,
        "top1_proved": True,
        "total_variation": 1e-4,
        "kl": 1e-8,
        "max_logit_difference": 1e-3,
        "state_distance": 1e-2,
        "state_error_bound": 2e-2,
        "error_bound": 1e-2,
    }


async def test_the_options_of_a_prediction_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"input": "ab", "model": "fake", "mode": "auto", "window": 3, "tolerance": 0.5, "top_k": 2, "prove": True}
    await client.post("/v1/predict", json=body)
    (asked,) = engine.asked
    assert isinstance(asked, PredictRequest) and asked.deadline is not None
    assert asked == PredictRequest(
        (97, 98), model="fake", window=3, tolerance=0.5, top_k=2, prove=True, owner="", deadline=asked.deadline
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/predict", {"input": "ab"}),
        ("/v1/predict", {"tokens": [97, 98]}),
        ("/v1/predict", {"inputs": ["ab", [97, 98]]}),
        ("/v1/score", {"input": "ab"}),
        ("/v1/score", {"tokens": [97, 98], "stream": True}),
        ("/v1/generate", {"input": "ab"}),
    ],
    ids=str,
)
async def test_the_option_truncated_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, object]
) -> None:
    (await client.post(path, json=body)).raise_for_status()
    (await client.post(path, json={**body, "truncated": True})).raise_for_status()
    asked = [one for one in engine.asked if isinstance(one, PredictRequest | ScoreRequest | GenerateRequest)]
    half = len(asked) // 2
    assert [(one.tokens, one.truncated) for one in asked] == half * [((97, 98), False)] + half * [((97, 98), True)]


async def test_a_prediction_from_a_session_sends_no_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/predict", json={"session": "s"})
    (asked,) = engine.asked
    assert isinstance(asked, PredictRequest)
    assert (asked.session, asked.tokens) == ("s", ())


async def test_other_work_runs_between_the_texts_of_a_batch(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0
    seen: list[int] = []

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def encode(text: str, deadline: float | None = None, *, document: bool = False) -> tuple[int, ...]:
        seen.append(turns)
        return (1,)

    monkeypatch.setattr(engine, "encode", encode)
    working = asyncio.create_task(others())
    await client.post("/v1/predict", json={"inputs": ["a"] * 5})
    working.cancel()
    assert len(set(seen)) == 5


async def test_a_batch_has_an_answer_for_each_input_in_order(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = (await client.post("/v1/predict", json={"inputs": ["a", " ", [2], []]})).json()
    assert {name: answer[name] for name in MODEL} == MODEL
    assert [next(iter(result)) for result in answer["results"]] == ["model", "error", "model", "error"]
    assert [request.tokens for request in engine.asked if isinstance(request, PredictRequest)] == [(97,), (2,)]
    assert answer["results"][1]["error"]["code"] == "invalid_request"


async def test_an_unexpected_error_of_one_input_is_an_internal_error_in_its_place(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.failure = ZeroDivisionError("secret")
    response = await client.post("/v1/predict", json={"inputs": ["a", [-1]]})
    assert response.status_code == 200
    assert [result["error"]["code"] for result in response.json()["results"]] == ["internal", "internal"]
    assert "secret" not in response.text
    assert "secret" in caplog.text


async def test_a_step_takes_its_position_and_key_from_headers(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    headers = {"x-wane-position": "4", "idempotency-key": "k"}
    answer = (await client.post("/v1/sessions/s/tokens", json={"tokens": [1, 2]}, headers=headers)).json()
    (asked,) = engine.asked
    assert isinstance(asked, StepRequest)
    assert asked == StepRequest("s", (1, 2), None, 4, "k", 5, asked.deadline)
    assert (answer["session"], answer["position"], answer["replayed"]) == ("s", 2, False)


async def test_a_new_session_has_a_location(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/sessions", json={"session": "mine", "mode": "window"})
    assert response.status_code == 201
    assert response.headers["location"] == "/v1/sessions/mine"
    assert response.json() == {
        **MODEL,
        "session": "mine",
        "mode": "window",
        "position": 0,
        "state": "resident",
        "error_bound": 0.0,
        "idle_s": 0.0,
    }


async def test_a_deletion_is_answered_without_a_body(client: httpx.AsyncClient) -> None:
    response = await client.delete("/v1/sessions/s")
    assert (response.status_code, response.content) == (204, b"")


async def test_a_score_has_one_log_probability_for_each_token(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = (await client.post("/v1/score", json={"input": "ab", "method": "sequential", "tolerance": 0})).json()
    assert answer == {
        **MODEL,
        "tokens": [97, 98],
        "logprobs": [-1.0, -1.0],
        "perplexity": 2.718281828,
        "chunks": 1,
        "warm_up": None,
        "rounds": 1,
        "max_residual": 0.0,
        "state": "full",
        "error_bound": 0.0,
        "latency": LATENCY,
    }
    (asked,) = engine.asked
    assert isinstance(asked, ScoreRequest)
    assert (asked.method, asked.tolerance) == (ScoreMethod.SEQUENTIAL, 0)


async def test_a_comparison_has_recurrent_mode_and_every_window(client: httpx.AsyncClient) -> None:
    body = {"tokens": [1], "windows": [1, 2], "models": ["fake", "fake"], "repeat": 3}
    answer = (await client.post("/v1/compare", json=body)).json()
    assert answer["device"] == "cpu"
    for model in answer["models"]:
        assert {name: model[name] for name in (*MODEL, "tokens", "repeat")} == {**MODEL, "tokens": 1, "repeat": 3}
        assert model["recurrent"]["agreement"] is None
        assert model["recurrent"]["latency"]["compute"] == {"p50_ms": 0.5, "p99_ms": 1.0}
        assert [line["window"] for line in model["windows"]] == [1, 2]
    assert len(answer["models"]) == 2


async def test_a_generation_is_one_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"input": "a", "max_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7, "stop": "."}
    answer = (await client.post("/v1/generate", json=body)).json()
    assert answer == {
        **MODEL,
        "text": "é",
        "tokens": [200, 200],
        "finish_reason": "length",
        "mode": "recurrent",
        "window": None,
        "state": "full",
        "error_bound": 0.0,
        "latency": LATENCY,
        "logprobs": [-0.5, -0.5],
    }
    (asked,) = engine.asked
    assert isinstance(asked, GenerateRequest)
    assert asked == GenerateRequest(
        (97,),
        max_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        seed=7,
        stop=(".",),
        owner="",
        deadline=asked.deadline,
    )
    assert engine.closed.is_set()


async def test_a_streamed_generation_has_an_event_for_each_token_and_a_last_event(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/generate", json={"tokens": [1], "max_tokens": 2, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    token, same, finish = response.text.removesuffix("\n\n").split("\n\n")
    name, data = token.split("\n")
    assert (name, json.loads(data.removeprefix("data: "))) == (
        "event: token",
        {"token_id": 200, "token": "\ufffd", "text": "", "logprob": -0.5, "bytes": [0xC3]},
    )
    assert same == token
    name, data = finish.split("\n")
    assert name == "event: finish"
    assert json.loads(data.removeprefix("data: "))["text"] == "é"


async def test_models_have_openai_s_fields_and_the_fields_of_the_manifest(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/v1/models")).json()
    assert answer["object"] == "list"
    (card,) = answer["data"]
    assert (card["id"], card["object"], card["created"]) == ("fake", "model", 1767323045)
    assert (card["family"], card["k"], card["max_window"]) == ("gated", 8, 16)
    assert card["k_epsilon"] == {"1e-1": 2, "1e-2": None, "1e-3": None, "1e-4": None}
    assert card["quality"] is None
    whole = (await client.get("/v1/models/fake")).json()
    assert whole.pop("costs") == {"step": [{"tokens": 1.0, "compute_ms": 0.25}]}
    assert {**whole, "certificate": None} == {**card, "certificate": None}


async def test_a_model_has_its_certificate_and_the_list_omits_the_curve(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    whole = (await client.get("/v1/models/fake")).json()["certificate"]
    assert whole == MANIFEST.certificate.model_dump(mode="json")
    assert whole["error_bound"] == [0.5, 0.1, 0.02]
    curves = ("state_error", "error_bound")
    assert card["certificate"] == {name: value for name, value in whole.items() if name not in curves}
    assert card["certificate"]["reason"] == "the bound is still 0.02"


async def test_readiness_lists_the_models_and_why_a_model_is_uncertified(
    client: httpx.AsyncClient, registry: FakeRegistry
) -> None:
    ready = (await client.get("/readyz")).json()
    assert ready["models"] == [{**MODEL, "certified": False, "reason": "the bound is still 0.02"}]
    registry.status = "draining"
    assert (await client.get("/readyz")).json()["models"] == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"])
async def test_a_body_is_read_as_json_with_any_content_type(client: httpx.AsyncClient, kind: str) -> None:
    response = await client.post("/v1/predict", content=b'{"tokens": [1]}', headers={"content-type": kind})
    assert response.status_code == 200
