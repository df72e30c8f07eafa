"""A failure."""

from __future__ import annotations

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12


class ProblemDocument(TypedDict):
    """RFC 9457, with a stable `code`, whether trying again may help, and the request's id; some codes add fields."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    request_id: str
