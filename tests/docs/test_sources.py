"""Tests that the page on the sources lists all of their 72 things, and that everything it names exists."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sources.md"
SOURCES = ("Voinov", "Miller", "Notes", "Tripp", "Kamper")
LINK = re.compile(r"\]\(([^)]+)\)")


def rows(text: str) -> list[list[str]]:
    """Returns the cells of every numbered row of the page's tables."""
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[2:3].isdigit()
    ]


def missing(text: str, folder: Path) -> list[str]:
    """Returns every link of a page in `folder` to a file, a folder or a heading that does not exist."""
    wrong = []
    for link in LINK.findall(text):
        name, _, heading = link.partition("#")
        path = (folder / name).resolve()
        if not path.exists() or (heading and heading not in headings(path)):
            wrong.append(link)
    return wrong


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_page_lists_all_72_things() -> None:
    assert [cells[0] for cells in rows(PAGE.read_text(encoding="utf-8"))] == [str(number) for number in range(1, 73)]


def test_everything_that_the_page_names_exists() -> None:
    assert missing(PAGE.read_text(encoding="utf-8"), PAGE.parent) == []


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# The title\n")
    text = "[1](page.md) [2](page.md#the-title) [3](page.md#no-title) [4](no.md)"
    assert missing(text, tmp_path) == ["page.md#no-title", "no.md"]


@pytest.mark.parametrize("cells", rows(PAGE.read_text(encoding="utf-8")), ids=lambda cells: cells[0])
def test_a_row_names_its_source_and_its_evidence(cells: list[str]) -> None:
    _, _, source, state, evidence = cells
    assert all(part.startswith(SOURCES) for part in source.split("; "))
    assert state in ("served", "offline", "in part", "not yet")
    assert ("Not yet: " in evidence) == (state in ("in part", "not yet"))
    assert LINK.search(evidence) or state == "not yet"


def test_the_page_counts_the_states_of_its_rows() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    count = Counter(cells[3] for cells in rows(text=PAGE.read_text(encoding="utf-8")))
    said = (
        f"{count['served']} are served, {count['offline']} are shown offline, {count['in part']} exist in part, "
        f"and {count['not yet']} do not exist yet"
    )
    assert said in text
