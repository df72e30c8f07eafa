"""Tests that the client's errors mirror the server's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import httpx
import pytest

import wane.client
from tests.client.alike import Both
from wane.client import errors
from wane.client.errors import OF_CODE, NotWane, Unreachable, WaneError, error_of
from wane.service import errors as of_server

E = TypeVar("E", bound=Exception)


def classes(of: type[E]) -> Iterator[type[E]]:
    yield of
    for below in of.__subclasses__():
        yield from classes(below)


OWN = {Unreachable, NotWane}
SERVER = [kind for kind in classes(of_server.WaneError) if kind.__module__ == of_server.__name__]


@pytest.mark.parametrize("kind", SERVER, ids=lambda kind: kind.__name__)
def test_every_error_of_the_server_has_its_class(kind: type[of_server.WaneError]) -> None:
    mirrored: type[WaneError] = getattr(errors, kind.__name__)
    assert [one.__name__ for one in mirrored.__mro__] == [one.__name__ for one in kind.__mro__]
    if "code" in vars(kind):
        assert OF_CODE[kind.code] is mirrored


def test_the_client_has_no_other_errors() -> None:
    assert {one.__name__ for one in set(classes(WaneError)) - OWN} == {one.__name__ for one in SERVER}


@pytest.mark.parametrize("kind", SERVER, ids=lambda kind: kind.__name__)
def test_an_error_with_an_unknown_code_is_an_ancestor(kind: type[of_server.WaneError]) -> None:
    found = error_of("GET /", kind.http_status, {"code": "new_code", "detail": "why", "position": 3}, "", None)
    mirrored: type[WaneError] = getattr(errors, kind.__name__)
    siblings = {one for one in SERVER if one.http_status == kind.http_status}
    assert isinstance(found, WaneError)
    assert issubclass(mirrored, type(found)) or {"InvalidRequest", "LoadFailed"} <= {one.__name__ for one in siblings}
    assert (found.code, found.detail, found.status) == ("new_code", "why", kind.http_status)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "NotJson"),
        (401, "Unauthorized"),
        (404, "NotFound"),
        (408, "BodyTimeout"),
        (409, "Conflict"),
        (415, "UnsupportedMedia"),
        (429, "Overloaded"),
        (502, "Unavailable"),
        (503, "Unavailable"),
        (418, "WaneError"),
    ],
)
def test_a_proxys_page_is_the_error_of_its_status(both: Both, status: int, kind: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text="<html>a proxy's page"))
    with pytest.raises(WaneError, match="<html>a proxy's page") as raised:
        both("http://wane", transport=transport, retry=False).predict("a")
    assert type(raised.value).__name__ == kind
    assert raised.value.status == status


def test_an_error_carries_what_the_server_said(both: Both) -> None:
    document = {"status": 409, "code": "position_conflict", "detail": "it is at 7", "position": 7, "request_id": "r"}
    transport = httpx.MockTransport(lambda request: httpx.Response(409, json=document))
    with pytest.raises(errors.PositionConflict, match="409 position_conflict: it is at 7") as raised:
        both("http://wane", transport=transport).predict("a")
    assert (raised.value.position, raised.value.document["request_id"]) == (7, "r")


def test_a_position_conflict_without_a_position_is_a_conflict() -> None:
    found = error_of("POST /", 409, {"code": "position_conflict", "detail": "?"}, "", None)
    assert type(found) is errors.Conflict


def test_an_error_in_openais_format_is_read() -> None:
    document = {"error": {"message": "prompt is empty", "param": "prompt", "code": "invalid_request"}}
    found = error_of("POST /tokenize", 400, document, "", None)
    assert isinstance(found, errors.InvalidRequest)
    assert (found.field, found.detail) == ("prompt", "prompt is empty")


def test_an_error_in_openais_format_may_have_no_code() -> None:
    found = error_of("POST /tokenize", 404, {"error": {"message": "gone", "code": None}}, "", None)
    assert (type(found), found.code, found.detail) == (errors.NotFound, "not_found", "gone")


def test_a_star_import_brings_the_clients_names_only() -> None:
    assert {"Wane", "AsyncWane", "Session", "Answer", "Mode", "WaneError", "NotWane"} <= set(wane.client.__all__)
    assert not {"httpx", "Any", "Steps", "Servers", "Calls", "error_of", "annotations"} & set(wane.client.__all__)


ANSWERS: dict[str, tuple[int, bytes, str]] = {
    "a page": (200, b"<html>", "the body is not JSON"),
    "nothing": (200, b"", "an object is expected, not None"),
    "another's JSON": (200, b'{"model": "m"}', "model_version: the field is missing"),
    "another's type": (200, b'{"model": 5}', "model: a text is expected, not 5"),
    "a redirect": (302, b"", "its status is 302"),
    "deep brackets": (200, b"[" * 100_000, "the body is not JSON"),
}


@pytest.mark.parametrize(("status", "content", "why"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_is_not_wanes_is_named_with_what_is_wrong(
    both: Both, status: int, content: bytes, why: str
) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content))
    client = both("http://wane", transport=transport)
    with pytest.raises(NotWane, match="http://wane does not answer POST /v1/predict as Wane does") as raised:
        client.predict("a")
    assert why in str(raised.value)
