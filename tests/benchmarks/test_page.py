"""Tests of the code that writes tables into a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.page import PageError, put, put_all, with_tables

PAGE = "before\n<!-- a -->\nold\n<!-- /a -->\nbetween\n<!-- b -->\n<!-- /b -->\nafter\n"
TABLES = {"a": ["one"], "b": ["two", "three"]}


def test_tables_are_replaced_between_their_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    put_all(page, TABLES)
    once = page.read_text()
    assert once == (
        "before\n<!-- a -->\n\none\n\n<!-- /a -->\nbetween\n<!-- b -->\n\ntwo\nthree\n\n<!-- /b -->\nafter\n"
    )
    put(page, "a", ["one"])
    assert page.read_text() == once


@pytest.mark.parametrize("text", ["", "<!-- a -->\n", PAGE.replace("/b", "b")])
def test_a_page_without_markers_is_refused(text: str) -> None:
    with pytest.raises(PageError, match=r"page\.md: there is no <!-- . -->"):
        with_tables(text, TABLES, "page.md")


def test_a_missing_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="No such file"):
        put(tmp_path / "page.md", "a", [])
