"""What the processes of a stack take: processor time by thread, and memory. Linux only: it is read from /proc."""

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
    """Processor seconds: of the process's first thread (of a replica: its event loop), and of all others of it and of
    the processes that it started."""

    first_s: float
    others_s: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.first_s - other.first_s, self.others_s - other.others_s)

    @property
    def all_s(self) -> float:
        """Both."""
        return self.first_s + self.others_s


def spent(process: Process) -> Spent:
    """Until now, by a service of the stack: each leads a session of its own, by which its processes are found."""
    total = sum(_seconds(folder) for folder in _of_session(process.pid))
    first = _seconds(Path(f"/proc/{process.pid}/task/{process.pid}"))
    return Spent(first, total - first)


def resident_bytes(process: Process) -> int:
    """What of all its processes is in memory; what they share counts for each."""
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
    """Behind the name, which may hold anything: state, parent, group, session, ..."""
    return (folder / "stat").read_text().rpartition(")")[2].split()
