"""Tests that pages of the documentation show the figures of their benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import engine_page, events, protocols, threads, tracing
from benchmarks.page import with_tables

ROOT = Path(__file__).parents[2]


def test_the_page_on_threads_has_the_table_of_its_figures() -> None:
    document = json.loads((ROOT / threads.FIGURES).read_text(encoding="utf-8"))
    assert "\n".join(threads.lines(document)) in (ROOT / threads.PAGE).read_text(encoding="utf-8")


def test_the_page_on_observability_has_the_table_of_the_cost_of_traces() -> None:
    document = json.loads((ROOT / tracing.FIGURES).read_text(encoding="utf-8"))
    assert "\n".join(tracing.lines(document)) in (ROOT / tracing.PAGE).read_text(encoding="utf-8")


def test_the_page_on_the_engine_has_the_tables_of_its_figures() -> None:
    page = (ROOT / engine_page.PAGE).read_text(encoding="utf-8")
    assert with_tables(page, engine_page.tables(ROOT / engine_page.FIGURES), "engine.md") == page


def test_the_page_on_benchmarks_has_the_table_of_the_protocols() -> None:
    document = json.loads((ROOT / protocols.FIGURES).read_text(encoding="utf-8"))
    assert "\n".join(protocols.lines(document)) in (ROOT / protocols.PAGE).read_text(encoding="utf-8")


def test_the_page_on_models_of_events_has_the_table_of_their_steps() -> None:
    document = json.loads((ROOT / events.FIGURES).read_text(encoding="utf-8"))
    assert "\n".join(events.lines(document)) in (ROOT / events.PAGE).read_text(encoding="utf-8")


def test_the_default_settings_of_the_server_are_among_the_measured_settings() -> None:
    served = threads.CHOICES[0]
    assert (served.threads, served.spinning, served.arena) == (1, False, True)
