"""Tests the comparison of the families of models."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks.page import with_tables
from research import families
from tests.models.bundles import edit_manifest
from tests.service.shipped import FOLDER
from tests.training.corpora import text_corpus
from wane.service.cli import render


def test_the_page_has_the_stored_figures() -> None:
    found = families.read(families.FIGURES)
    page = families.PAGE.read_text(encoding="utf-8")
    assert with_tables(page, families.tables(found), "docs/families.md") == page
    assert found and set(found) <= set(families.NAMES)


def test_no_name_in_the_plot_covers_another_name_or_a_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[Figure]()
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    render.save_models([one.figures for one in families.read(families.FIGURES).values()], tmp_path / "plot.png", True)
    axes = drawn[0].axes[0]
    (lines, places) = ([line for bars in axes.containers for line in bars[2]], axes.texts)
    spreads = [axes.transData.transform(ends) for line in lines for ends in line.get_segments()]
    boxes = [text.get_window_extent() for text in places]
    assert len(boxes) == len(spreads) == len(families.NAMES)
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index]), places[index].get_text()
        for (start, height), (end, _) in spreads:
            apart = not box.y0 <= height <= box.y1 or end < box.x0 or box.x1 < start
            assert apart, f"{places[index].get_text()} covers the spread at {height}"


@pytest.mark.slow
def test_the_command_measures_the_bundles_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped bundle takes the place of a trained family, and a small corpus that of WikiText-2."""
    small = (families.EXPERIMENTS / "gru.toml").read_text(encoding="utf-8").replace("batch = 32", "batch = 2")
    (tmp_path / "gru.toml").write_text(small, encoding="utf-8")
    monkeypatch.setattr(families, "EXPERIMENTS", tmp_path)
    monkeypatch.setattr(families, "TRAINED_STEPS", 1)
    monkeypatch.setattr(families, "load_corpus", lambda config: text_corpus(2000))
    monkeypatch.setattr(families, "read_stream", lambda *arguments: np.arange(200) % 97)
    bundle = tmp_path / "work" / "bundles" / "gru"
    shutil.copytree(FOLDER / "rnn-stable", bundle)
    edit_manifest(bundle, "name", value="gru")
    page, json = tmp_path / "page.md", tmp_path / "families.json"
    page.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in ("families", "missing", "findings")))
    options = ["--work", str(tmp_path / "work"), "--trained", "--tokens", "100", "--positions", "4"]
    assert families.main(["--data", str(tmp_path), *options, "--json", str(json), "--page", str(page)]) == 0
    (found,) = families.read(json).values()
    assert (found.figures.model, found.figures.tokens, found.figures.positions) == ("gru", 100, 4)
    assert found.training_tokens_per_s.least > 0
    assert "| `gru` | 1,084,160 | fades |" in page.read_text(encoding="utf-8")
    assert json.with_suffix(".png").stat().st_size > 1000


def test_a_folder_without_bundles_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        families.main(["--data", str(tmp_path), "--work", str(tmp_path), "--trained"])
    assert "has no bundles" in capsys.readouterr().err
