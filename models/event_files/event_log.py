"""Reads files of events (JSON lines, tables or Parquet) as one log, and cuts it into sessions.

JSON lines have one session per line, the oldest session first, unless their events have times. Tables and Parquet files
have one event per row, in any order. An event's name is text or an integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wane.models.event_files.faults import EventFileError, Faults, counted, listed
from wane.models.event_files.format import EventFormat
from wane.models.event_files.forms import describe_absent, describe_forms
from wane.models.event_files.item_lines import PARTS, read_item_lines
from wane.models.event_files.json_lines import read_json_lines
from wane.models.event_files.parquet import read_parquet
from wane.models.event_files.rows import Rows
from wane.models.event_files.tables import read_table

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet", ".pq")
TABLES = (".csv", ".tsv", ".inter", ".txt", ".dat", ".data")
EVENTS_ONLY = (*JSON_LINES, *PARQUET, ".csv", ".tsv", ".inter")
"""The suffixes of files that have events, and not text."""


@dataclass(frozen=True, slots=True)
class EventLog:
    """Sessions of events, in the order of their ends.

    names: the event names. events: int32 (events,), the index in `names` of each event, session after session. begins:
    int64 (sessions + 1), the index in `events` of each session's first event and, as the last number, the length of
    `events`. ends: float64 (sessions,), the time of each session's last event in seconds since 1970, or None if the
    source has no times. held: int64 (sessions, 2), in the layout `leave_one_out` the number of events at each session's
    end that are its validation item, and its test item; otherwise None. notes: sentences about what was read and what
    was left out.
    """

    names: list[str]
    events: NDArray[np.int32]
    begins: NDArray[np.int64]
    ends: NDArray[np.float64] | None
    notes: tuple[str, ...] = ()
    held: NDArray[np.int64] | None = None

    def sessions(self, chosen: NDArray[np.int64]) -> EventLog:
        """Returns the sessions with the indices `chosen`, int64 (n,), in the order of `chosen`, without the notes."""
        return self.first_events(chosen, np.diff(self.begins)[chosen])

    def first_events(self, chosen: NDArray[np.int64], lengths: NDArray[np.int64]) -> EventLog:
        """Returns the first `lengths` events of the sessions `chosen`, int64 (n,) each, like `sessions`."""
        begins = np.concatenate([[0], np.cumsum(lengths)])
        index = np.repeat(self.begins[chosen] - begins[:-1], lengths) + np.arange(begins[-1])
        return EventLog(self.names, self.events[index], begins, None if self.ends is None else self.ends[chosen])

    def __len__(self) -> int:
        """Returns the number of sessions."""
        return len(self.begins) - 1


def suffix_of(path: Path) -> str:
    """Returns the suffix of a file's name in lower case, without the `.gz` of a compressed file."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def read_log(paths: Sequence[Path], form: EventFormat) -> EventLog:
    """Reads files of one kind as one log. Raises EventFileError, which names the file and its bad lines."""
    suffixes = {suffix_of(path) for path in paths}
    kinds = (TABLES,) if form.layout == "leave_one_out" else (JSON_LINES, PARQUET, TABLES)
    kind = next((kind for kind in kinds if suffixes <= set(kind)), None)
    if kind is None:
        known = ", ".join(suffix for kind in kinds for suffix in kind)
        found = ", ".join(sorted(suffixes))
        raise EventFileError(f"{paths[0]}: events are read from files of one kind: {known}; found {found}")
    rows, notes, count = Rows(form), [], 0
    held: list[tuple[int, int]] = []
    for path in paths:
        rows.faults, rows.left_out = Faults(), Faults()
        if form.layout == "leave_one_out":
            lines, more = read_item_lines(path, form, rows)
            held += more
        elif kind is JSON_LINES:
            lines = read_json_lines(path, form, rows)
        elif kind is PARQUET:
            lines = read_parquet(path, form, rows)
        else:
            lines = read_table(path, suffix_of(path), form, rows)
        notes += _check(path, lines, rows, form)
        count += lines
    if form.session_gap_s is not None and rows.timed is False:
        raise EventFileError(f"{paths[0]}: data.session_gap_s needs times, which these JSON lines do not have")
    if not len(rows):
        raise EventFileError(": ".join([f"{paths[0]}", *notes, "the file has no events"]))
    log, grouped = _grouped(rows, form)
    first = f"read {counted(len(log.events), 'event')} of {counted(len(log), 'session')} from {counted(count, 'line')}"
    of_files = "" if len(paths) == 1 else f" of {counted(len(paths), 'file')}"
    unit = rows.clock.describe()
    notes = [first + of_files + (f"; {unit}" if unit else ""), *notes, *grouped, *_forms(rows)]
    if form.layout != "leave_one_out":
        return replace(log, notes=tuple(notes))
    ends = np.array(held, np.int64).reshape(-1, 2)
    empty = [
        f"{int(np.count_nonzero(column == 0)):,} have no {part}" for part, column in zip(PARTS[1:], ends.T, strict=True)
    ]
    return replace(log, notes=(*notes, f"of {counted(len(log), 'session')}, {listed(empty)}"), held=ends)


