"""Tests that the server accepts the examples of the OpenAPI description, and that the answers match the description's
schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from inspect import get_annotations
from pkgutil import iter_modules
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from msgspec.structs import fields
from pydantic import TypeAdapter

from tests.service.problems import is_inference_protocol
from wane.service import types
from wane.service.api import routes, schemas
from wane.service.api.encode import json_bytes
from wane.service.api.schemas.sessions import StepBody
from wane.service.engine import stats
from wane.service.registry import registry
from wane.service.types.body import Body
from wane.service.types.generate import GenerateBody
from wane.service.types.predict import CompareBody, PredictBody, ScoreBody, ScoreMethod
from wane.service.types.request import CompareRequest, GenerateRequest, PredictRequest, ScoreRequest, StepRequest

Example = tuple[str, str, object, dict[str, Any]]
"""An example request: its method, its path with example values for the path's parameters, its body, and the schema of
its answer."""


@pytest.fixture(scope="module")
def openapi(http: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = http.get("/openapi.json").json()
    return document


def examples(openapi: dict[str, Any]) -> Iterator[Example]:
    """Yields every example request, in an order in which all succeed. A session is created before it is read or
    deleted, and a model is unloaded before it is loaded."""
    late: list[Example] = []
    for template, operations in openapi["paths"].items():
        for method, operation in operations.items():
            path = template
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and "examples" in parameter["schema"]:
                    path = path.replace(f"{{{parameter['name']}}}", parameter["schema"]["examples"][0])
            answer = next(iter(operation["responses"].values()))
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            for example in content.get("examples", {}).values():
                yield method.upper(), path, example["value"], answer
            if not content:
                late.append((method.upper(), path, None, answer))
    yield from sorted(late, key=lambda example: example[0] == "DELETE")


def assert_as_described(name: str, document: object, openapi: dict[str, Any]) -> None:
    """Checks that an answer's document matches the schema `name` of the description. The document must also stay the
    same when the schema's class validates and serializes it."""
    kind = RESULTS[name]
    converted = msgspec.convert(document, kind, dec_hook=lambda inner, value: TypeAdapter(inner).validate_python(value))
    assert json.loads(json_bytes(converted)) == document
    if name in openapi["components"]["schemas"]:  # the description has no schemas for the events of streams
        Draft202012Validator({"$ref": f"#/components/schemas/{name}", **openapi}).validate(document)


DECLARED = [
    import_module(module.name)
    for package in (types, schemas, routes)
    for module in iter_modules(package.__path__, f"{package.__name__}.")
]
RESULTS: dict[str, Any] = {}
for module in (registry, stats, *DECLARED):
    RESULTS |= vars(module)
OPENAI = ("/v1/completions", "/tokenize", "/detokenize", "/tokenizer_info")
"""The paths whose error documents have the format of OpenAI's API."""
EVENTS = {
    "/v1/generate": {"token": "GeneratedToken", "finish": "Finish"},
    "/v1/score": {"progress": "ScoreProgress", "tokens": "ScoredTokens", "finish": "ScoreSummary"},
}


def names_in(schema: dict[str, Any]) -> list[str]:
    schema = schema.get("items", schema)
    return [one["$ref"].rsplit("/", 1)[-1] for one in schema.get("anyOf", [schema]) if "$ref" in one]


def test_every_example_runs_and_its_answer_matches_its_schema(http: httpx.Client, openapi: dict[str, Any]) -> None:
    checked = 0
    for method, path, body, answer in examples(openapi):
        response = http.request(method, path, json=body)
        assert response.is_success, (method, path, body, response.text)
        kind = response.headers.get("content-type", "")
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        if kind == "application/json" and (names := names_in(schema)):
            if "token_id" in response.json():
                names = ["StepColumns"]
            batch = "results" in response.json() and "Batch" in names
            answered = response.json() if schema.get("type") == "array" else [response.json()]
            for document in answered:
                assert_as_described("Batch" if batch else names[0], document, openapi)
            checked += 1
        if kind.startswith("text/event-stream"):
            streamed = events(response.text)
            assert [event for event, _ in streamed].index("finish") == len(streamed) - 1
            for event, document in streamed:
                assert_as_described(EVENTS[path][event], document, openapi)
    assert checked >= 15
    assert http.get("/v1/sessions/demo").status_code == 404  # the last example has deleted the session


