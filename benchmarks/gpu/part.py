"""What every part of the run gets: a device, a deadline, and a record that is written to its file at each change.

This module needs Python alone, so that parts without other packages can use it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Device = Literal["cuda", "cpu"]

Figures = dict[str, Any]


class Skipped(Exception):
    """A part, or one of its figures, cannot be measured here. The message says what is missing."""


def write_record(path: Path, record: object) -> None:
    """Writes JSON atomically. The file is complete whenever the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_suffix(".part")
    building.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    building.replace(path)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Returns the median, the smallest and the largest value, with the keys of `benchmarks.summary.Spread`, which needs
    pydantic."""
    some = [float(value) for value in values]
    return {"median": statistics.median(some), "least": min(some), "most": max(some)}


@dataclass
class Part:
    """One part of the run.

    folder: the folder of the results. name: the part's name and the name of its file. deadline: the value of
    `time.monotonic` at which the part is ended. small: whether the sizes are those of a rehearsal. data: the folder of
    WikiText-2, if there is one.
    """

    name: str
    folder: Path
    device: Device
    deadline: float
    small: bool
    data: Path | None = None
    record: Figures = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """The time that is left, in seconds."""
        return self.deadline - time.monotonic()

    def say(self, text: str) -> None:
        """Prints a line of progress with the time that is left."""
        print(f"  {self.name}: {text} ({max(0.0, self.left_s):.0f} s left)", flush=True)

    def keep(self, **figures: Any) -> None:
        """Adds figures to the record and writes it."""
        self.record |= figures
        self.write()

    def add(self, name: str, figures: Figures) -> None:
        """Appends one entry to a list of the record and writes it."""
        self.record.setdefault(name, []).append(figures)
        self.write()

    def write(self) -> None:
        """Writes the record to the part's file."""
        write_record(self.folder / f"{self.name}.json", self.record)

    def read(self, name: str) -> Figures:
        """Returns the record of an earlier part; empty if it has none."""
        try:
            found: Figures = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return found


def timed(device: Device, run: Callable[[], object], repeats: int, warm: int = 2) -> list[float]:
    """Returns the duration of each of `repeats` runs in seconds. On CUDA these are times between events of the current
    stream, without the time in which the host waits. The first `warm` runs are not counted."""
    import torch

    for _ in range(warm):
        run()
    if device == "cpu":
        taken = []
        for _ in range(repeats):
            begun = time.perf_counter()
            run()
            taken.append(time.perf_counter() - begun)
        return taken
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
