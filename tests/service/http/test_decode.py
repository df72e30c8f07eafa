"""Reading a body costs no more for being wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.requests import Request

from service.errors import InvalidRequest
from service.middleware import Context
from service.routes.decode import decode
from service.schemas import Body, CompareBody, GenerateBody, PredictBody, StepsBody, UnloadBody

UNKNOWN = {f"unknown {index}": 1 for index in range(1000)}


async def refusal(model: type[Body], document: object) -> InvalidRequest:
    """What a body with this document in it is refused with."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": to_json(document)}

    request = Request({"type": "http", "wane.context": Context("id", None)}, receive)
    with pytest.raises(InvalidRequest) as refused:
        await decode(request, model)
    return refused.value


@pytest.mark.parametrize(
    ("model", "document", "field"),
    [
        (PredictBody, {"tokens": ["", ""] * 500}, "tokens[0]"),
        (PredictBody, {"inputs": [1, 1] * 500}, "inputs[0]"),
        (PredictBody, {"inputs": [["", ""] * 500]}, "inputs[0][0]"),
        (PredictBody, UNKNOWN, "unknown 0"),
        (PredictBody, {"tokens": [1], **UNKNOWN}, "unknown 0"),
        (CompareBody, {"tokens": [1], "windows": ["", ""] * 500}, "windows[0]"),
        (CompareBody, {"tokens": [1], "models": [1] * 8}, "models[0]"),
        (GenerateBody, {"tokens": [1], "stop": [1, 1] * 500}, "stop[0]"),
        (StepsBody, {"steps": [{"session": "s", "tokens": [1]}, UNKNOWN]}, "steps[1].unknown 0"),
        (StepsBody, {"steps": [{"tokens": [1]}] * 1000}, "steps[0].session"),
        (UnloadBody, {"parameters": UNKNOWN}, "parameters.unknown 0"),
    ],
    ids=[
        "ids",
        "inputs",
        "ids of an input",
        "only unknown fields",
        "unknown fields",
        "windows",
        "models",
        "stops",
        "unknown fields of a step",
        "steps",
        "unknown parameters",
    ],
)
async def test_a_body_that_is_wrong_a_thousand_times_builds_at_most_two_errors(
    model: type[Body], document: object, field: str
) -> None:
    refused = await refusal(model, document)
    built = refused.__cause__
    assert built is None or (isinstance(built, ValidationError) and built.error_count() <= 2)
    assert refused.field == field