def events(text: str) -> list[tuple[str, Any]]:
    parts = [event.split("\n") for event in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def test_every_route_with_a_body_has_an_example(openapi: dict[str, Any]) -> None:
    with_example = {path for _, path, body, _ in examples(openapi) if body is not None}
    assert with_example == {
        path.replace("{session}", "demo").replace("{version}", "2").replace("{name}", "gated-stable-64")
        for path, operations in openapi["paths"].items()
        if "post" in operations
    }


def test_every_json_answer_has_a_schema(app: FastAPI) -> None:
    for path, operations in app.openapi()["paths"].items():
        for operation in operations.values():
            answer = next(iter(operation["responses"].values()))
            content = answer.get("content", {}).get("application/json")
            assert content is None or names_in(content["schema"]), path


def test_everything_in_the_description_is_described(app: FastAPI) -> None:
    """Every field of every request and answer, every route and every parameter has a text, and every route a group."""
    document = app.openapi()
    fields = list(described_fields(document))
    assert len(fields) > 500
    assert [path for path, field in fields if not field.get("description")] == []
    groups = {group["name"] for group in document["tags"]}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"] and operation["description"], path
            assert operation["tags"] and groups.issuperset(operation["tags"]), path
            assert all(parameter["description"] for parameter in operation["parameters"]), path


def described_fields(part: object, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the path and the schema of every field in a part of a description, without those of the rules, which say
    more about a field that is described elsewhere."""
    if isinstance(part, list):
        for index, inner in enumerate(part):
            yield from described_fields(inner, f"{path}[{index}]")
    elif isinstance(part, dict):
        if isinstance(part.get("properties"), dict) and part.get("type") == "object":
            yield from ((f"{path}.{name}", field) for name, field in part["properties"].items())
        for name, inner in part.items():
            yield from described_fields(inner, f"{path}.{name}")


def test_metrics_are_described_as_text(app: FastAPI) -> None:
    (kind,) = app.openapi()["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert kind == "text/plain"


def test_the_description_contains_no_details_of_the_source_code(app: FastAPI) -> None:
    description = app.openapi()["info"]["description"]
    assert "recurrent models" in description and "ASGI" not in description


def test_the_description_lists_the_score_methods(http: httpx.Client, openapi: dict[str, Any]) -> None:
    body = openapi["components"]["schemas"]["ScoreBody"]
    assert openapi["components"]["schemas"]["ScoreMethod"]["enum"] == [method.value for method in ScoreMethod]
    assert body["properties"]["method"]["anyOf"][0]["$ref"] == "#/components/schemas/ScoreMethod"
    for method in ScoreMethod:
        response = http.post("/v1/score", json={"tokens": [5, 6], "method": method.value})
        assert response.is_success


def test_every_failure_is_described_as_a_problem(app: FastAPI) -> None:
    for path, operations in app.openapi()["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            other = is_inference_protocol(path) or path in OPENAI
            kind = "application/json" if other else "application/problem+json"
            assert list(responses["default"]["content"]) == [kind], path
            assert "422" not in responses  # the framework's own error response, which the server never sends


def test_every_reference_of_the_description_is_defined(app: FastAPI) -> None:
    document = app.openapi()
    text = json.dumps(document)
    assert "$defs" not in text
    for reference in {part.split('"')[0] for part in text.split('"$ref": "')[1:]}:
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("body", "request_type"),
    [
        (PredictBody, PredictRequest),
        (CompareBody, CompareRequest),
        (ScoreBody, ScoreRequest),
        (GenerateBody, GenerateRequest),
    ],
)
def test_each_field_of_a_request_is_declared_once(body: type[Body], request_type: type[Body]) -> None:
    """The engine's request inherits the body's fields. It declares again only those that have another type, because
    the server converts them."""
    assert issubclass(request_type, body)
    own = set(get_annotations(request_type))
    assert own & set(body.__struct_fields__) <= {"tokens", "stop"}


def test_the_defaults_of_a_step_are_the_engine_s() -> None:
    body, request = ({one.name: one.default for one in fields(kind)} for kind in (StepBody, StepRequest))
    shared = body.keys() & request.keys() - {"tokens"}
    assert len(shared) > 4
    assert [name for name in shared if body[name] != request[name]] == []
