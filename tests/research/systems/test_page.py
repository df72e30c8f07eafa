"""Tests of the command `python -m research.systems`, and that the page shows the stored results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import with_tables
from research.systems import __main__ as command
from research.systems import plots
from research.systems.system import Answer, Measured

ROOT = Path(__file__).parents[3]
PAGE = "# Systems\n\n<!-- systems -->\n<!-- /systems -->\n"


def run(folder: Path, *words: str) -> int:
    (folder / "page.md").write_text(PAGE)
    options = ("--json", folder / "found.json", "--page", folder / "page.md", "--figures", folder)
    return command.main([*words, *map(str, options)])


def found(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return document


def test_the_command_stores_the_results_and_makes_the_page_and_the_figure(tmp_path: Path) -> None:
    assert run(tmp_path, "bptt_by_hand") == 0
    assert run(tmp_path, "truncated_bptt") == 0
    document = found(tmp_path)
    assert document["command"].startswith("python -m research.systems")
    assert list(document["systems"]) == ["bptt_by_hand", "truncated_bptt"]
    for result in document["systems"].values():
        assert {answer["held"] for answer in result["answers"].values()} == {result["seeds"]}
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["systems_truncated_bptt.png"]
    page = (tmp_path / "page.md").read_text()
    assert page.count("\n| [") == 2
    assert run(tmp_path, "bptt_by_hand", "--render") == 0
    assert (tmp_path / "page.md").read_text() == page
    assert found(tmp_path) == document


def test_the_command_fails_and_names_the_answer_that_a_seed_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    this = command.system("bptt_by_hand")

    def miss(seed: int) -> Measured:
        return Measured([Answer("half", 0.5, 0.5 + (seed == 3), 0.1), Answer("whole", 1, 1)])

    monkeypatch.setattr("research.systems.bptt_by_hand.SYSTEM", type(this)("t", "s", "e", "o", "task", miss))
    assert run(tmp_path, "bptt_by_hand") == 1
    assert "missed by some seed: bptt_by_hand: half\n" in capsys.readouterr().err
    assert found(tmp_path)["systems"]["bptt_by_hand"]["answers"]["half"]["held"] == 4
    assert "0.5 (0.5 to 1.5), 4 of 5<br>1, 5 of 5" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("atention",), "there is no system atention, only attention, "),
        (("attention", "--render"), "has no results of attention"),
    ],
)
def test_the_command_names_what_is_missing(
    tmp_path: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, *words)
    assert message in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == PAGE


def test_the_page_shows_the_stored_results_of_all_systems() -> None:
    results = command.read(ROOT / command.RESULTS)
    assert list(results) == command.NAMES
    page = (ROOT / command.PAGE).read_text(encoding="utf-8")
    assert with_tables(page, {command.TABLE: command.table(results)}, "systems.md") == page
    assert command.missed(results) == []
    for name in plots.FIGURES:
        assert f"(figures/systems_{name}.png)" in page
        assert (ROOT / command.FIGURES / f"systems_{name}.png").exists()


def test_a_value_that_is_not_finite_is_named_and_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = command.system("bptt_by_hand")

    def diverge(seed: int) -> Measured:
        return Measured([Answer("half", 0.5, float("nan"), 0.1)])

    monkeypatch.setattr("research.systems.bptt_by_hand.SYSTEM", type(this)("title", "s", "e", "o", "task", diverge))
    with pytest.raises(ValueError, match="title: half: a seed reached a value that is not finite"):
        run(tmp_path, "bptt_by_hand")
    assert not (tmp_path / "found.json").exists()
