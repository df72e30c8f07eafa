"""Reads lines of item sequences, the layout `leave_one_out`: a user in each line, with the training items, the
validation item and the test item.

    12 7 31,9,14

The parts are separated by commas, and the items of the first part by blanks. The validation item and the test item may
be absent: then the part is empty. Items are in the order of time. There is neither a header nor quotation marks around
a part: lines that look so are bad lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from wane.models.event_files.faults import BadLine
from wane.models.event_files.format import EventFormat
from wane.models.event_files.lines import Lines
from wane.models.event_files.rows import Rows

SEPARATOR = ","
DIGIT, NUMBERS = re.compile(r"\d"), re.compile(r"[\d\s]+")
HEADER = "a line without digits before a line of numbers: it looks like a header, which this layout does not have"
PARTS = ("training items", "validation item", "test item")


def read_item_lines(path: Path, form: EventFormat, rows: Rows) -> tuple[int, list[tuple[int, int]]]:
    """Reads a file of item sequences. Returns the number of its lines and, for each session, the number of its
    validation items and of its test items, 0 or 1 each. Raises EventFileError."""
    source = Lines(path, form.longest_line_bytes)
    held: list[tuple[int, int]] = []
    separator = form.separator or SEPARATOR
    first_line: tuple[int, str] | None = None
    for number, line in _with_text(source):
        if number == 1 and not DIGIT.search(line):
            first_line = number, line  # a header, or a line of names
            continue
        if first_line is not None:
            if NUMBERS.fullmatch(line.replace(separator, " ")):
                rows.faults.add(1, BadLine(HEADER))
            else:
                _add(*first_line, separator, rows, held)
            first_line = None
        _add(number, line, separator, rows, held)
    if first_line is not None:
        _add(*first_line, separator, rows, held)
    return source.count, held


def _with_text(source: Lines) -> Iterator[tuple[int, str]]:
    """Yields the lines that are not blank, with their numbers."""
    for first, text in source.blocks():
        yield from ((number, line) for number, line in enumerate(text.split("\n"), first) if line.strip())


def _add(number: int, line: str, separator: str, rows: Rows, held: list[tuple[int, int]]) -> None:
    """Adds a line's session to the rows, and the numbers of its held-out items to `held`. Records the line's fault."""
    try:
        train, valid, test = _parts(line, separator)
        rows.add_session(number, None, [*train, *valid, *test], None, None)
    except BadLine as fault:
        rows.faults.add(number, fault)
    else:
        held.append((len(valid), len(test)))


def _parts(line: str, separator: str) -> tuple[list[str], list[str], list[str]]:
    """Returns the names of the three parts of a line. Raises BadLine."""
    cells = [cell.strip() for cell in line.split(separator)]
    if quoted := next((cell for cell in cells if len(cell) > 1 and cell[0] == cell[-1] == '"'), None):
        raise BadLine("quotation marks around {}: this layout has none", quoted)
    parts = [cell.split() for cell in cells]
    if len(parts) != len(PARTS):
        raise BadLine(
            f"{{}} parts with the separator {separator!r}, but layout = 'leave_one_out' has {len(PARTS)}: "
            f"{', '.join(PARTS)}",
            len(parts),
        )
    train, valid, test = parts
    if not train:
        raise BadLine("no training items")
    for name, part in zip(PARTS[1:], (valid, test), strict=True):
        if len(part) > 1:
            raise BadLine(f"{{}} items where the {name} is", len(part))
    return train, valid, test
