"""Tests that the service accepts exactly the requests whose form the OpenAPI description allows.

The tests generate bodies from the description alone. They take the description's examples and add fields, remove
fields, or set fields to values at and beyond the described limits. So the tests also cover fields that are added to the
description later.

One rule differs from JSON Schema: Wane does not accept 5.0 as an integer, but JSON Schema does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend

Schema = dict[str, Any]

# A short timeout. The server checks a request's form first, so a request that times out has a valid form.
SOON = {"x-request-timeout-ms": "40"}
MODEL = [
    r"but the vocabulary has \d+ tokens",
    r"belongs to model .*, not to",
    r"a session needs expected_position or the header",
    r"the session is at position \d+, but",
    r"takes windows of 1 to \d+ tokens",
    r"window is given, but the session answers in mode",
    r"the session can be (rewound to|forked at) positions?",
    r"there is no token in the text",
    r"is only for models whose vocabulary has events",
    r"the history has \d+ tokens, but must have at most \d+, because position is \d+",
]
"""Patterns of the messages for a request of valid form that its model or its session cannot answer."""

JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, False, 0, -1, 1.5, -0.5, 2**63, -(2**70), 1e300, "", "a b", "x" * 300, [], [[]], {}]
)
PATTERNS = {"session": ["demo", "s", "a" * 128, "a" * 129, "a b", "a/b", "", "é", "a\n", ".", "..", "..."]}


def is_integer(_: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def pattern(_: Validator, wanted: str, value: object, __: Schema) -> Iterator[ValidationError]:
    """Checks a pattern as ECMAScript does: `$` matches only the end of the text, and not before a final line break."""
    if isinstance(value, str) and re.search(re.sub(r"\$$", r"\\Z", wanted), value) is None:
        yield ValidationError(f"{value!r} does not match {wanted!r}")


StrictValidator = extend(
    Draft202012Validator,
    {"pattern": pattern},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer),
)


def copies(item: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[list[Any]]:
    """Returns a strategy for lists that repeat one value `size` times."""
    return item.map(lambda one: [one] * size)


def near(schema: Schema, name: str = "") -> st.SearchStrategy[Any]:
    """Returns a strategy for values that the schema allows, and values just beyond its limits."""
    if "enum" in schema:
        return st.sampled_from([*schema["enum"], "other"])
    if "anyOf" in schema:
        return st.one_of([near(one, name) for one in schema["anyOf"]])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer" | "number" as kind:
            limits = {
                int(schema[key])
                for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
                if key in schema
            }
            edges = [limit + by for limit in limits for by in (-1, 0, 1)] + [0, 1, 5, 10**7]
            return st.sampled_from(edges if kind == "integer" else [*edges, 0.5, 1e-9])
        case "string":
            if "pattern" in schema:
                return st.sampled_from(PATTERNS["session"])
            sizes = [size + by for key in ("minLength", "maxLength") if (size := schema.get(key)) for by in (-1, 0, 1)]
            return st.sampled_from(["x" * size for size in sizes] + ["", "The history", "é\n", "x" * 300])
        case "array":
            item = near(schema["items"], name)
            sizes = [
                size + by for key in ("minItems", "maxItems") if (size := schema.get(key, 0)) < 300 for by in (-1, 0, 1)
            ]
            small = st.lists(item, max_size=2)
            return st.one_of(small, *(copies(item, size) for size in (*sizes, 40) if size > 0))
        case "object" if "properties" not in schema:
            names = st.sampled_from(["0", "5", "07", "-1", "x", "99999"])
            return st.dictionaries(names, near(schema["additionalProperties"], name), max_size=2)
        case "object":
            return objects(schema)
    raise AssertionError(f"an unknown kind of schema: {schema}")


def objects(schema: Schema, examples: list[Any] | None = None) -> st.SearchStrategy[Any]:
    """Returns a strategy for objects. An object starts as an example or with the required fields. Some of its fields
    are then added, removed or changed."""
    fields = {name: near(one, name) for name, one in schema["properties"].items()}

    @st.composite
    def made(draw: st.DrawFn) -> Any:
        found = dict(draw(st.sampled_from(examples))) if examples else {}
        for name in schema.get("required", ()):
            found.setdefault(name, draw(fields[name]))
        for rule in (
            schema.get("oneOf", ())
            if not found.keys() & {"input", "tokens", "events", "inputs", "rewind", "session"}
            else ()
        ):
            name = rule["required"][0]
            if draw(st.booleans()):
                found[name] = draw(fields[name])
                break
        for _ in range(draw(st.integers(0, 2))):
            name = draw(st.sampled_from([*fields, "nonsense"] if fields else ["nonsense"]))
            if draw(st.booleans()) and name in found:
                del found[name]
            elif name in fields and draw(st.integers(0, 5)):
                found[name] = draw(fields[name])
            elif draw(st.booleans()):
                found[name] = draw(JUNK)
        return found

    return made()


def failures(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the error of a failed request, or the errors of the items of a batch."""
    document = response.json() if "json" in response.headers.get("content-type", "") else {}
    if not response.is_success:
        return [document]
    if not isinstance(document, dict):
        return []
    errors = document.get("error") or [one.get("error") for one in document.get("results", ())]
    return [error for error in errors if error is not None]


