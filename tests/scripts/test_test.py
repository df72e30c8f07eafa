"""Tests the calls of pytest in scripts/test. The tests use a fake python, so no other test runs."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts.test_environment import SCRIPTS, put

PYPROJECT = "[project]\n"
PARALLEL = ["--numprocesses", "3", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]

# A fake python. It records the arguments of pytest, one per line, runs the program `during` if there is one, and exits
# with the configured status.
PYTHON = f"""#!/usr/bin/env bash
if [ "$2" = pytest ]; then
    printf '%s\\n' "$@" >called
    [ ! -e during ] || bash during
    [ ! -e fails ] || exit "$(cat fails)"
elif [ "$1" = -c ]; then
    echo {hashlib.sha256(PYPROJECT.encode()).hexdigest()}
elif [ "$2" = pip ]; then
    echo "$*" >installed
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


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([checkout / "scripts" / "test", *arguments], capture_output=True, text=True, check=False)


def called(checkout: Path, *arguments: str, status: int = 0) -> list[str]:
    """Runs the script. Returns the arguments of pytest."""
    ended = run(checkout, *arguments)
    assert ended.returncode == status, ended.stderr
    return (checkout / "called").read_text().splitlines()


def test_without_arguments_the_quick_tests_run_in_three_processes(checkout: Path) -> None:
    assert called(checkout) == ["-m", "pytest", "--group", "quick", *PARALLEL]
    assert (checkout / "installed").read_text().split()[-1] == ".[dev]"


@pytest.mark.parametrize("group", ["rest", "all"])
def test_other_groups_of_tests_can_be_run(checkout: Path, group: str) -> None:
    assert called(checkout, f"--{group}", "-x") == ["-m", "pytest", "--group", group, *PARALLEL, "-x"]
    assert (checkout / "installed").read_text().split()[-1] == ".[dev,train,otel,ray,clients]"


def test_arguments_are_passed_to_pytest(checkout: Path) -> None:
    assert called(checkout, "tests/stack", "-k", "a b") == ["-m", "pytest", "tests/stack", "-k", "a b"]


@pytest.mark.parametrize("status", [1, 2])
def test_the_exit_status_is_that_of_pytest(checkout: Path, status: int) -> None:
    (checkout / "fails").write_text(str(status))
    called(checkout, status=status)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="only Linux lists the variables of a process")
def test_a_process_that_is_still_running_fails_the_run_and_is_killed(checkout: Path) -> None:
    """The process is a child of a process that has ended, as a server is whose test failed."""
    started = f"import time; open('started', 'w').close(); time.sleep(600)  # {checkout.name}"
    (checkout / "during").write_text(
        f'setsid {sys.executable} -c "{started}" >/dev/null 2>&1 &\n'
        "echo $! >process\nuntil [ -e started ]; do sleep 0.01; done\n"
    )
    ended = run(checkout)
    process = (checkout / "process").read_text().strip()
    assert ended.returncode == 1
    assert f"still running after the tests: {process} {sys.executable}" in ended.stderr
    deadline = time.monotonic() + 10
    while Path("/proc", process).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path("/proc", process).exists() or "State:\tZ" in Path("/proc", process, "status").read_text()


def test_processes_of_other_runs_are_not_killed(checkout: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"TEST_RUN": "1-1"}) as other:
        assert run(checkout).returncode == 0
        assert other.poll() is None
        other.communicate(b"\n")
