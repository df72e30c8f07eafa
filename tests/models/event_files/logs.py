"""Small files of events, and what is read from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wane.models.event_files.event_log import EventLog, read_log
from wane.models.event_files.format import EventFormat

TIME = 1_700_000_000
"""The time of the first event of the files, in seconds since 1970."""


def written(path: Path, *lines: str) -> Path:
    """Writes lines to a file. Returns its path."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def clicks(path: Path, *rows: str, header: str = "session,time,item") -> Path:
    """Writes a table with one of the given rows, each after a session and a time, in each line. Each row is an item and
    what follows it."""
    return written(path, header, *(f"s{at // 3},{TIME + at},{row}" for at, row in enumerate(rows)))


def read(path: Path, **keys: object) -> EventLog:
    """Reads one file. `keys`: the keys of the table `[data]`."""
    return read_log([path], EventFormat.model_validate(keys))


def sessions(log: EventLog) -> list[list[str]]:
    """Returns the event names of each session of a log."""
    return [[log.names[event] for event in part] for part in np.split(log.events, log.begins[1:-1])]