def rejected(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the errors of the response that concern the form of the request."""
    return [
        one
        for one in failures(response)
        if one.get("status", response.status_code) in (400, 422)
        and not any(re.search(said, str(one.get("detail", one))) for said in MODEL)
    ]


@pytest.fixture(scope="module")
def openapi(http: httpx.Client) -> Schema:
    for session in ("demo", "s"):
        http.post("/v1/sessions", json={"session": session})
    document: Schema = http.get("/openapi.json").json()
    return document


def resolved(part: Any, schemas: dict[str, Any]) -> Any:
    """Returns a schema in which each reference is replaced by the schema that it refers to."""
    if isinstance(part, list):
        return [resolved(item, schemas) for item in part]
    if not isinstance(part, dict):
        return part
    inner = {name: resolved(item, schemas) for name, item in part.items() if name != "$ref"}
    if "$ref" not in part:
        return inner
    return resolved(schemas[part["$ref"].rpartition("/")[2]], schemas) | inner


def operation(openapi: Schema, path: str) -> tuple[Schema, list[Any]]:
    content = openapi["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return resolved(content["schema"], openapi["components"]["schemas"]), [
        one["value"] for one in content["examples"].values()
    ]


BODIES = [
    "/v1/predict",
    "/v1/compare",
    "/v1/score",
    "/v1/generate",
    "/v1/sessions",
    "/v1/sessions/{session}/tokens",
    "/v1/sessions/{session}/rewind",
    "/v1/sessions/{session}/fork",
    "/v1/sessions/{session}/continuations",
    "/v1/sessions/tokens",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/v2/repository/index",
    "/v2/repository/models/{name}/load",
    "/v2/repository/models/{name}/unload",
]


TENSORS = ["/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"]
"""The paths that `BODIES` leaves out. Their bodies have rules that a schema cannot express, such as the number of
values that a shape requires."""


def test_every_body_of_the_description_is_tested(openapi: Schema) -> None:
    assert sorted([*BODIES, *TENSORS]) == sorted(
        path for path, operations in openapi["paths"].items() if "post" in operations
    )


@pytest.mark.parametrize("path", BODIES)
def test_bodies_are_accepted_if_and_only_if_the_description_allows_them(
    http: httpx.Client, openapi: Schema, path: str
) -> None:
    schema, examples = operation(openapi, path)
    validator = StrictValidator(schema)
    address = path.replace("{session}", "s").replace("{name}", "nobody")

    tried: set[bool] = set()

    @settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(objects(schema, examples))
    def check(body: Any) -> None:
        response = http.post(address, content=json.dumps(body), headers=SOON)
        tried.add(allowed := validator.is_valid(body))
        if allowed:
            assert not rejected(response), (body, response.text[:300])
        else:
            assert failures(response), (body, response.text[:300])

    check()
    assert tried == {True, False}


@pytest.mark.parametrize("value", [*PATTERNS["session"], "~._-:A0"])
def test_session_ids_agree_with_their_description(http: httpx.Client, openapi: Schema, value: str) -> None:
    for path in ("/v1/sessions/{session}", "/v1/sessions/{session}/tokens"):
        for method, described in openapi["paths"][path].items():
            (schema,) = [one["schema"] for one in described["parameters"] if one["in"] == "path"]
            if value in ("", "a/b", "a\n", ".", ".."):
                continue  # clients rewrite a path with such a name, or no route matches the path
            address = path.replace("{session}", quote(value, safe=""))
            response = http.request(method, address, json={"tokens": [5]} if method == "post" else None)
            assert bool(rejected(response)) is not StrictValidator(schema).is_valid(value), (method, response.text)
    http.post("/v1/sessions", json={"session": "s"})


HEADERS = {
    "x-wane-position": ["0", "007", "9" * 15, "9" * 16, "-1", "1.5", "+1", "x", "1e3"],
    "idempotency-key": ["", "k", "k" * 255, "k" * 256],
    "x-request-timeout-ms": ["1", "0040", "9" * 9, "9" * 10, "0", "000", "-5", "x", "1.5"],
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_agree_with_their_description(http: httpx.Client, openapi: Schema, name: str) -> None:
    path = "/v1/sessions/{session}/tokens"
    (schema,) = [one["schema"] for one in openapi["paths"][path]["post"]["parameters"] if one["name"] == name]
    http.post("/v1/sessions", json={"session": "s"})
    judged = set()
    for value in HEADERS[name]:
        response = http.post(path.replace("{session}", "s"), json={"tokens": [5]}, headers={name: value})
        allowed = StrictValidator(schema).is_valid(value)
        assert bool(rejected(response)) is not allowed, (value, response.text)
        judged.add(allowed)
    assert judged == {True, False}


def test_every_operation_describes_the_timeout_header(openapi: Schema) -> None:
    for operations in openapi["paths"].values():
        for described in operations.values():
            assert "x-request-timeout-ms" in [one["name"] for one in described["parameters"]]


def test_limits_from_settings_have_their_values(openapi: Schema) -> None:
    text = json.dumps(openapi)
    assert "x-at-most" not in text
    schema, _ = operation(openapi, "/v1/predict")
    assert schema["properties"]["inputs"]["anyOf"][0]["maxItems"] == 256
    assert schema["properties"]["top_k"]["anyOf"][0]["maximum"] == 100
