"""What a process keeps is measured in one of its own, where nothing else has been."""

from __future__ import annotations

import asyncio
import gc
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


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


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def threads() -> int:
    """Of this process, Python's and others, but for those that an event loop keeps for whatever comes: how many of them
    it starts is a matter of chance."""
    spare = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("asyncio_")}
    return len({int(path.name) for path in Path("/proc/self/task").iterdir()} - spare)


def growth(samples: list[int], alike: int = 1) -> float:
    """By how much a sample is larger than the one before it: the median over all pairs, of which only those are taken
    that are a multiple of `alike` apart. It is as it was though a fifth of the samples are anything (Theil and Sen)."""
    pairs = [(i, j) for i, j in combinations(range(len(samples)), 2) if (j - i) % alike == 0]
    return median((samples[j] - samples[i]) / (j - i) for i, j in pairs)
