"""Functions that measure the memory, the threads and the objects of this process. `alone` runs a measurement in a new
process."""

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
SPARE = "asyncio_"  # the names of the threads of `asyncio.to_thread` begin with this word


def alone(measurement: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `measurement`, a coroutine function at the top level of a module, in an event loop of a new process. Fails
    if `measurement` fails."""
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
    """Runs `measurement` without automatic garbage collection. `alone` makes the new process call this function."""
    gc.disable()
    asyncio.run(measurement())


def live_objects(kind: type) -> list[object]:
    """Returns all live objects of a type."""
    return [one for one in gc.get_objects() if isinstance(one, kind)]


class Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`, summed over all arenas. See mallinfo(3)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO)


def bytes_in_use() -> int:
    """Returns the number of bytes that are allocated with `malloc` and not freed, without the allocator's overhead."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Allocated
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def release_free_memory() -> int:
    """Makes the C library release its free memory to the kernel. Returns the number of bytes by which the resident
    memory shrank."""
    before = resident_bytes()
    ctypes.CDLL(None).malloc_trim(0)
    return before - resident_bytes()


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def threads() -> int:
    """Returns the number of threads of this process, including threads that Python did not start. Does not count the
    event loop's executor threads, because their number varies. The count may include a thread that has just ended."""
    spare = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(SPARE)}
    return len({int(path.name) for path in Path("/proc/self/task").iterdir()} - spare)


def named_threads() -> list[str]:
    """Returns the names of Python's threads, except an event loop's executor threads."""
    return sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith(SPARE))


def growth(samples: list[int], kinds: int) -> float:
    """Estimates the average growth from one sample to the next. Sample i is of kind i % `kinds`. Samples of different
    kinds may have different levels.

    The growth of a kind is the difference between the minimum of the later half of its samples and the minimum of the
    earlier half, divided by the number of samples between the start of the earlier half and the start of the later
    half. This function uses minima because a leak raises all later samples, but temporary memory raises only some.
    Returns the smallest growth of all kinds."""
    grown = []
    for kind in range(kinds):
        alike = samples[kind::kinds]
        half = len(alike) // 2
        grown.append((min(alike[half:]) - min(alike[:half])) / (half * kinds))
    return min(grown)
