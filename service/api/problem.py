"""Converts failures to responses in the format of the request path's protocol.

A failure at one of Wane's own routes is a problem document (RFC 9457, application/problem+json).

    {"type": "urn:wane:error:position_conflict", "title": "Position conflict", "status": 409,
     "detail": "the session is at 12, not at 11", "code": "position_conflict", "retryable": false,
     "request_id": "...", "position": 12}

Every failure at these routes has this format, including an unknown path, an unknown method and an unexpected error.
Under /v2, failures have the format of the Open Inference Protocol, whose clients read the text in `error`.

    {"error": "there is no model 'x'; there are y", "code": "unknown_model", "retryable": false, "request_id": "..."}

OpenAI's clients use their format to select an exception, and to retry only requests that may succeed. `param` is the
name of the invalid field in OpenAI's API.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "max_tokens", "code": "invalid_request"}}

The other two formats have no status 422: an error with status 422 in a problem document has status 400 in them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from http import HTTPStatus
from typing import Annotated, TypedDict, TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from wane.service.api.exchange import context
from wane.service.api.schemas.completions import ErrorDocument
from wane.service.errors import BodyTimeout, InvalidRequest, Overloaded, TooLarge, Unauthorized, Unavailable, WaneError
from wane.service.observability.logs import SERVICE
from wane.service.types.answer import Failed
from wane.service.types.common import says

T = TypeVar("T")


class ProblemDocument(TypedDict):
    """A problem document (RFC 9457). Documents with certain codes have additional fields."""

    type: Annotated[str, says("the failure's URN, which ends with its code")]
    title: Annotated[str, says("the code in words")]
    status: Annotated[int, says("the status of HTTP")]
    detail: Annotated[str, says("what is wrong")]
    code: Annotated[str, says("the kind of failure; it does not change between releases")]
    retryable: Annotated[bool, says("true: the same request may succeed later")]
    request_id: Annotated[str, says("the request's id, which the server's log has, too")]


INTERNAL = "internal"
PROBLEM_TYPE = "application/problem+json"
BEARER, BASIC = 'Bearer realm="wane"', 'Basic realm="wane: a key as the password"'
NOWHERE = "not found; /docs lists the paths"
UNEXPECTED = "the server failed to handle the request; the server's log has the error under this request id"

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


@dataclass(frozen=True, slots=True)
class Failure:
    """The facts of a failure that a client may see, independent of the protocol."""

    status: int
    code: str
    detail: str
    retryable: bool = False
    extra: dict[str, object] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def body(self, request_id: str) -> dict[str, object]:
        """Returns the members of a problem document."""
        return {
            "type": f"urn:wane:error:{self.code}",
            "title": self.code.replace("_", " ").capitalize(),
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "retryable": self.retryable,
            "request_id": request_id,
            **self.extra,
        }


def describe(error: Exception) -> Failure:
    """Returns the facts of `error` that a client may see. Hides the details of an unexpected error."""
    if isinstance(error, WaneError):
        headers: dict[str, str] = {}
        extra = error.extra()
        if isinstance(error, Overloaded | Unavailable):
            wait_s = max(1, math.ceil(error.retry_after_s))
            headers["retry-after"] = str(wait_s)
            extra["retry_after_s"] = wait_s  # a message of a WebSocket and an item of a batch have no headers
        if isinstance(error, TooLarge | BodyTimeout | Unauthorized):
            headers["connection"] = "close"  # the connection is closed, because the rest of the body is not read
        if isinstance(error, Unauthorized):
            headers["www-authenticate"] = BASIC if error.basic else BEARER
        return Failure(error.http_status, error.code, error.message, error.retryable, extra, headers)
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        detail = {
            404: NOWHERE,
            405: "this path does not accept this method; the header Allow lists those that it accepts",
        }.get(error.status_code, error.detail)
        return Failure(error.status_code, phrase.lower().replace(" ", "_"), detail, headers=dict(error.headers or {}))
    return Failure(500, INTERNAL, UNEXPECTED)


def failure_document(scope: Scope, error: Exception) -> dict[str, object]:
    """Returns the problem document for a failed item of a batch, or for a failure during a stream of events."""
    return described(scope, error).body(context(scope).request_id)


def items(scope: Scope, outcomes: Iterable[T | Exception]) -> tuple[T | Failed, ...]:
    """Returns the items of a batch, with a problem document for each that failed."""
    return tuple(
        Failed(failure_document(scope, outcome)) if isinstance(outcome, Exception) else outcome for outcome in outcomes
    )


UNAUTHORIZED_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Wane: a key is needed</title>
<h1>This page needs an API key</h1>
<p>{detail}. A browser asks for a name and a password: give any name, and the key as the password.</p></html>
"""


