"""Tests the comparison of the families of models."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.progress import Progress

from research import families
from tests.service.shipped import FOLDER


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> families.Family:
    """The figures of a shipped bundle, from few runs of its graphs."""
    monkeypatch.setattr(families, "REPEATS", 3)
    with Progress(disable=True) as progress:
        return families.figures(FOLDER / "rnn-stable", None, 1, progress)


def test_the_figures_of_a_bundle_come_from_its_manifest_and_its_graphs(found: families.Family) -> None:
    assert found.reach is None and found.proved is None
    assert found.state_bytes == 4 * 384
    assert list(found.by_k) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert found.by_k[1] > found.perplexity
    assert found.smallest_k is not None and found.by_k[found.smallest_k] <= found.by_k[256] * families.WITHIN
    assert min(found.step_ms, found.window_ms, found.tokens_per_s, found.training_tokens_per_s) > 0


def test_the_table_lists_the_best_family_first(found: families.Family, tmp_path: Path) -> None:
    better = found.model_copy(update={"perplexity": found.perplexity / 2, "reach": 12, "proved": 1.0})
    rows = families.table({"worse": found, "better": better})[2:]
    assert [row.split("`")[1] for row in rows] == ["better", "worse"]
    assert "| 12 |" in rows[0] and "100.0%" in rows[0]
    families.plot({"worse": found, "better": better}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
