"""Tests of the cost of requests: every route with a body has one, and it is refused over the limits."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.routing import Route

from tests.service.problems import assert_problem
from wane.service.api.openapi import subclasses
from wane.service.api.schemas.completions import CompletionBody
from wane.service.api.schemas.inference import InferBody, InputTensor
from wane.service.api.schemas.sessions import ContinuationsBody, SessionStepBody, StepsBody
from wane.service.api.tensors import of_outputs
from wane.service.app import ROUTES, Application
from wane.service.errors import InvalidRequest, TooLarge
from wane.service.settings import Settings
from wane.service.types.body import Body, EventsBody
from wane.service.types.cost import Cost
from wane.service.types.generate import GenerateBody
from wane.service.types.predict import CompareBody, PredictBody, ScoreBody

SETTINGS = Settings()


def test_every_route_with_a_body_has_a_cost(app: Application) -> None:
    """Walks the routes. A route that reads a body describes the body's class. Only these bodies cost one row always."""
    document = app.openapi()
    by_name = {body.__name__: body for body in subclasses(Body)}
    plain = set()
    for route in ROUTES:
        if not isinstance(route, Route) or not route.include_in_schema:
            continue
        for method in (route.methods or set()) - {"GET", "HEAD", "DELETE"}:
            described = document["paths"][route.path][method.lower()]["requestBody"]["content"]["application/json"]
            body = by_name[described["schema"]["$ref"].rpartition("/")[2]]
            if body.cost is Body.cost:
                plain.add(body.__name__)
    assert plain == {"ForkBody", "IndexBody", "LoadBody", "RewindBody", "TokenizeBody", "UnloadBody"}


@pytest.mark.parametrize(
    ("body", "cost"),
    [
        (PredictBody(tokens=(5, 6), top_k=7), (1, 2, 7)),
        (PredictBody(inputs=((5, 6), "text", (7,)), top_k=7), (3, 3, 21)),
        (ScoreBody(tokens=(5, 6), top_k=3), (1, 2, 6)),
        (ScoreBody(tokens=(5, 6), top_k=3, stream=True), (1, 2, 6)),
        (GenerateBody(tokens=(5,), max_tokens=10, top_logprobs=3), (1, 1, 30)),
        (GenerateBody(tokens=(5,), max_tokens=10, top_logprobs=3, stream=True), (1, 1, 0)),
        (StepsBody(steps=(SessionStepBody(session="s", tokens=(5,), top_k=3),) * 4), (4, 4, 12)),
        (ContinuationsBody(continuations=((5, 6), EventsBody(events=("a",)), "text"), top_k=4), (3, 3, 18)),
        (CompletionBody(model="m", prompt=(5, 6, 7)), (1, 3, 0)),
        (CompletionBody(model="m", prompt=(5, 6, 7), n=4, max_tokens=10, logprobs=5), (4, 12, 200)),
        (CompletionBody(model="m", prompt=((5, 6), (7,)), n=4, max_tokens=0, echo=True, logprobs=5), (8, 12, 60)),
        (CompletionBody(model="m", prompt=("a", "b"), n=4, max_tokens=10, logprobs=0, stream=True), (8, 0, 0)),
    ],
)
def test_costs(body: Any, cost: tuple[int, int, int]) -> None:
    assert body.cost(SETTINGS)[:3] == cost


@pytest.mark.parametrize("field", ["rows", "tokens", "listed"])
def test_a_cost_is_refused_one_over_its_limit(field: str) -> None:
    most = SETTINGS.max_batch_inputs if field == "rows" else SETTINGS.max_scored_tokens
    values: dict[str, Any] = {field: most}
    Cost(**values).check(SETTINGS)
    with pytest.raises(InvalidRequest if field == "rows" else TooLarge, match=str(most)):
        Cost(**(values | {field: most + 1})).check(SETTINGS)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/generate", {"tokens": [5], "max_tokens": 4096, "top_logprobs": 100}, "max_tokens or top_logprobs"),
        ("/v1/score", {"tokens": [5] * 3000, "top_k": 100}, "lower top_k"),
        ("/v1/score", {"input": "the game " * 3000, "top_k": 100}, "lower top_k"),
    ],
)
def test_an_answer_that_would_list_too_many_tokens_is_413(
    http: httpx.Client, path: str, body: dict[str, object], said: str
) -> None:
    assert said in assert_problem(http.post(path, json=body), 413, "too_large")["detail"]


@pytest.mark.parametrize("echo", [True, False])
def test_a_completion_that_would_list_too_many_tokens_is_413(http: httpx.Client, echo: bool) -> None:
    body = {"model": "rnn-stable", "prompt": [7] * 2600, "n": 256, "logprobs": 100, "echo": echo}
    response = http.post("/v1/completions", json=body | {"max_tokens": 0 if echo else 4096})
    assert response.status_code == 413 and "lower n, max_tokens or logprobs" in response.text
    long = http.post("/v1/completions", json={"model": "rnn-stable", "prompt": [7] * 1025, "n": 256})
    assert long.status_code == 413 and "262400 tokens" in long.text
    assert http.post("/v1/completions", json=body | {"n": 257}).json()["error"]["param"] == "n"


def test_a_comparison_counts_as_each_mode_that_it_measures_of_each_model() -> None:
    body = CompareBody(tokens=(5, 6), models=("a", "b"), windows=(1, 2))
    assert body.cost(SETTINGS) == Cost(1, 2, compared=5)
    assert CompareBody(tokens=(5, 6), windows=(1, 2)).cost(SETTINGS).compared == 2


@pytest.mark.parametrize(("binary", "fits"), [(False, 27_962), (True, 83_886)])
def test_the_bytes_of_logits_are_refused_over_the_limit(binary: bool, fits: int) -> None:
    settings = Settings(max_answer_bytes=2**25)
    of_outputs(100, [(fits, binary)]).check(settings)
    with pytest.raises(TooLarge, match=r"up to 3355\d+ bytes, but at most 33554432 are allowed: send fewer rows"):
        of_outputs(100, [(fits + 1, binary)]).check(settings)


def test_one_long_row_of_many_that_are_scored_is_413(http: httpx.Client) -> None:
    """Each row of an answer is as long as the longest."""
    texts = ["the game " * 30_000, *["the"] * 255]
    tensor = {"name": "text", "shape": [256], "datatype": "BYTES", "data": texts}
    body = {"inputs": [tensor], "outputs": [{"name": "token_logprobs"}]}
    response = http.post("/v2/models/rnn-stable/infer", json=body)
    assert response.status_code == 413 and "ask for binary outputs" in response.text


def test_the_rows_of_an_inference_are_those_of_its_tensor() -> None:
    tensor = InputTensor(name="tokens", shape=[300, 2], datatype="INT64", data=[5] * 600)
    cost = InferBody(inputs=[tensor]).cost(SETTINGS)
    with pytest.raises(InvalidRequest, match=r"^tokens asks for 300 rows"):
        cost.check(SETTINGS)