def problem(failure: Failure, request_id: str) -> Response:
    """Returns a problem document, or a page if a browser opened a page without a valid key."""
    if failure.headers.get("www-authenticate") == BASIC:
        page = UNAUTHORIZED_PAGE.format(detail=escape(failure.detail))
        return HTMLResponse(page, failure.status, failure.headers)
    return Response(json.dumps(failure.body(request_id)), failure.status, failure.headers, PROBLEM_TYPE)


def inference_error(failure: Failure, request_id: str) -> Response:
    """Returns the failure in the format of the Open Inference Protocol."""
    document = {
        "error": failure.detail,
        "code": failure.code,
        "retryable": failure.retryable,
        "request_id": request_id,
        **failure.extra,
    }
    return Response(json.dumps(document), status_of(failure), failure.headers, "application/json")


def openai_response(failure: Failure, request_id: str) -> Response:  # noqa: ARG001
    """Returns the response to a failure in OpenAI's format. The body has no request id, because the header
    `x-request-id` has it."""
    return Response(json.dumps(document_of(failure)), status_of(failure), headers_of(failure), "application/json")


def problem_with_error(failure: Failure, request_id: str) -> Response:
    """Returns a problem document with the additional member `error`, which is the failure in OpenAI's format. It is the
    answer to a failure at one of Wane's own routes that OpenAI's clients call, too."""
    document = failure.body(request_id) | document_of(failure)
    return Response(json.dumps(document), failure.status, headers_of(failure), PROBLEM_TYPE)


def status_of(failure: Failure) -> int:
    """Returns the status of a failure in OpenAI's format and in the Open Inference Protocol's."""
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


def renamed(error: InvalidRequest) -> InvalidRequest:
    """Returns the error with OpenAI's name of the invalid field instead of the engine's name, in the message, too."""
    field = error.field or ""
    top = field.partition("[")[0]
    name = FIELDS.get(top)
    if name is None:
        return error
    message = name + error.message.removeprefix(top) if error.message.startswith(top) else error.message
    return InvalidRequest(message, name + field.removeprefix(top))


Shape = Callable[[Failure, str], Response]
"""Returns the response to a failure. The arguments are the failure and the request id."""


class Envelopes:
    """Converts an exception to a response in the format of the request path's protocol."""

    def __init__(self, shapes: Sequence[tuple[re.Pattern[str], Shape]]) -> None:
        """`shapes` has pairs of a pattern of paths and the function that builds the responses to failures at these
        paths, for every method. The first pattern that matches the whole path applies. The last matches every path."""
        self._shapes = shapes

    def __call__(self, scope: Scope, error: Exception) -> Response:
        """Returns the response to a failure. Adds the failure's code to the access log."""
        request_context = context(scope)
        failure = described(scope, error)
        request_context.fields["error"] = failure.code
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        shape = next(shape for pattern, shape in self._shapes if pattern.fullmatch(path))
        return shape(failure, request_context.request_id)


def described(scope: Scope, error: Exception) -> Failure:
    """Returns the result of `describe`, and logs the traceback of an unexpected error."""
    failure = describe(error)
    if failure.code == INTERNAL:
        fields = {"request_id": context(scope).request_id}
        SERVICE.error("unexpected failure", exc_info=error, extra={"fields": fields})
    return failure
