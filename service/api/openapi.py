"""Completes the OpenAPI description: the schemas of results, the limits from the settings, and the timeout header."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.json import schema_components

from wane.service.api.exchange import TIMEOUT, TIMEOUT_HEADER
from wane.service.api.schemas.common import AT_MOST, AtMost, anchored
from wane.service.settings import Settings
from wane.service.types import REFERENCE, Failed, any_of

BOUNDS = {"array": "maxItems", "integer": "maximum"}

TIMEOUT_PARAMETER = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "description": "the request's timeout in milliseconds; the server's own limit replaces a larger value",
    "schema": {"type": "string", "pattern": anchored(TIMEOUT)},
}


EVENTS: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}

KINDS: list[type] = [Failed]
"""The classes of the results in the description."""


def answers(*kinds: type, status: int = 200, streams: bool = False, **more: object) -> dict[int | str, dict[str, Any]]:
    """Returns FastAPI's description of the answers of a route: results of one of the classes `kinds`. If `streams`, the
    route also answers with server-sent events."""
    KINDS.extend(kinds)
    schema = any_of(*kinds) if len(kinds) > 1 else any_of(*kinds)["anyOf"][0]
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    return {status: {"content": content | (EVENTS if streams else {}), **more}}


def complete(document: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Adds the schemas, the limits and the timeout header to the OpenAPI description that FastAPI generated."""
    _, schemas = schema_components(KINDS, ref_template=REFERENCE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    for schema in _schemas(document):
        if AT_MOST not in schema:
            continue
        most = AtMost(schema.pop(AT_MOST)).value(settings)
        for one in (schema, *schema.get("anyOf", ())):
            if most is not None and one.get("type") in BOUNDS:
                one.pop("exclusiveMaximum", None)
                one[BOUNDS[one["type"]]] = most
    for operations in document["paths"].values():
        for operation in operations.values():
            operation.setdefault("parameters", []).append(TIMEOUT_PARAMETER)
    return document


def _schemas(part: object) -> Iterator[dict[str, Any]]:
    """Yields every JSON object in the description."""
    if isinstance(part, dict):
        yield part
        for inner in part.values():
            yield from _schemas(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _schemas(inner)
