"""Tests of the limits of a JSON body: the numbers of comma-separated values, of fields, and of objects and lists, and
the digits of a number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wane.service.api.body import MOST_DIGITS, BodyLimits, excess
from wane.service.errors import NotJson

ANYTHING = BodyLimits(10**9, 10**9, 10**9)
TEXTS = st.text() | st.text('\\"[]{},:0')
DOCUMENTS: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


def parts(document: object) -> Iterator[str]:
    """Yields "value" for each comma, "field" for each colon, and "container" for each opening bracket or brace in the
    document's JSON."""
    if isinstance(document, dict | list):
        yield "container"
        yield from ["value"] * (len(document) - 1)
        yield from ["field"] * (len(document) if isinstance(document, dict) else 0)
        for inner in document.values() if isinstance(document, dict) else document:
            yield from parts(inner)


@given(DOCUMENTS, st.booleans())
def test_the_contents_of_strings_do_not_count(document: object, ascii_only: bool) -> None:
    raw = json.dumps(document, ensure_ascii=ascii_only).encode(errors="replace")
    found = list(parts(document))
    most = BodyLimits(found.count("value"), found.count("field"), found.count("container"))
    assert excess(raw, most) is None
    for name, count in most._asdict().items():
        if count:
            assert excess(raw, most._replace(**{name: count - 1})) is not None


def test_the_error_names_a_limit_that_the_body_exceeds() -> None:
    assert excess(b'{"a": [1, 2, 3], "b": 4}', BodyLimits(1, 9, 9)) == "1 comma-separated values"
    assert excess(b'{"a": [1, 2, 3], "b": 4}', BodyLimits(9, 1, 9)) == "1 fields"
    assert excess(b'{"a": [1, 2, 3], "b": 4}', BodyLimits(9, 9, 1)) == "1 objects and lists"


@pytest.mark.parametrize(("before", "after"), [(b"", b""), (b"[1,", b"]"), (b'{"a":', b""), (b"[0.", b",1]")])
def test_a_number_with_too_many_digits_is_refused_with_its_place(before: bytes, after: bytes) -> None:
    assert excess(before + b"9" * MOST_DIGITS + after, ANYTHING) is None
    with pytest.raises(NotJson, match=f"a number with {MOST_DIGITS + 1} digits at byte {len(before)};"):
        excess(before + b"9" * (MOST_DIGITS + 1) + after, ANYTHING)


def test_digits_in_a_string_are_not_a_number() -> None:
    assert excess(b'["' + b"9" * 2 * MOST_DIGITS + b'"]', ANYTHING) is None
