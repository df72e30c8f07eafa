"""Converts failures to OpenAI's error format. OpenAI's clients use it to select an exception, and to retry only
requests that may succeed.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "max_tokens", "code": "invalid_request"}}

An error with status 422 in a problem document has status 400 in this format. `param` is the name of the invalid field
in OpenAI's API.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from starlette.responses import Response

from wane.service.api.problem import PROBLEM_TYPE, Failure
from wane.service.api.schemas.completions import ErrorDocument
from wane.service.errors import InvalidRequest

CODES = {"unauthorized": "invalid_api_key", "unknown_model": "model_not_found"}
"""Maps Wane's error codes to OpenAI's error codes."""

FIELDS = {"input": "prompt", "tokens": "prompt", "top_logprobs": "logprobs"}
"""Maps the engine's field names to OpenAI's field names."""

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
"""OpenAI's error types, by status. For every other status, the type is `invalid_request_error` below 500, and
`server_error` from 500 on."""

NEVER_RETRY = {"x-should-retry": "false"}


def openai_response(failure: Failure, request_id: str) -> Response:  # noqa: ARG001
    """Returns the response to a failure in OpenAI's format. The body has no request id, because the header
    `x-request-id` has it."""
    return Response(json.dumps(document_of(failure)), status_of(failure), headers_of(failure), "application/json")


def problem_with_error(failure: Failure, request_id: str) -> Response:
    """Returns a problem document with the additional member `error`, which is the failure in OpenAI's format. It is the
    answer to a failure at one of Wane's own routes that OpenAI's clients call, too."""
    document = failure.body(request_id) | document_of(failure)
    return Response(json.dumps(document), failure.status, headers_of(failure), PROBLEM_TYPE)


def renamed(error: InvalidRequest) -> InvalidRequest:
    """Returns the error with OpenAI's name of the invalid field instead of the engine's name, in the message, too."""
    field = error.field or ""
    top = field.partition("[")[0]
    name = FIELDS.get(top)
    if name is None:
        return error
    message = name + error.message.removeprefix(top) if error.message.startswith(top) else error.message
    return InvalidRequest(message, name + field.removeprefix(top))


def status_of(failure: Failure) -> int:
    """Returns the status of a failure in OpenAI's format."""
    return HTTPStatus.BAD_REQUEST if failure.status == HTTPStatus.UNPROCESSABLE_ENTITY else failure.status


def headers_of(failure: Failure) -> dict[str, str]:
    """Returns the response headers of a failure. OpenAI's clients retry a request after a 409, unless a response header
    tells them not to."""
    return {**failure.headers, **NEVER_RETRY} if failure.status == HTTPStatus.CONFLICT else failure.headers


def document_of(failure: Failure) -> ErrorDocument:
    """Returns a failure as a document in OpenAI's format."""
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
