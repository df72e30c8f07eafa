"""Makes the tables of docs/recommendations.md from small runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from research.recommendations import main as tables
from tests.training.test_layouts import put
from tests.training.test_transitions import EXPERIMENT
from wane.training.cli import main

CACHED = EXPERIMENT.replace("hidden = 4", "hidden = 4\ncache = 20\ncache_in_loss = false")


def test_the_page_gets_the_table_of_the_runs_and_that_of_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(1)
    rows = [f"{at // 5},{at},{item}" for at, item in enumerate(random.integers(0, 30, 400))]
    data = put(tmp_path / "clicks.csv", ["session,time,item", *rows])
    (tmp_path / "small.toml").write_text(CACHED)
    run, page = tmp_path / "run", tmp_path / "page.md"
    assert main(["train", str(tmp_path / "small.toml"), "--data", str(data), "--run", str(run)]) == 0
    assert main(["evaluate", str(run), "--data", str(data), "--positions", "all", "--transitions"]) == 0
    page.write_text("before\n<!-- results -->\nold\n<!-- /results -->\n<!-- parts -->\n<!-- /parts -->\nafter\n")
    command = ["x", str(run), "--parts", str(run), "--data", str(data), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", command)
    tables()
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    numbers = r"(?: \| \d\.\d{3}){4}"
    assert re.search(rf"\| small \| recurrent{numbers} \| 1 \| 0\.00 \|", text)
    assert re.search(rf"\| small \| transitions alone{numbers} \|  \|  \|", text)
    assert re.search(rf"\| small \| V-SkNN{numbers} \|  \|  \|", text)
    assert re.search(rf"\| network \+ next \+ near \+ before \+ own{numbers} \|", text)
    page_of_project = (Path(__file__).parents[2] / "docs" / "recommendations.md").read_text()
    parts = [
        re.findall(r"^\| (\w[^|]*?)(?:, share [\d.]+)? \|", one.split("<!-- parts -->")[1], re.MULTILINE)
        for one in (text, page_of_project)
    ]
    assert parts[0] == parts[1]
    assert "window" not in text
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["x", "--untrained", str(run)])
    tables()
    printed = capsys.readouterr().out
    assert "transitions alone" in printed and "recurrent" not in printed and "with transitions" not in printed
