"""Tests that the page about scaling shows the measured and simulated figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research.scaling import check, tables
from research.scaling.__main__ import PAGE, RESULTS
from research.scaling.costs import FILE, of

ROOT = Path(__file__).parents[2]
TABLES = tables.all_of(json.loads((ROOT / RESULTS).read_text()), json.loads((ROOT / check.FILE).read_text()))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_matches_its_files(name: str) -> None:
    assert "\n".join(TABLES[name]) in (ROOT / PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize("policy", ["tail", "state"])
def test_the_simulation_used_the_measured_costs(policy: str) -> None:
    measured = of(json.loads((ROOT / FILE).read_text()), policy)
    given = json.loads((ROOT / RESULTS).read_text())["costs"][policy]
    assert {name: given[name] for name in ("loop_step_s", "loop_batch_s", "store_trip_s", "front_s")} == {
        name: getattr(measured, name) for name in ("loop_step_s", "loop_batch_s", "store_trip_s", "front_s")
    }
