"""Runs the commands of the README that train and serve a model of clicks, and compares their output with the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.test_readme import ROOT, free_port
from tests.docs.transcript import TIMEOUT_S, Command, parse, run, scripts

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_test_runs_each_block() -> None:
    """The second group of commands audits a model that was trained outside Wane, and serves the resulting bundle.
    tests/training runs these commands."""
    own, outside = scripts(README)
    assert "training/experiments/shop.toml" in own[3]
    assert ["examples/outside_lstm.py" in outside[0], " audit " in outside[1]] == [True, True]
    assert len(outside) == 3 and outside[2] == own[-1]


@pytest.mark.slow
def test_the_commands_that_train_a_model_of_clicks_reach_the_stated_scores(tmp_path: Path) -> None:
    environment_made, install, *commands, serve = scripts(README)[0]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert environment_made == "python3 -m venv .venv"
    assert install == ".venv/bin/pip install -e '.[train]'" and "train" in extras
    port = free_port()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
    environment = {**inherited, "WANE_PORT": str(port), "NO_COLOR": "1", "COLUMNS": "200"}
    printed = ""
    for command in commands:
        ended = subprocess.run(
            ["bash", "-c", command.replace(".venv/bin/python", sys.executable).replace("runs/", f"{tmp_path}/")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout
        printed += ended.stdout
    best = re.search(r"recall@20 ([\d.]+)", printed)
    assert best is not None
    reached = [float(best[1]), *(recall(row, printed) for row in ("recurrent", "Markov", "V-SkNN"))]
    stated = re.search(
        r"recall@20 is ([\d.]+); .* is ([\d.]+)\. A Markov chain reaches ([\d.]+), .* ([\d.]+)\.\n", README
    )
    assert stated is not None
    model, optimum, *others = map(float, stated.groups())
    assert reached == pytest.approx([optimum, model, *others], abs=0.01)
    serving = Command(0, serve.replace("runs/", f"{tmp_path}/"), "...\nready: http://127.0.0.1:...\n", background=True)
    run([serving, *parse(README, "shop")], ROOT, environment, lambda text: text.replace("8000", str(port)))


def recall(row: str, printed: str) -> float:
    """Returns recall@20 of one row of the printed table: the fourth of the row's seven numbers."""
    found = re.search(rf"^{row}((?: +[\d.]+){{7}}) *$", printed, re.MULTILINE)
    assert found is not None, f"the output has no row {row}"
    return float(found[1].split()[3])
