"""Runs the command `wane` on asyncio's own event loop, and measures the longest turn of that loop.

    python -m benchmarks.stall.turns FILE serve ...

`__main__.py` starts its server this way, because uvloop does not tell where a turn begins. The processor time of the
longest turn of the loop's thread, and the part of it that the garbage collector took, are in FILE (see `Longest`).
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import struct
import sys
import threading
import time
from pathlib import Path

PAIR = struct.Struct("dd")


class Longest:
    """The seconds of processor time of the longest turn, and of the garbage collections in it. Two processes share them
    by a file."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b" if file.exists() else "w+b") as opened:
            opened.truncate(PAIR.size)
            self._mapped = mmap.mmap(opened.fileno(), PAIR.size)

    def read(self) -> tuple[float, float]:
        turn_s, collected_s = PAIR.unpack_from(self._mapped)
        return turn_s, collected_s

    def write(self, turn_s: float, collected_s: float) -> None:
        PAIR.pack_into(self._mapped, 0, turn_s, collected_s)


def measure(longest: Longest) -> None:
    """Measures every turn of an event loop on the main thread from now on."""
    run_once = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]
    main, collected_s, begun_s = threading.main_thread().ident, 0.0, 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal collected_s, begun_s
        if threading.get_ident() != main:
            return
        if phase == "start":
            begun_s = time.thread_time()
        else:
            collected_s += time.thread_time() - begun_s

    def measured(loop: asyncio.BaseEventLoop) -> None:
        nonlocal collected_s
        collected_s, before_s = 0.0, time.thread_time()
        run_once(loop)
        turn_s = time.thread_time() - before_s
        if turn_s > longest.read()[0]:
            longest.write(turn_s, collected_s)

    gc.callbacks.append(note)
    asyncio.BaseEventLoop._run_once = measured  # type: ignore[attr-defined]


if __name__ == "__main__":
    measure(Longest(Path(sys.argv[1])))
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # importing it fails, so uvicorn takes asyncio's loop
    from wane.cli import main

    sys.exit(main(sys.argv[2:]))
