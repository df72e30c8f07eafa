"""Tables on a page, each between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


class PageError(Exception):
    """The page cannot hold the table; the message names what is missing."""


def markdown(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines."""
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def put(page: Path, name: str, lines: Sequence[str]) -> None:
    """As `put_all`, one."""
    put_all(page, {name: lines})


def put_all(page: Path, tables: Mapping[str, Sequence[str]]) -> None:
    """Writes each table, by its name, in the place of what is between its markers. Raises PageError."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise PageError(f"{page}: {error.strerror}") from error
    page.write_text(with_tables(text, tables, str(page)), encoding="utf-8")


def with_tables(text: str, tables: Mapping[str, Sequence[str]], page: str) -> str:
    """The text of a page with the tables in it. Raises PageError where their markers are not there."""
    for name, lines in tables.items():
        first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, opened, rest = text.partition(first)
        _, closed, after = rest.partition(last)
        if not opened or not closed:
            raise PageError(f"{page}: there is no {first.strip()} with a {last.strip()} behind it")
        text = before + opened + "\n" + "\n".join(lines) + "\n\n" + closed + after
    return text
