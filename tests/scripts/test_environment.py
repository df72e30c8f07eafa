"""Tests of scripts/environment. The script creates .venv once, installs the packages once, and reports missing
programs. The tests use a fake pip, so they need no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

# A fake python3. It creates a .venv whose python records the calls of pip.
PYTHON = f"""#!/usr/bin/env bash
echo "$*" >>made
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p .venv/bin
    cp venv-python .venv/bin/python
else
    exec {sys.executable} "$@"
fi
"""
VENV_PYTHON = f"""#!/usr/bin/env bash
if [ "$1 $2" = "-m pip" ]; then
    echo "$*" >>installed
    [ ! -e offline ]
else
    exec {sys.executable} "$@"
fi
"""
TOO_OLD = """#!/usr/bin/env bash
[ "$1" = "--version" ] && { echo "Python 3.9.2"; exit; }
exit 1
"""
NO_VENV = f"""#!/usr/bin/env bash
[[ "$*" == *ensurepip* ]] && exit 1
exec {sys.executable} "$@"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the script and a fake python3."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "environment", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    put(tmp_path / "venv-python", VENV_PYTHON)
    put(tmp_path / "bin" / "python3", PYTHON)
    return tmp_path


def put(path: Path, program: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(program)
    path.chmod(0o755)


def environment(checkout: Path, *extras: str, python: str = "python3") -> subprocess.CompletedProcess[str]:
    """Runs the part of scripts/serve that creates the environment, with these extras."""
    program = f"set -euo pipefail; source scripts/environment; environment {' '.join(extras)}; echo done"
    path = os.pathsep.join([str(checkout / "bin"), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", program, "scripts/serve"],
        cwd=checkout,
        env={"PATH": path, "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )


def installed(checkout: Path) -> list[str]:
    """Returns the last argument of every call of pip."""
    path = checkout / "installed"
    return [line.split()[-1] for line in path.read_text().splitlines()] if path.exists() else []


def test_the_environment_is_created_once_and_packages_are_installed_once(checkout: Path) -> None:
    for _ in range(2):
        ended = environment(checkout)
        assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    assert (checkout / "made").read_text().count("-m venv") == 1
    assert installed(checkout) == ["."]


def test_requested_extras_are_installed_with_the_base_dependencies(checkout: Path) -> None:
    for extras in (["dev"], ["dev", "train"], [], ["train"], ["dev"]):
        assert environment(checkout, *extras).returncode == 0
    assert installed(checkout) == [".[dev]", ".[dev,train]"]


def test_a_changed_pyproject_is_installed_again(checkout: Path) -> None:
    environment(checkout)
    (checkout / "pyproject.toml").write_text("[project]\ndependencies = []\n")
    environment(checkout)
    assert installed(checkout) == [".", "."]


def test_a_failed_installation_is_retried(checkout: Path) -> None:
    (checkout / "offline").touch()
    failed = environment(checkout)
    assert failed.returncode != 0 and "done" not in failed.stdout
    (checkout / "offline").unlink()
    assert environment(checkout).returncode == 0
    assert installed(checkout) == [".", "."]


def test_a_broken_environment_is_replaced(checkout: Path) -> None:
    environment(checkout)
    put(checkout / ".venv" / "bin" / "python", "#!/usr/bin/env bash\nexit 1\n")
    assert environment(checkout).returncode == 0
    assert (checkout / "made").read_text().count("-m venv --clear .venv") == 2


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (TOO_OLD, "serve: Python 3.9.2 is too old; Wane needs Python 3.11 or newer"),
        (NO_VENV, "python3 has no venv module; on Debian and Ubuntu: apt-get install python3-venv"),
    ],
    ids=["too old", "no venv"],
)
def test_the_error_names_an_unsuitable_python(checkout: Path, program: str, told: str) -> None:
    put(checkout / "bin" / "python3", program)
    ended = environment(checkout)
    assert ended.returncode == 1
    assert told in ended.stderr
    assert not (checkout / ".venv").exists()


def test_another_python_can_be_chosen(checkout: Path) -> None:
    put(checkout / "bin" / "python3", TOO_OLD)
    put(checkout / "bin" / "python3.99", PYTHON)
    assert environment(checkout, python="python3.99").returncode == 0


def test_the_error_names_a_missing_python(checkout: Path) -> None:
    assert "python4 was not found" in environment(checkout, python="python4").stderr


@pytest.mark.parametrize("script", ["serve", "test", "check", "bench", "newer-clients"])
def test_a_script_is_executable_and_has_valid_syntax(script: str) -> None:
    path = SCRIPTS / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
