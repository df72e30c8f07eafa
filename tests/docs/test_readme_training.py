"""Runs the commands of the README's first `bash` block in order. The README shows no output for these commands."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.test_readme import ROOT, free_port
from tests.docs.transcript import TIMEOUT_S, Command, run, scripts

EXPERIMENT = "training/experiments/licence.toml"


def test_a_test_runs_each_block() -> None:
    """The second `bash` block audits a model that was trained outside Wane, and serves the resulting bundle. A test in
    tests/training runs this block."""
    own, outside = scripts((ROOT / "README.md").read_text(encoding="utf-8"))
    assert EXPERIMENT in own[2]
    assert ["examples/outside_lstm.py" in outside[0], " audit " in outside[1]] == [True, True]
    assert len(outside) == 3 and outside[2] == own[-1]


@pytest.mark.slow
def test_the_commands_that_train_a_custom_model_run_and_serve_it(tmp_path: Path) -> None:
    environment_made, install, *commands, serve = scripts((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert environment_made == "python3 -m venv .venv"
    assert install == ".venv/bin/pip install -e '.[train]'" and "train" in extras
    port = free_port()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
    environment = {**inherited, "WANE_PORT": str(port), "NO_COLOR": "1"}
    for command in commands:
        spelt = command.replace(".venv/bin/python", sys.executable).replace("runs/", f"{tmp_path}/")
        if EXPERIMENT in command:
            spelt += f" --run {tmp_path}/licence"  # the default folder is inside the checkout
        ended = subprocess.run(
            ["bash", "-c", spelt],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout
    serving = Command(0, serve.replace("runs/", f"{tmp_path}/"), '...\n{..."message":"ready"...}\n', background=True)
    asked = Command(0, f"curl -s 127.0.0.1:{port}/v1/models", '{"object":"list","data":[{"id":"licence"...\n')
    run([serving, asked], ROOT, environment)
