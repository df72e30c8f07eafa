"""Reads tables of events: text with an event in each line, whose cells stand between separators.

The rows are read strictly: each must have as many cells as the header, except for an empty last cell, and a quoted cell
must be closed. A quoted cell may have line breaks, but not so many separators that it may be rows whose quotation mark
was never closed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from wane.models.event_files.faults import BadLine, EventFileError, listed, shown
from wane.models.event_files.format import Column, EventFormat
from wane.models.event_files.lines import Lines
from wane.models.event_files.rows import Rows

SEPARATORS = {".csv": (",", ";", "\t", "|"), ".dat": ("\t", "::", ";", ",", "|")}
"""The separators that are tried with the first line, in this order, by the suffix of a file's name."""

OTHERS = ("\t", ",", ";", "::", "|")
QUOTED = (",", ";")
"""The separators with which quotation marks enclose cells, unless `quoting` says otherwise."""

LARGEST_CELL = 1 << 20
"""The largest number of characters of a quoted cell."""

CSV_LIMIT = 131_072
"""The module `csv` reads cells up to this number of characters. Longer lines are read without it."""

TYPED = re.compile(r":(token|float)(_seq)?$")
"""The type that a name in the header of a `.inter` file ends with."""

OPEN = (
    "a quoted cell begins here and does not end as it should: a quotation mark within a cell is written twice, and "
    "after the last one comes a separator (data.quoting = false reads quotation marks as text)"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the lines of one table are read. `width`: the number of columns. `at`: the indices of the columns session,
    time, item and, if there is one, order."""

    separator: str
    quoting: bool
    header: bool
    width: int
    at: tuple[int, ...]


def read_table(path: Path, suffix: str, form: EventFormat, rows: Rows) -> int:
    """Reads a file as a table. `suffix`: the lower-case suffix of its name. Returns the number of its lines. Raises
    EventFileError."""
    source = Lines(path, form.longest_line_bytes)
    blocks = source.blocks()
    layout: Layout | None = None
    for first, text in blocks:
        lines = text.split("\n")
        if layout is None:
            start = next((at for at, line in enumerate(lines) if line.strip()), None)
            if start is None:
                continue
            layout = _layout(path, suffix, lines[start], form)
            if layout.header:
                lines = lines[start + 1 :]
                first += start + 1
        for numbers, cells in _rows(first, lines, blocks, layout, rows):
            if cells:
                session, time, item, *order = ([row[at] for row in cells] for at in layout.at)
                rows.extend(numbers, session, time, item, order[0] if order else None)
    return source.count


def _rows(
    first: int, lines: list[str], blocks: Iterator[tuple[int, str]], layout: Layout, rows: Rows
) -> Iterator[tuple[Sequence[int], list[list[str]]]]:
    """Yields the rows of some lines, with the numbers of their first lines. `first`: the number of the first line.
    Takes more lines from `blocks` if the last row goes on there. Records the faults of lines that are not rows."""
    cells = _split(lines, layout)
    if cells is not None and set(map(len, cells)) == {layout.width}:
        yield range(first, first + len(lines)), cells
        return
    numbers, kept = [], []
    for number, row in enumerate(cells, first) if cells is not None else _carefully(first, lines, blocks, layout, rows):
        if len(row) == layout.width + 1 and not row[-1].strip():
            row.pop()
        if len(row) == layout.width:
            numbers.append(number)
            kept.append(row)
        elif len(row) > 1 or "".join(row).strip():
            where = "header" if layout.header else "first line"
            rows.faults.add(number, BadLine(f"{{}} columns, but the {where} has {layout.width}", len(row)))
    yield numbers, kept


def _split(lines: list[str], layout: Layout) -> list[list[str]] | None:
    """Returns the cells of each line. Returns None if a line may be part of a row of several lines, or is not a row."""
    if not layout.quoting or '"' not in "".join(lines):
        return [line.split(layout.separator) for line in lines]
    if len(layout.separator) > 1 or max(map(len, lines)) > CSV_LIMIT:
        return None
    if any(' "' in line or '\t"' in line for line in lines):
        return None  # the module `csv` reads a cell with a blank before its quotation mark as text
    try:
        cells = list(csv.reader(lines, delimiter=layout.separator, strict=True))
    except csv.Error:
        return None
    return cells if len(cells) == len(lines) else None


def _carefully(
    first: int, lines: list[str], blocks: Iterator[tuple[int, str]], layout: Layout, rows: Rows
) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows of some lines, one at a time, each with the number of its first line. After a row that is not
    closed, goes on with the next line."""
    at = 0
    while at < len(lines):
        used, text = 1, lines[at]
        try:
            row = split_row(text, layout.separator)
            if row is None:
                used, text = _closed(at, lines, blocks)
                row = split_row(text, layout.separator)
                if row is None or any(_may_be_rows(cell, layout) for cell in row):
                    raise BadLine(OPEN)
        except BadLine as fault:
            rows.faults.add(first + at, fault)
            used = 1
        else:
            yield first + at, row
        at += used


def _closed(at: int, lines: list[str], blocks: Iterator[tuple[int, str]]) -> tuple[int, str]:
    """Joins a line that ends in a quoted cell with the lines after it, up to the first with an odd number of quotation
    marks, which closes the cell. Takes more lines from `blocks`, and appends them to `lines`. Returns the number of
    lines and the text. Raises BadLine if the cell is not closed."""
    length = len(lines[at])
    for end in chain(range(at + 1, len(lines)), _further(lines, blocks)):
        length += len(lines[end]) + 1
        if length > LARGEST_CELL:
            break
        if lines[end].count('"') % 2:
            return end + 1 - at, "\n".join(lines[at : end + 1])
    raise BadLine(OPEN)


def _further(lines: list[str], blocks: Iterator[tuple[int, str]]) -> Iterator[int]:
    """Appends the lines of further blocks to `lines`, and yields their indices."""
    for _, text in blocks:
        begin = len(lines)
        lines += text.split("\n")
        yield from range(begin, len(lines))


def split_row(text: str, separator: str) -> list[str] | None:
    """Returns the cells of a row, some of which may be quoted. Returns None if the last cell is not closed. Raises
    BadLine if a quoted cell does not end at a separator, or does not begin at one."""
    cells, at = [], 0
    while True:
        if text.startswith('"', at):
            end = text.find('"', at + 1)
            while end >= 0 and text.startswith('"', end + 1):
                end = text.find('"', end + 2)
            if end < 0:
                return None
            cells.append(text[at + 1 : end].replace('""', '"'))
            at = end + 1
            if at < len(text) and not text.startswith(separator, at):
                raise BadLine(OPEN)
        else:
            end = text.find(separator, at)
            end = len(text) if end < 0 else end
            cells.append(text[at:end])
            if cells[-1].lstrip().startswith('"'):
                raise BadLine("a quotation mark follows blanks at the begin of a cell")
            at = end
        if at >= len(text):
            return cells
        at += len(separator)


def _may_be_rows(cell: str, layout: Layout) -> bool:
    """Whether a quoted cell has as many line breaks and separators as if it had swallowed whole rows."""
    breaks = cell.count("\n")
    return breaks > 0 and cell.count(layout.separator) >= breaks * (layout.width - 1)


def _layout(path: Path, suffix: str, line: str, form: EventFormat) -> Layout:
    """Returns the layout of a table with the first line `line`. Raises EventFileError."""
    wanted = [
        column for key in ("session", "time", "item", "order") if (column := getattr(form.columns, key)) is not None
    ]
    tried = (form.separator,) if form.separator is not None else SEPARATORS.get(suffix, OTHERS)
    headers = [_first_row(line, separator, form) for separator in tried]
    numbered = all(_number(column) is not None for column in wanted)
    for separator, names in zip(tried, headers, strict=True):
        header = form.header if form.header is not None else form.fields is None
        if form.header is None and numbered and not all(str(column) in names for column in wanted):
            header = False
        known = list(form.fields) if form.fields is not None else names if header else []
        if suffix == ".inter" and not any(column in known for column in wanted):
            known = [TYPED.sub("", name) for name in known]
        at = [_index(column, known, len(names)) for column in wanted]
        if None not in at and (form.fields is None or len(form.fields) == len(names)):
            _check_once(path, wanted, known)
            if form.header is None and not header and not re.search(r"\d", names[at[1] or 0]):
                raise EventFileError(
                    f"{path}: the first line has no time, but {shown(names[at[1] or 0])}: if it is a header, set "
                    "data.header = true"
                )
            return Layout(
                separator,
                _is_quoting(separator, form),
                header,
                len(names),
                tuple(index for index in at if index is not None),
            )
    raise EventFileError(_no_layout(path, tried, headers, form, numbered))


def _is_quoting(separator: str, form: EventFormat) -> bool:
    return form.quoting if form.quoting is not None else separator in QUOTED


def _first_row(line: str, separator: str, form: EventFormat) -> list[str]:
    """Returns the cells of the first line, without an empty last one. Returns an empty list if it is not a row."""
    try:
        row = split_row(line, separator) if _is_quoting(separator, form) else line.split(separator)
    except BadLine:
        row = None
    names = [name.strip() for name in row or ()]
    return names[:-1] if len(names) > 1 and not names[-1] else names


def _number(column: Column) -> int | None:
    """Returns the number of a column that is named by a number, or None."""
    if isinstance(column, str):
        return int(column) if column.isascii() and column.isdecimal() and int(column) else None
    return column


def _index(column: Column, known: Sequence[str], width: int) -> int | None:
    """Returns the index of a column, or None. A name of the header goes before a number."""
    if isinstance(column, str) and column in known:
        return known.index(column)
    number = _number(column)
    return number - 1 if number is not None and number <= width else None


def _check_once(path: Path, wanted: Sequence[Column], known: Sequence[str]) -> None:
    """Raises EventFileError if two columns have a name that names a column of the events."""
    for column in wanted:
        if isinstance(column, str) and known.count(column) > 1:
            places = " and ".join(str(at) for at, name in enumerate(known, 1) if name == column)
            raise EventFileError(f"{path}: columns {places} have the name {shown(column)}: name one by its number")


def _no_layout(
    path: Path, tried: Sequence[str], headers: Sequence[list[str]], form: EventFormat, numbered: bool
) -> str:
    """Returns a message that says why no separator gives a layout."""
    names = max(headers, key=len)
    if not names or (len(names) == 1 and [] in headers):
        return f"{path}: the first line: {OPEN}"
    if form.fields is not None and all(len(form.fields) != len(header) for header in headers):
        return f"{path}: the first line has {len(names)} columns, but data.fields has {len(form.fields)}"
    if any("\udc80" <= character <= "\udcff" for name in names for character in name):
        return f"{path}: the header is not UTF-8: convert the file, which may be Latin-1 or Windows-1252"
    shorts = [shown(name)[1:-1] if name else "''" for name in names]
    known = list(form.fields) if form.fields is not None else names
    wanted = {key: getattr(form.columns, key) for key in ("session", "time", "item", "order")}
    absent = {
        key: column
        for key, column in wanted.items()
        if column is not None and _index(column, known, len(names)) is None
    }
    if absent:
        missing = f"no column{'s' * (len(absent) > 1)} {listed(map(repr, absent.values()))}"
        keys = listed(f"data.columns.{key}" for key in absent)
        if numbered or form.header is False:
            count = f"the first line has {len(names)} columns ({', '.join(shorts)})"
            return f"{path}: {missing}: {count}: set {keys} or data.separator"
        return (
            f"{path}: {missing} in the header ({', '.join(shorts)}): set {keys}"
            + (", to a number if the file has no header" if any(map(_numeric, names)) else "")
            + (", or data.separator" if len(names) == 1 else "")
        )
    return f"{path}: the columns are not found with one separator of {', '.join(map(repr, tried))}: set data.separator"


def _numeric(cell: str) -> bool:
    return cell.replace(".", "", 1).isdecimal()
