"""OpenAI's error envelope, with which its clients raise the right exception, and retry only what may succeed.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "max_tokens", "code": "invalid_request"}}

What the native protocol answers with 422 is 400 here. A field is named as in OpenAI's API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import Response

from wane.service.api.problem import PROBLEM_TYPE, Failure
from wane.service.api.schemas.completions import ErrorDocument
from wane.service.errors import InvalidRequest

CODES = {"unauthorized": "invalid_api_key", "unknown_model": "model_not_found"}
"""OpenAI's codes, by ours."""

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
"""Types of errors by status. Others are `invalid_request_error` below 500, and `server_error` from there on."""

NEVER_RETRY = {"x-should-retry": "false"}


def openai_response(failure: Failure, request_id: str) -> Response:  # noqa: ARG001
    """Returns a failure in OpenAI's envelope. The request id is in a header."""
    return Response(json.dumps(document_of(failure)), status_of(failure), headers_of(failure), "application/json")


def problem_with_error(failure: Failure, request_id: str) -> Response:
    """Returns a problem document that contains OpenAI's `error` too, for paths that OpenAI's clients call."""
    document = failure.body(request_id) | document_of(failure)
    return Response(json.dumps(document), failure.status, headers_of(failure), PROBLEM_TYPE)


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Returns the engine's error with the protocol's name of the field, in its message too. `names`: by the engine's
    names."""
    field = error.field or ""
    top = field.partition("[")[0]
    if top not in names:
        return error
    message = error.message
    if message.startswith(top):
        message = names[top] + message.removeprefix(top)
    return InvalidRequest(message, names[top] + field.removeprefix(top))


def status_of(failure: Failure) -> int:
    """Returns the status of a failure."""
    return HTTPStatus.BAD_REQUEST if failure.status == HTTPStatus.UNPROCESSABLE_ENTITY else failure.status


def headers_of(failure: Failure) -> dict[str, str]:
    """Returns the headers of a failure. OpenAI's clients retry a 409 unless they are told not to."""
    return {**failure.headers, **NEVER_RETRY} if failure.status == HTTPStatus.CONFLICT else failure.headers


def document_of(failure: Failure) -> ErrorDocument:
    """Returns the envelope of a failure."""
    status = status_of(failure)
    field = failure.extra.get("field")
    param = str(field) if field is not None else "model" if failure.code == "unknown_model" else None
    other = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return {
        "error": {
            "message": failure.detail,
            "type": TYPES.get(status, other),
            "param": param,
            "code": CODES.get(failure.code, failure.code),
        }
    }
