"""scripts/test: all tests are run, each once, whatever it is called with. No test is: python is a stand-in."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts.test_environment import SCRIPTS, put

PYPROJECT = "[project]\n"
ALL = [
    ["-m", "pytest", "-m", "not stack", "--numprocesses", "2", "--dist", "loadfile"],
    ["-m", "pytest", "-m", "stack", "--numprocesses", "3", "--dist", "loadfile"],
]

# Writes down how pytest was called, an argument a line, and fails the first time as it is told to.
PYTHON = f"""#!/usr/bin/env bash
if [ "$2" = pytest ]; then
    printf '%s\\n' "$@" "" >>called
    [ ! -e fails ] || {{ status="$(cat fails)"; rm fails; exit "$status"; }}
elif [ "$1" = -c ]; then
    echo {hashlib.sha256(PYPROJECT.encode()).hexdigest()}
fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the script, and an environment in which all is installed."""
    (tmp_path / "scripts").mkdir()
    for name in ("environment", "test"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / ".venv").mkdir()
    put(tmp_path / ".venv" / "bin" / "python", PYTHON)
    return tmp_path


def called(checkout: Path, *arguments: str, status: int = 0) -> list[list[str]]:
    """What python was called with, call by call."""
    ended = subprocess.run([checkout / "scripts" / "test", *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr
    return [call.splitlines() for call in (checkout / "called").read_text().split("\n\n")[:-1]]


def test_what_runs_real_programs_comes_after_all_others(checkout: Path) -> None:
    assert called(checkout) == ALL


def test_what_is_asked_for_is_run_as_it_is_asked_for(checkout: Path) -> None:
    assert called(checkout, "tests/stack", "-k", "a b") == [["-m", "pytest", "tests/stack", "-k", "a b"]]


def test_tests_that_need_torch_can_be_left_out_of_all(checkout: Path) -> None:
    first, second = called(checkout, "--no-train")
    assert first[2:5] == ["--ignore=tests/training", "-m", "not stack and not train"]
    assert second[2:5] == ["--ignore=tests/training", "-m", "stack and not train"]


def test_tests_that_need_torch_can_be_left_out_of_some(checkout: Path) -> None:
    (call,) = called(checkout, "--no-train", "tests/models")
    assert call[2:] == ["--ignore=tests/training", "-m", "not train", "tests/models"]


def test_the_second_part_is_run_though_the_first_has_failed(checkout: Path) -> None:
    (checkout / "fails").write_text("1")
    assert called(checkout, status=1) == ALL


def test_whoever_interrupts_the_first_part_ends_all(checkout: Path) -> None:
    (checkout / "fails").write_text("2")
    assert called(checkout, status=2) == ALL[:1]
