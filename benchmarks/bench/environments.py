"""Creates one virtual environment for each peer, because the peers' dependencies conflict."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.bench.contenders import ENVIRONMENTS, Contender

INSTALLED = ".installed.txt"


class NotInstalled(Exception):
    """A peer's environment could not be created. The message contains the end of pip's output."""


def install(contender: Contender) -> None:
    """Creates the contender's environment if it is missing or its requirements have changed.

    Raises NotInstalled if a command fails.
    """
    if contender.requirements is None:
        return
    wanted = contender.requirements.read_text(encoding="utf-8")
    folder = ENVIRONMENTS / contender.peer
    stamp = folder / INSTALLED
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, "--requirement", str(contender.requirements)],
    ):
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise NotInstalled(f"{contender.title}: {' '.join(command)} failed: {ended.stderr[-1000:]}")
    stamp.write_text(wanted, encoding="utf-8")
