"""Tests that the commands on the page about training print the output on the page."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.docs.transcript import parse, run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_commands_of_the_training_page_print_its_output(tmp_path: Path) -> None:
    commands = parse((ROOT / "docs/training.md").read_text(encoding="utf-8"))
    assert len(commands) == 2
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": "300"}
    run(commands, ROOT, environment, lambda text: text.replace("runs/by-two", str(tmp_path / "by-two")))
