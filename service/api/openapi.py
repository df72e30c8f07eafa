"""Completes the OpenAPI description: the schemas of results, the limits from the settings, and the timeout header."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain, pairwise
from typing import Any, TypeVar

from fastapi import APIRouter
from msgspec.json import schema_components
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from wane.models.layer_registry import Frozen
from wane.service.api.body import ENCODING, WBITS
from wane.service.api.exchange import TIMEOUT, TIMEOUT_HEADER
from wane.service.api.schemas.sessions import StreamBody
from wane.service.settings import Settings
from wane.service.types.answer import Failed
from wane.service.types.body import AT_LEAST, AT_MOST, Body, anchored
from wane.service.types.common import REFERENCE, Result, any_of

BOUNDS = {"array": "maxItems", "integer": "maximum"}

SOCKET = """Sessions

`WS /v1/sessions/{session}/stream` serves a session over a WebSocket. Each message is a step or a rewind, with the \
fields of `StreamBody`. The server answers each message with an `Answer`, in the order of the messages.

    -> {"tokens": [5]}              <- {"predictions": [...], "position": 1, ...}    like the answer of POST .../tokens
    -> {"tokens": [5], "create": true}                                               creates the session if necessary
    -> {"rewind": 0}                <- {"predictions": [...], "position": 0, ...}    the prediction at that position
    -> {"tokens": []}               <- {"error": {"status": 422, ...}}               a problem document

The server answers one message at a time, and queues the messages that arrive meanwhile. After a message over its \
key's rate, the server answers the next message when the rate allows it, or after a second. The socket stays open \
after a failure that leaves the session at the position that the client expects. After any other failure, the server \
sends a problem document and closes the socket with one of these codes. `*` marks a case in which the server sends no \
problem document.

    1002 * a malformed frame
    1007 * a text that is not UTF-8
    1008   a missing, wrong or revoked key; * a message that comes too slowly, or in too many frames
    1009 * a message longer than the largest accepted body
    1011   an unexpected failure; the server's log has the error under the request id
    1012   the server is loading or stopping, or it cannot reach its session store: connect again
    1013   the key exceeded its rate when the socket was opened; * the server receives too many bytes: try later
    4404   an unknown or deleted session. The server sends this code after the socket's first message, because that
           message may create the session
    4409   the session is not at the expected position, the idempotency key of the last step was sent with another step,
           or the session's tokens are from another tokenizer than that of the served version
"""
"""The description of the group `sessions`. OpenAPI cannot describe the WebSocket route."""

GROUPS = [
    {"name": name, "description": description}
    for name, description in {
        "predict": "Predictions, comparisons and scores",
        "generate": "Generation",
        "sessions": SOCKET,
        "models": "Models, vocabularies and measurements",
        "openai": "Completions, as in OpenAI's API",
        "tokenizer": "The tokenizer, as in vLLM",
        "inference": "The Open Inference Protocol",
        "repository": "The model repository of the Open Inference Protocol",
        "operations": "Operation of the server",
    }.items()
]
"""The groups of routes, in the order of the page `/docs`."""


def parameters_in(place: str, described: Mapping[str, tuple[str, Mapping[str, object]]]) -> list[dict[str, Any]]:
    """Returns the description of parameters in the header, query or path, with a text and a JSON schema for each. A
    route that reads its parameters itself is faster than a route with the framework's parameters."""
    return [
        {
            "name": name,
            "in": place,
            "required": place == "path",
            "description": text,
            "schema": {"type": "string", **form},
        }
        for name, (text, form) in described.items()
    ]


TIMEOUT_TEXT = "the request's timeout in milliseconds; the server's own limit replaces a larger value"
OF_ALL = parameters_in("header", {TIMEOUT_HEADER: (TIMEOUT_TEXT, {"pattern": anchored(TIMEOUT)})})
OF_BODIES = parameters_in("header", {ENCODING: ("the compression of the body", {"enum": [*WBITS, "identity"]})})
(MODEL_PARAMETER,) = parameters_in("path", {"name": ("the model's name", {"examples": ["gated-stable-64"]})})

EVENTS: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}

