"""Reads JSON lines of events. A line is a session (a list of events, or `{"session": ..., "events": [...]}`), or one
event with its session: an object whose keys are the columns. An event of a session is a name, or an object with the key
of the item and, if events have times, that of the time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wane.models.event_files.faults import BadLine, EventFileError, shown
from wane.models.event_files.format import EventColumns, EventFormat
from wane.models.event_files.lines import Lines
from wane.models.event_files.rows import NOT_NAMES, Rows

EVENTS = "events"
NOT_A_SESSION = 'not a list of event names or {"session": ..., "events": [...]}'


def read_json_lines(path: Path, form: EventFormat, rows: Rows) -> int:
    """Reads a file of JSON lines. Returns the number of its lines. Raises EventFileError."""
    columns = form.columns
    for key in ("session", "time", "item", "order"):
        if isinstance(getattr(columns, key), int):
            raise EventFileError(f"{path}: data.columns.{key} is a number, but the keys of JSON objects have names")
    source = Lines(path, form.longest_line_bytes)
    for first, text in source.blocks():
        table: list[tuple[int, Any, Any, Any, Any]] = []
        unicode = _is_unicode(text)
        for number, line in enumerate(text.split("\n"), first):
            if not line.strip():
                continue
            try:
                if not unicode:
                    _check_unicode(line)
                record = _parsed(line)
                if isinstance(record, dict) and EVENTS not in record:
                    table.append((number, *_row(record, columns)))
                else:
                    _add_session(number, record, columns, rows)
            except BadLine as fault:
                rows.faults.add(number, fault)
        if table:
            numbers, sessions, times, items, orders = zip(*table, strict=True)
            rows.extend(numbers, sessions, times, items, None if columns.order is None else orders)
    return source.count


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_unicode(line: str) -> None:
    """Raises BadLine if a byte of the line was not UTF-8."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise BadLine("not UTF-8 at byte {} of the line", len(line[: error.start].encode())) from error


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine("not JSON: {}", error) from error


def _row(record: dict[str, Any], columns: EventColumns) -> tuple[str, Any, str, Any]:
    """Returns the session, the time, the item and the order of an object that is one event. Raises BadLine."""
    if columns.item not in record:
        raise BadLine(
            f"{NOT_A_SESSION}, and not an event with the key {shown(columns.item)} (data.columns.item): it has {{}}",
            ", ".join(record),
        )
    try:
        session, time, item = record[columns.session], record[columns.time], record[columns.item]  # type: ignore[index]
        order = None if columns.order is None else record[columns.order]  # type: ignore[index]
    except KeyError as error:
        key = next(key for key in ("session", "time", "order") if getattr(columns, key) == error.args[0])
        raise BadLine(f"the event has no {shown(error.args[0])} (data.columns.{key})") from error
    if type(session) not in (str, int):
        raise BadLine(f"the value of {shown(columns.session)} is neither text nor an integer")
    if type(item) not in (str, int):
        raise BadLine(f"the value of {shown(columns.item)} is neither text nor an integer")
    return str(session), time, str(item), order


def _add_session(line: int, record: Any, columns: EventColumns, rows: Rows) -> None:
    """Adds the session of a line. Raises BadLine."""
    session = None
    if isinstance(record, dict):
        if strange := record.keys() - {"session", columns.session, EVENTS}:
            raise BadLine(f"{NOT_A_SESSION}: it has the key {{}}", min(strange))
        session, record = record.get(str(columns.session), record.get("session")), record[EVENTS]
        if session is not None and type(session) not in (str, int):
            raise BadLine('the value of "session" is neither text nor an integer')
    if not isinstance(record, list):
        raise BadLine("not a list of event names")
    if session is not None and str(session) in rows.sessions:
        raise BadLine("an earlier line has the same session {}", session)
    if record:
        names, times, orders = _columns_of(record, columns)
        rows.add_session(line, None if session is None else str(session), names, times, orders)


def _columns_of(events: list[Any], columns: EventColumns) -> tuple[list[Any], list[Any] | None, list[Any] | None]:
    """Returns the names, the times and the orders of a session's events. Raises BadLine."""
    if dict not in map(type, events):
        return events, None, None
    if set(map(type, events)) != {dict}:
        raise BadLine(NOT_NAMES)
    for event in events:
        if columns.item not in event:
            raise BadLine(f"an event has no {shown(columns.item)} (data.columns.item): it has {{}}", ", ".join(event))
    found: list[list[Any] | None] = [[event[columns.item] for event in events]]
    for column in (columns.time, columns.order):
        having = [event[column] for event in events if column in event]
        if having and len(having) < len(events):
            raise BadLine(f"an event has no {shown(column)}, but others of its session have one")
        found.append(having or None)
    names, times, orders = found
    assert names is not None, "events without names: this is a bug"
    if times is None:
        raise BadLine(
            f"the events have no {shown(columns.time)} (data.columns.time): they have {{}}", ", ".join(events[0])
        )
    if columns.order is not None and orders is None:
        raise BadLine(f"the events have no {shown(columns.order)} (data.columns.order)")
    return names, times, orders
