"""The command, commit, versions and hardware of a training run, recorded at its start."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from wane.models.layer_registry import Frozen

LIBRARIES = ("torch", "numpy", "tokenizers")


class Origin(Frozen):
    """One start or resume of a run. `git_commit` ends in + if the checkout had uncommitted changes."""

    started: str
    command: str
    git_commit: str | None
    versions: dict[str, str]
    hardware: str


def describe_origin(command: str, device: torch.device, processes: int = 1) -> Origin:
    """Describes a start of a run on `device`. `processes`: the number of processes that train the run together."""
    return Origin(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        git_commit=_git_commit(),
        versions={name: version(name) for name in LIBRARIES} | {"python": platform.python_version()},
        hardware=_hardware(device) + (f", {processes} processes" if processes > 1 else ""),
    )


def _git_commit() -> str | None:
    """Returns the commit of the git checkout, or None outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} thread(s)"