KINDS: list[type] = [Failed, StreamBody]
"""The classes of the results in the description."""

Responses = Mapping[int | str, dict[str, Any]]
NO_ANSWERS: Mapping[Any, Any] = {}
Handler = TypeVar("Handler", bound=Callable[..., Any])


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
    if not kinds:
        return {}
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


class Router(APIRouter):
    """A router whose handlers read the requests and make the responses themselves. The classes of a route's body and
    answers describe it (see `answers`)."""

    def on_get(
        self, path: str, *kinds: type, responses: Responses = NO_ANSWERS, **described: Any
    ) -> Callable[[Handler], Handler]:
        """Registers a handler for GET and HEAD."""

        def register(endpoint: Handler) -> Handler:
            self.get(path, response_model=None, responses={**answers(*kinds), **responses}, **described)(endpoint)
            return self.head(path, include_in_schema=False)(endpoint)

        return register

    def on_post(
        self,
        path: str,
        body: type[Body],
        *kinds: type,
        responses: Responses = NO_ANSWERS,
        extra: Mapping[str, Any] = NO_ANSWERS,
        streams: bool = False,
        required: bool = True,
        **described: Any,
    ) -> Callable[[Handler], Handler]:
        """Registers a handler for POST, which decodes `body`. `extra` is a further part of the description, such as
        headers."""
        described |= {"openapi_extra": {**json_body(body, required=required), **extra}}
        answered = {**answers(*kinds, streams=streams), **responses}
        return self.post(path, response_model=None, responses=answered, **described)


K = TypeVar("K")


def subclasses(kind: type[K]) -> Iterator[type[K]]:
    """Yields the subclasses of a class, and their subclasses."""
    for inner in kind.__subclasses__():
        yield inner
        yield from subclasses(inner)


@cache
def field_texts(module: str) -> dict[tuple[str, str], str]:
    """Returns the texts below the fields of a module's classes, by the names of the class and the field."""
    texts: dict[tuple[str, str], str] = {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for kind in (statement for statement in tree.body if isinstance(statement, ast.ClassDef)):
        for pair in pairwise(kind.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                    texts[kind.name, name] = " ".join(text.split())
    return texts


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
    for kind in chain(subclasses(Body), subclasses(Result), subclasses(Frozen)):
        for base in reversed([base for base in kind.__mro__ if base.__module__.startswith("wane.")]):
            for name, field in schemas.get(kind.__name__, {}).get("properties", {}).items():
                if (text := field_texts(base.__module__).get((base.__name__, name))) is not None:
                    field["description"] = text
    for body in subclasses(Body):
        if body.__name__ in schemas:
            schemas[body.__name__] |= body.several()
            properties = schemas[body.__name__]["properties"]
            properties |= body.overrides
            for name in properties.keys() - {*schemas[body.__name__].get("required", ())}:
                properties[name] = nullable(properties[name])
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "an API key"}}
    document["security"] = [{}, {"key": []}]  # a server without keys ignores them
    for schema in _schemas(document):
        for field in schema.get("properties", {}).values():
            for option in field.get("anyOf", ()):  # a field that may be null is described as its value is
                if "description" in option:
                    field.setdefault("description", option.pop("description"))
        if AT_LEAST in schema:
            schema["minimum"] = schema.pop(AT_LEAST)
        if AT_MOST not in schema:
            continue
        limit = schema.pop(AT_MOST)
        most = getattr(settings, limit) if isinstance(limit, str) else limit
        for option in (schema, *schema.get("anyOf", ())):
            if most is not None and option.get("type") in BOUNDS:
                option.pop("exclusiveMaximum", None)
                option[BOUNDS[option["type"]]] = most
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["summary"] = operation["description"].partition(".")[0].replace("\n", " ").replace("`", "")
            read = operation.setdefault("parameters", [])
            read[:] = [MODEL_PARAMETER if parameter["name"] == "name" else parameter for parameter in read]
            for parameter in read:
                if "examples" in parameter["schema"]:
                    parameter["example"] = parameter["schema"]["examples"][0]  # Swagger UI writes it into its forms
            read += (OF_BODIES if "requestBody" in operation else []) + OF_ALL
    return document


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
