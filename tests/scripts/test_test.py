"""Tests the calls of pytest in scripts/test. The tests use a fake python, so no other test runs."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts.test_environment import SCRIPTS, put

PYPROJECT = "[project]\n"
ALL = ["-m", "pytest", "--numprocesses", "3", "--dist", "loadfile", "--no-loadscope-reorder"]

# A fake python. It records the arguments of pytest, one per line, and exits with the configured status.
PYTHON = f"""#!/usr/bin/env bash
if [ "$2" = pytest ]; then
    printf '%s\\n' "$@" >called
    [ ! -e fails ] || exit "$(cat fails)"
elif [ "$1" = -c ]; then
    echo {hashlib.sha256(PYPROJECT.encode()).hexdigest()}
fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the script, and an environment with all dependencies."""
    (tmp_path / "scripts").mkdir()
    for name in ("environment", "test"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / ".venv").mkdir()
    put(tmp_path / ".venv" / "bin" / "python", PYTHON)
    return tmp_path


def called(checkout: Path, *arguments: str, status: int = 0) -> list[str]:
    """Runs the script. Returns the arguments of pytest."""
    ended = subprocess.run([checkout / "scripts" / "test", *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr
    return (checkout / "called").read_text().splitlines()


def test_without_arguments_all_tests_run_in_three_processes(checkout: Path) -> None:
    assert called(checkout) == ALL


def test_arguments_are_passed_to_pytest(checkout: Path) -> None:
    assert called(checkout, "tests/stack", "-k", "a b") == ["-m", "pytest", "tests/stack", "-k", "a b"]


@pytest.mark.parametrize("chosen", [[], ["tests/models"]], ids=["all", "some"])
def test_tests_that_need_torch_can_be_skipped(checkout: Path, chosen: list[str]) -> None:
    without = ["--ignore=tests/training", "-m", "not train"]
    assert called(checkout, "--no-train", *chosen) == ["-m", "pytest", *without, *(chosen or ALL[2:])]


@pytest.mark.parametrize("status", [1, 2])
def test_the_exit_status_is_that_of_pytest(checkout: Path, status: int) -> None:
    (checkout / "fails").write_text(str(status))
    assert called(checkout, status=status) == ALL
