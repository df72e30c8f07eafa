"""Tests the JSON in which a measurement is stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.summary import Spread, command, ratios, write_json


def test_a_spread_has_the_median_minimum_and_maximum() -> None:
    assert Spread.of([3, 1, 2, 10]) == Spread(median=2.5, least=1, most=10)
    assert f"{Spread.of([1000, 3000, 2000]):,.0f}" == "2,000 (1,000 to 3,000)"


def test_ratios_compare_the_figures_of_the_same_round() -> None:
    assert ratios([2, 9, 8], [1, 3, 2]) == Spread(median=3, least=2, most=4)
    with pytest.raises(ValueError, match="shorter"):
        ratios([1, 2], [1])


def test_a_command_contains_no_absolute_paths() -> None:
    told = command("research.proofs", ["--data", "/home/somebody/wikitext-2", "--json", "docs/figures/proofs.json"])
    assert told == "python -m research.proofs --data wikitext-2 --json docs/figures/proofs.json"


def test_json_is_read_back_unchanged_and_has_filled_lines_and_one_record_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    series = [1000.5 + n for n in range(100)]
    records = [{"way": f"way {n}", "é": None, "spread": Spread.of([n, 2]).model_dump()} for n in range(3)]
    document = {"a": 1, "b": {"c": []}, "series": series, "records": records, "7": {"long": "word " * 30}, "z": {}}
    write_json(path, document)
    lines = path.read_text().splitlines()
    assert json.loads(path.read_text()) == document
    assert lines[1] == ' "a": 1, "b": {"c": []},'
    assert [line for line in lines if "way" in line] == [
        f"  {json.dumps(record)}{comma}" for record, comma in zip(records, (",", ",", ""), strict=True)
    ]
    full = [line for line in lines if line.strip(" ,").replace(".", "").replace(", ", "").isdigit()]
    assert len(full) == 8 and all(112 < len(line) <= 120 for line in full[:-1])
    assert all(len(line) <= 120 for line in lines if "word" not in line)
    assert [each.name for each in path.parent.iterdir()] == ["figures.json"]


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "figures.json", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []
