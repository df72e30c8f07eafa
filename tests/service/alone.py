"""What a process keeps is measured in one of its own, where nothing else has been."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
MALLINFO = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
SPARE = "asyncio_"  # begins the names of the threads of `asyncio.to_thread`


def alone(measurement: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a function of a module in a new process, in an event loop; fails where it fails."""
    code = (
        f"from tests.service import alone; from {measurement.__module__} import {measurement.__name__} as measurement"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}; alone.measure(measurement)"],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr


def measure(measurement: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """What `alone` runs: the garbage collector comes only when it is asked."""
    gc.disable()
    asyncio.run(measurement())


def left(kind: type) -> list[object]:
    """The objects of a kind that are there."""
    return [one for one in gc.get_objects() if isinstance(one, kind)]


class Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`, of all its arenas; see mallinfo(3)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO)


def bytes_in_use() -> int:
    """What was asked of the C library and not freed, however much of the system's memory it takes for that."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Allocated
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def bytes_withheld() -> int:
    """What the C library could have given back to the system; afterwards it has."""
    before = resident_bytes()
    ctypes.CDLL(None).malloc_trim(0)
    return before - resident_bytes()


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def threads() -> int:
    """Of this process, Python's and others, but for those that an event loop keeps for whatever comes: how many of them
    it starts is a matter of chance. One that has just ended may be counted."""
    spare = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(SPARE)}
    return len({int(path.name) for path in Path("/proc/self/task").iterdir()} - spare)


def named_threads() -> list[str]:
    """Python's, but for those that an event loop keeps."""
    return sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith(SPARE))


def growth(samples: list[int], kinds: int) -> float:
    """By how much a sample is larger than the one before it; every `kinds`-th is of one kind, which has its own level.

    What is kept is in all samples after it, and what comes and goes is more in some: so the least of a kind's later
    half is held against the least of its earlier one, and the kind that has grown less is the one that tells."""
    grown = []
    for kind in range(kinds):
        alike = samples[kind::kinds]
        half = len(alike) // 2
        grown.append((min(alike[half:]) - min(alike[:half])) / (half * kinds))
    return min(grown)
