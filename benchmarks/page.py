"""Replaces tables in a Markdown page. A table stands between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


class PageError(Exception):
    """The page cannot be read or lacks a marker. The message names the page, and the marker that is missing."""


def markdown(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns a table as lines of Markdown."""
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def put(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replaces one table of the page. Raises PageError if the page cannot be read or lacks a marker."""
    put_all(page, {name: lines})


def put_all(page: Path, tables: Mapping[str, Sequence[str]]) -> None:
    """Replaces the text between the markers of each table with the table. Raises PageError if the page cannot be read
    or lacks a marker."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise PageError(f"{page}: {error.strerror}") from error
    page.write_text(with_tables(text, tables, str(page)), encoding="utf-8")


def with_tables(text: str, tables: Mapping[str, Sequence[str]], page: str) -> str:
    """Returns `text` with each table of `tables` between its markers. Raises PageError if a marker is missing."""
    for name, lines in tables.items():
        first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, opened, rest = text.partition(first)
        _, closed, after = rest.partition(last)
        if not opened or not closed:
            raise PageError(f"{page}: there is no {first.strip()} with a {last.strip()} after it")
        text = before + opened + "\n" + "\n".join(lines) + "\n\n" + closed + after
    return text
