"""A table on a page, between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


class PageError(Exception):
    """The page cannot hold the table; the message names what is missing."""


def markdown(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines."""
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def put(page: Path, name: str, lines: Sequence[str]) -> None:
    """Writes the lines in the place of what is between the markers. Raises PageError where they are not there."""
    first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, opened, rest = page.read_text(encoding="utf-8").partition(first)
    _, closed, after = rest.partition(last)
    if not opened or not closed:
        raise PageError(f"{page}: there is no {first.strip()} with a {last.strip()} behind it")
    page.write_text(before + opened + "\n" + "\n".join(lines) + "\n\n" + closed + after, encoding="utf-8")
