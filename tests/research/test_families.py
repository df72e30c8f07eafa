"""Tests the comparison of the families of models."""

from __future__ import annotations

import shutil
from dataclasses import replace
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
from wane.service.cli.side_by_side import ModelFigures, Spread


def figures(name: str = "gru", **changes: object) -> ModelFigures:
    found = ModelFigures(
        model=name,
        model_version="1",
        family="gru",
        weights=1_400_000,
        reach=None,
        state_bytes=1344,
        tokens=1000,
        perplexity=40.0,
        positions=100,
        by_k={1: 90.0, 4: 50.0, 16: 41.0, 64: 40.1},
        smallest_k=64,
        window=64,
        step_ms=Spread(0.5, 0.4, 0.6),
        window_ms=Spread(1.5, 1.4, 1.6),
        tokens_per_s=Spread(5000, 4000, 6000),
        proved=0.0,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def family(name: str = "gru", **changes: object) -> families.Family:
    return families.Family(
        weights_hash="0" * 64, figures=figures(name, **changes), training_tokens_per_s=Spread(9000, 8000, 9500)
    )


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


def test_the_findings_follow_from_the_figures() -> None:
    found = {
        "gru": family(smallest_k=128, state_bytes=100),
        "leaky": family("leaky", perplexity=44.0, proved=0.9, step_ms=Spread(0.7, 0.6, 0.9)),
        "tcn": family("tcn", perplexity=42.0, reach=12, proved=1.0),
        "wavenet": family("wavenet", perplexity=43.0, reach=100, proved=0.0, state_bytes=9000),
    }
    text = "\n".join(families.findings(found))
    assert "`gru` with a perplexity of 40.00" in text and "`tcn` with 42.00, 5.0 % more, from 13 tokens" in text
    assert "Of 2 models whose memory fades, 1 loses less than 1 % in windows of 64 tokens: `leaky`. `gru` needs" in text
    assert "`leaky` proves first tokens" in text
    assert "Of 2 models with a finite memory, 1 has all of it in a window of 64: `tcn`." in text
    assert "from 0.50 ms" in text and "to 0.70 ms (`leaky`)" in text
    assert "from 100 B (`gru`) to 9,000 B (`wavenet`)" in text
    assert families.findings({}) == []


@pytest.mark.slow
def test_the_command_measures_the_bundles_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped bundle takes the place of a trained family, and a small corpus that of WikiText-2."""
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
