"""Checks of problem documents."""

from __future__ import annotations

from typing import Any

import httpx

INFERENCE_PROTOCOL = "/v2"


def assert_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Checks the status, the headers and the problem document of an error response. Returns the document."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert_members(document, status, code)
    assert document["request_id"] == response.headers["x-request-id"]
    assert ("retry-after" in response.headers) == (status in (429, 503))
    return document


def assert_members(document: dict[str, Any], status: int, code: str) -> None:
    """Checks the fields of a problem document. Also works for a document in a WebSocket message or in an item of a
    batch."""
    assert document["type"] == f"urn:wane:error:{code}"
    assert document["code"] == code
    assert document["status"] == status
    assert document["title"] and document["detail"] and document["request_id"]
    assert document["retryable"] is (status in (429, 503, 504))


def is_inference_protocol(path: str) -> bool:
    """Whether a path belongs to the Open Inference Protocol."""
    return path == INFERENCE_PROTOCOL or path.startswith(f"{INFERENCE_PROTOCOL}/")
