"""Tests that the page about clusters shows the figures of its benchmark."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.clusters import COLUMNS, rows
from benchmarks.page import markdown

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_its_figures() -> None:
    document = json.loads((ROOT / "docs/figures/clusters.json").read_text(encoding="utf-8"))
    table = markdown(COLUMNS, rows(document["ways"]))
    page = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
    assert "\n".join(table) in page and document["how"] in page