def _check(path: Path, lines: int, rows: Rows, form: EventFormat) -> list[str]:
    """Returns sentences about what was left out of a file. Raises EventFileError if bad lines are refused."""
    wrong = rows.faults.count
    if wrong and form.on_bad_line == "refuse":
        how_many = f"{wrong:,} of {lines:,} lines {'is' if wrong == 1 else 'are'} wrong"
        if 2 * wrong < lines:
            how_many += f"; data.on_bad_line = 'skip' leaves {'it' if wrong == 1 else 'them'} out"
        raise EventFileError(f"{path}, {rows.faults.describe()} ({how_many})")
    notes = []
    if wrong:
        notes.append(f"{path.name}: left out {wrong:,} of {counted(lines, 'line')}: {rows.faults.describe()}")
    if unnamed := rows.left_out.count:
        notes.append(f"{path.name}: left out {counted(unnamed, 'event')} for their names: {rows.left_out.describe()}")
    return notes


def _grouped(rows: Rows, form: EventFormat) -> tuple[EventLog, list[str]]:
    """Returns the rows as sessions, and sentences about events of the same time. These keep their order, unless there
    is a column that orders them."""
    owners, events, times, orders = rows.owners, rows.events, rows.times, rows.orders
    if not rows.timed:
        edges = np.flatnonzero(owners[1:] != owners[:-1]) + 1
        begins = np.concatenate([np.zeros(min(1, len(events)), np.int64), edges, [len(events)]])
        return EventLog(rows.names, events, begins, None), []
    order = np.lexsort((times, owners) if orders is None else (orders, times, owners))
    owners, times, events = owners[order], times[order], events[order]
    tied = (owners[1:] == owners[:-1]) & (times[1:] == times[:-1])
    if orders is not None:
        orders = orders[order]
        tied &= orders[1:] == orders[:-1]
    notes = []
    repeats = _repeats(tied, events)
    if count := int(np.count_nonzero(repeats)):
        note = f"{counted(count, 'event')} repeat{'s' * (count == 1)} another of the same session, time and item"
        if form.duplicates == "drop":
            notes.append(f"{note}, and {'is' if count == 1 else 'are'} left out")
            owners, times, events = owners[~repeats], times[~repeats], events[~repeats]
            tied = (owners[1:] == owners[:-1]) & (times[1:] == times[:-1])
            tied &= True if orders is None else np.diff(orders[~repeats]) == 0
        else:
            notes.append(f"{note} (data.duplicates = 'drop' leaves out all but the first)")
    if count := int(np.count_nonzero(tied)):
        neighbours = int(np.count_nonzero(owners[1:] == owners[:-1]))
        notes.append(
            f"{count:,} of {neighbours:,} neighbouring events of a session have the same time"
            + (" and order" if orders is not None else "")
            + ": they keep the order of the file"
            + (" (data.columns.order names a column that orders them)" if orders is None else "")
        )
    new = owners[1:] != owners[:-1]
    if form.session_gap_s is not None:
        new |= np.diff(times) > form.session_gap_s
    edges = np.flatnonzero(new) + 1
    begins = np.concatenate([np.zeros(min(1, len(events)), np.int64), edges, [len(events)]])
    ends = times[begins[1:] - 1]
    return EventLog(rows.names, events, begins, ends).sessions(np.argsort(ends, kind="stable")), notes


def _repeats(tied: NDArray[np.bool_], events: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Returns which events repeat an earlier event of the same run of ties: bool (events,). tied: bool (events - 1,),
    whether each event but the first ties with the one before it."""
    found = np.zeros(len(events), bool)
    if not tied.any():
        return found
    in_run = np.zeros(len(events), bool)
    in_run[1:] |= tied
    in_run[:-1] |= tied
    at = np.flatnonzero(in_run)
    run = np.concatenate([[0], np.cumsum(~tied)])[at]
    order = np.lexsort((events[at], run))
    at, run = at[order], run[order]
    found[at[1:]] = (run[1:] == run[:-1]) & (events[at[1:]] == events[at[:-1]])
    return found


def _forms(rows: Rows) -> list[str]:
    """Returns sentences about names and ids that differ in form only, or may stand for an absent value."""
    notes = [f"{counted(rows.stripped, 'name')} read without the blanks around them or their line breaks"]
    counts = np.bincount(rows.events, minlength=len(rows.names))
    sessions = np.bincount(rows.owners, minlength=rows.session_count)
    index = np.fromiter(rows.sessions.values(), np.int64, len(rows.sessions))
    of_sessions = list(rows.sessions), sessions[index]
    return [
        *notes[: rows.stripped],
        *describe_forms("items", rows.names, counts),
        *describe_absent("items", rows.names, counts),
        *describe_forms("sessions", *of_sessions),
        *describe_absent("sessions", *of_sessions),
    ]
