"""Tests that the pages that `docs/reference.py` generates are up to date."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from docs.reference import GROUPS, PAGES
from tests.docs.transcript import FENCE
from wane.service.settings import Settings
from wane.training.config import Experiment

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name]()


def test_every_setting_is_in_one_group_and_described() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


def test_every_field_of_an_experiment_is_described() -> None:
    rows = [line for line in PAGES["experiments.md"]().splitlines() if line.startswith("| `")]
    assert rows
    assert not [row for row in rows if row.endswith("|  |")]


def test_the_example_of_an_experiment_is_valid() -> None:
    (block,) = [
        one for one in FENCE.finditer((DOCS / "experiments.md").read_text(encoding="utf-8")) if one["info"] == "toml"
    ]
    assert Experiment.parse(DOCS / "experiments.md", tomllib.loads(block["body"])).model.hidden == 64
