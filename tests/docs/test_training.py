"""Tests that the commands on the page about training print the output on the page, and that the page's table has the
stored figures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import processes
from tests.docs.transcript import parse, run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_commands_of_the_training_page_print_its_output(tmp_path: Path) -> None:
    commands = parse((ROOT / "docs/training.md").read_text(encoding="utf-8"))
    assert len(commands) == 2
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": "300"}
    run(commands, ROOT, environment, lambda text: text.replace("runs/by-two", str(tmp_path / "by-two")))


def test_the_page_has_the_table_of_runs_with_a_second_process() -> None:
    document = json.loads((ROOT / processes.FIGURES).read_text(encoding="utf-8"))
    assert "\n".join(processes.lines(document)) in (ROOT / processes.PAGE).read_text(encoding="utf-8")
