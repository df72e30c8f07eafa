"""Completes the OpenAPI description: the schemas of results, the limits from the settings, and the timeout header."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.json import schema_components
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from wane.service.api.body import ENCODING, WBITS
from wane.service.api.exchange import TIMEOUT, TIMEOUT_HEADER
from wane.service.api.faults import limit_of
from wane.service.api.schemas.sessions import StreamBody
from wane.service.settings import Settings
from wane.service.types.answer import Failed
from wane.service.types.body import AT_LEAST, AT_MOST, OF_TOKENS, Body, anchored
from wane.service.types.common import REFERENCE, any_of

BOUNDS = {"array": "maxItems", "integer": "maximum"}

GROUPS = [
    {"name": name, "description": description}
    for name, description in {
        "predict": "Predictions, comparisons and scores",
        "generate": "Generation",
        "sessions": "Sessions",
        "models": "Models, vocabularies and measurements",
        "openai": "Completions, as in OpenAI's API",
        "tokenizer": "The tokenizer, as in vLLM",
        "inference": "The Open Inference Protocol",
        "repository": "The model repository of the Open Inference Protocol",
        "operations": "Operation of the server",
    }.items()
]
"""The groups of routes, in the order of the page `/docs`."""


def headers(described: Mapping[str, tuple[str, Mapping[str, object]]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the description of headers, with a text and a JSON schema for each header. A route that reads the headers
    itself is faster than a route with the framework's header parameters."""
    return {
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string", **form}}
            for name, (text, form) in described.items()
        ]
    }


TIMEOUT_TEXT = "the request's timeout in milliseconds; the server's own limit replaces a larger value"
OF_ALL = headers({TIMEOUT_HEADER: (TIMEOUT_TEXT, {"pattern": anchored(TIMEOUT)})})["parameters"]
OF_BODIES = headers({ENCODING: ("the compression of the body", {"enum": [*WBITS, "identity"]})})["parameters"]
MODEL_PARAMETER = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "the model's name",
    "schema": {"type": "string", "examples": ["gated-stable-64"]},
}

EVENTS: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}

KINDS: list[type] = [Failed, StreamBody]
"""The classes of the results in the description."""

MEANING = re.compile(r"((?:`\w+`(?:, | and ))*`\w+`):\s")
"""In a docstring, the names of fields before their meaning, such as "`bounded`: the number of bounds". The meaning ends
before the next names or at the end of the paragraph."""


def answers(
    *kinds: type,
    status: int | str = 200,
    media: str = "application/json",
    is_list: bool = False,
    streams: bool = False,
    **more: object,
) -> dict[int | str, dict[str, Any]]:
    """Returns FastAPI's description of the answers of a route: results of one of the classes `kinds` or, if `is_list`,
    lists of them. If `streams`, the route also answers with server-sent events."""
    KINDS.extend(kinds)
    schema = any_of(*kinds) if len(kinds) > 1 else any_of(*kinds)["anyOf"][0]
    if is_list:
        schema = {"type": "array", "items": schema}
    content: dict[str, Any] = {media: {"schema": schema}}
    return {status: {"content": content | (EVENTS if streams else {}), **more}}


def json_body(model: type[Body], *, required: bool = True) -> dict[str, Any]:
    """Returns the description of the body of a route that decodes `model`, with the model's examples."""
    KINDS.append(model)
    examples = {f"example {number}": {"value": value} for number, value in enumerate(model.examples, 1)}
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(name=model.__name__)}, "examples": examples}}
    return {"requestBody": {"required": required, "content": content}}


def bodies(kind: type[Body]) -> Iterator[type[Body]]:
    """Yields the subclasses of a body type, and their subclasses."""
    for body in kind.__subclasses__():
        yield body
        yield from bodies(body)


def complete(document: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Adds the schemas, the limits and the timeout header to the OpenAPI description that FastAPI generated."""
    manifests: set[type[BaseModel]] = set()  # pydantic describes the classes of the manifest

    def reference(kind: type) -> dict[str, Any]:
        manifests.add(kind)
        return {"$ref": REFERENCE.format(name=kind.__name__)}

    _, schemas = schema_components(KINDS, schema_hook=reference, ref_template=REFERENCE)
    described = models_json_schema(
        [(kind, "serialization") for kind in manifests], ref_template=REFERENCE.format(name="{model}")
    )
    schemas |= described[1]["$defs"]
    for body in bodies(Body):
        if body.__name__ in schemas:
            schemas[body.__name__] |= body.several()
            properties = schemas[body.__name__]["properties"]
            properties |= body.overrides
            for name in properties.keys() - {*schemas[body.__name__].get("required", ())}:
                properties[name] = nullable(properties[name])
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    for schema in _schemas(document):
        describe_fields(schema)
        if AT_LEAST in schema:
            schema["minimum"] = schema.pop(AT_LEAST)
        if AT_MOST not in schema:
            continue
        most = limit_of(schema.pop(AT_MOST), settings)
        schema.pop(OF_TOKENS, None)
        for option in (schema, *schema.get("anyOf", ())):
            if most is not None and option.get("type") in BOUNDS:
                option.pop("exclusiveMaximum", None)
                option[BOUNDS[option["type"]]] = most
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["summary"] = operation["description"].partition(".")[0].replace("\n", " ")
            parameters = operation.setdefault("parameters", [])
            parameters[:] = [MODEL_PARAMETER if parameter["name"] == "name" else parameter for parameter in parameters]
            parameters += (OF_BODIES if "requestBody" in operation else []) + OF_ALL
    return document


def describe_fields(schema: dict[str, Any]) -> None:
    """Describes the fields of an object as the docstring of its class does (see `MEANING`), and a field that may be
    null as its value is described."""
    fields = schema.get("properties", {})
    for paragraph in str(schema.get("description", "")).split("\n\n"):
        _, *parts = MEANING.split(paragraph)
        for names, text in zip(parts[::2], parts[1::2], strict=True):
            for name in re.findall(r"\w+", names):
                if name in fields:
                    fields[name].setdefault("description", " ".join(text.split()))
    for field in fields.values():
        for option in field.get("anyOf", ()):
            if "description" in option:
                field.setdefault("description", option.pop("description"))


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a field that may be absent. A null counts as absent (see `faults.drop_nulls`)."""
    null = {"type": "null"}
    if null in schema.get("anyOf", ()):
        return schema
    outside: dict[str, Any] = {name: schema[name] for name in ("description", "default") if name in schema}
    inside = {name: value for name, value in schema.items() if name not in outside}
    return {"anyOf": [inside, null]} | outside


def _schemas(part: object) -> Iterator[dict[str, Any]]:
    """Yields every JSON object in the description."""
    if isinstance(part, dict):
        yield part
        for inner in part.values():
            yield from _schemas(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _schemas(inner)
