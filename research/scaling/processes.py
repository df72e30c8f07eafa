"""CPU time and memory of a stack's processes. Works only on Linux, because it reads /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.stack.process import Process

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
USER, SYSTEM = 11, 12
SESSION = 3


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of a process. `first_s`: the CPU seconds of the first thread, which in a replica runs the event loop.
    `others_s`: the CPU seconds of the other threads and of child processes."""

    first_s: float
    others_s: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.first_s - other.first_s, self.others_s - other.others_s)

    @property
    def all_s(self) -> float:
        """The sum of all CPU seconds."""
        return self.first_s + self.others_s


def spent(process: Process) -> Spent:
    """Returns the CPU seconds that a service has used so far. The service's processes are all processes of its
    operating-system session."""
    total = sum(_seconds(folder) for folder in _of_session(process.pid))
    first = _seconds(Path(f"/proc/{process.pid}/task/{process.pid}"))
    return Spent(first, total - first)


def resident_bytes(process: Process) -> int:
    """Returns the resident memory of all processes of a service. Memory that processes share is counted once for each
    process."""
    total = 0
    for folder in _of_session(process.pid):
        with contextlib.suppress(OSError):
            lines = (folder / "status").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total


def _of_session(leader: int) -> Iterator[Path]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if int(_fields(folder)[SESSION]) == leader:
                    yield folder


def _seconds(folder: Path) -> float:
    with contextlib.suppress(OSError):
        fields = _fields(folder)
        return TICK_S * (int(fields[USER]) + int(fields[SYSTEM]))
    return 0.0


def _fields(folder: Path) -> list[str]:
    """Returns the fields of /proc/PID/stat after the process's name: state, parent, group, session and so on. The name
    itself may contain spaces and parentheses."""
    return (folder / "stat").read_text().rpartition(")")[2].split()
