"""Adds the limits from the settings and the timeout header to the OpenAPI description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wane.service.api.exchange import TIMEOUT, TIMEOUT_HEADER
from wane.service.api.schemas.common import AT_MOST, AtMost, anchored
from wane.service.settings import Settings

BOUNDS = {"array": "maxItems", "integer": "maximum"}

TIMEOUT_PARAMETER = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "description": "the request's timeout in milliseconds; the server's own limit replaces a larger value",
    "schema": {"type": "string", "pattern": anchored(TIMEOUT)},
}


def complete(document: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Adds the limits and the timeout header to the OpenAPI description that FastAPI generated."""
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
