"""Tests of the types of answers and arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from wane.client import Wane
from wane.client.shape import Misfit, Within, fit


@dataclass(frozen=True)
class Part:
    name: str
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Whole:
    parts: dict[str, Part]
    kind: Literal["a", "b"] = "a"
    number: int | None = None
    either: str | tuple[int, ...] = ""


def test_a_document_becomes_a_dataclass_and_new_fields_are_ignored() -> None:
    document = {"parts": {"x": {"name": "n", "values": [1, 2.5], "new": 1}}, "number": None, "either": [1], "later": {}}
    assert fit(Whole, document) == Whole({"x": Part("n", (1, 2.5))}, number=None, either=(1,))


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ([], "an object is expected, not []"),
        ({}, "parts: the field is missing"),
        ({"parts": {"x": {}}}, "parts.x.name: the field is missing"),
        ({"parts": {"x": {"name": "n", "values": [1, "2"]}}}, "parts.x.values[1]: a number is expected, not '2'"),
        ({"parts": {"x": {"name": "n", "values": "12"}}}, "parts.x.values: a list is expected, not '12'"),
        ({"parts": {}, "kind": "c"}, "kind: one of a, b is expected, not 'c'"),
        ({"parts": {}, "number": True}, "number: a whole number is expected, not True"),
        ({"parts": {}, "number": 1.5}, "number: a whole number is expected, not 1.5"),
        ({"parts": []}, "parts: an object is expected, not []"),
    ],
)
def test_the_place_of_a_wrong_value_is_named(document: Any, why: str) -> None:
    with pytest.raises(Misfit) as raised:
        fit(Whole, document)
    assert str(raised.value) == why


@pytest.mark.parametrize("value", [0, 1.5, math.inf, math.nan, -1])
def test_a_number_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(Misfit, match="must be over 0 and at most 1"):
        fit(Annotated[float, Within(over=0, most=1)], value)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 0}, "top_k: must be at least 1, not 0"),
    ({"top_k": 1.0}, "top_k: a whole number is expected, not 1.0"),
    ({"top_k": True}, "top_k: a whole number is expected"),
    ({"mode": "fast"}, "mode: one of auto, recurrent, window, both is expected, not 'fast'"),
    ({"tolerance": math.nan}, "tolerance: must be at least 0 and at most 1, not nan"),
    ({"exclude": "coats"}, "exclude: a list is expected, not 'coats'"),
    ({"exclude": [1]}, "exclude[0]: a text is expected, not 1"),
    ({"deadline_s": 0}, "deadline_s: must be over 0, not 0"),
]


def refusing() -> Wane:
    """Returns a client of an address at which no server listens."""
    return Wane("http://127.0.0.1:9", retry=False)


@pytest.mark.parametrize(("options", "why"), BAD, ids=[why for _, why in BAD])
def test_a_bad_argument_is_refused_before_anything_is_sent(options: dict[str, Any], why: str) -> None:
    with refusing() as wane, pytest.raises(ValueError) as raised:
        wane.predict("a", **options)
    assert why in str(raised.value)


@pytest.mark.parametrize("given", ["", [], [1, "a"], [1.5], [-1], [True], b"bytes", None, {"a": 1}, {5, 6}, 1.5])
def test_a_bad_input_is_refused_before_anything_is_sent(given: Any) -> None:
    with refusing() as wane, pytest.raises(ValueError):
        wane.predict(given)


def test_an_unknown_argument_is_named() -> None:
    with refusing() as wane, pytest.raises(TypeError, match=r"no argument 'topk'; there are .*top_k"):
        wane.predict("a", topk=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "e\u0301", "x" * 129])
def test_a_bad_session_id_is_refused(name: str) -> None:
    if name:
        with refusing() as wane, pytest.raises(ValueError, match="is not a session's id"):
            wane.session(name)


@pytest.mark.parametrize(
    "address", ["nowhere", "ftp://a", "http://", "http://a?b", "http://a:99999", "http://[a", ["http://a", "b"]]
)
def test_a_bad_address_is_refused(address: Any) -> None:
    with pytest.raises(ValueError, match="is not the address of a server"):
        Wane(address)


def test_the_address_and_the_key_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANE_URL", raising=False)
    with pytest.raises(ValueError, match="set WANE_URL"):
        Wane()
    monkeypatch.setenv("WANE_URL", "http://a:1/, http://b:2")
    monkeypatch.setenv("WANE_API_KEY", "secret")
    with Wane() as wane:
        assert wane._inner._servers.addresses == ["http://a:1", "http://b:2"]
        assert wane._inner._servers.headers == {"authorization": "Bearer secret"}
        assert "secret" not in repr(vars(wane._inner))
    with pytest.raises(ValueError, match="printable ASCII"):
        Wane(key="a\nb")
