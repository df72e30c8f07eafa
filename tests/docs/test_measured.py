"""Tests that pages of the documentation show the figures of their benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine_page, events, processes, protocols, threads, tracing
from benchmarks.page import with_tables

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("measured", [events, processes, protocols, threads, tracing], ids=lambda one: one.__name__)
def test_a_page_has_the_table_of_its_figures(measured: Any) -> None:
    document = json.loads((ROOT / measured.FIGURES).read_text(encoding="utf-8"))
    assert "\n".join(measured.lines(document)) in (ROOT / measured.PAGE).read_text(encoding="utf-8")


def test_the_page_on_the_engine_has_the_tables_of_its_figures() -> None:
    page = (ROOT / engine_page.PAGE).read_text(encoding="utf-8")
    assert with_tables(page, engine_page.tables(ROOT / engine_page.FIGURES), "engine.md") == page


def test_the_default_settings_of_the_server_are_among_the_measured_settings() -> None:
    served = threads.CHOICES[0]
    assert (served.threads, served.spinning, served.arena) == (1, False, True)
