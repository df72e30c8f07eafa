"""What every failure must look like."""

from __future__ import annotations

from typing import Any

import httpx


def assert_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Checks the whole envelope, and returns the document for a test to look further."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["type"] == f"urn:wane:error:{code}"
    assert document["code"] == code
    assert document["status"] == status
    assert document["title"] and document["detail"]
    assert document["retryable"] is (status in (429, 503, 504))
    assert document["request_id"] == response.headers["x-request-id"]
    assert ("retry-after" in response.headers) == (status in (429, 503))
    return document
