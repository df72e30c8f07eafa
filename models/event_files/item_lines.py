"""Reads lines of item sequences, the layout `leave_one_out`: a user in each line, with the training items, the
validation item and the test item.

    12 7 31,9,14

The parts are separated by commas, and the items of the first part by blanks. The validation item and the test item may
be absent: then the part is empty. Items are in the order of time.
"""

from __future__ import annotations

from pathlib import Path

from wane.models.event_files.faults import BadLine
from wane.models.event_files.format import EventFormat
from wane.models.event_files.lines import Lines
from wane.models.event_files.rows import Rows

SEPARATOR = ","
PARTS = ("training items", "validation item", "test item")


def read_item_lines(path: Path, form: EventFormat, rows: Rows) -> tuple[int, list[tuple[int, int]]]:
    """Reads a file of item sequences. Returns the number of its lines and, for each session, the number of its
    validation items and of its test items, 0 or 1 each. Raises EventFileError."""
    source, held = Lines(path, form.longest_line_bytes), []
    separator = form.separator or SEPARATOR
    for first, text in source.blocks():
        for number, line in enumerate(text.split("\n"), first):
            if not line.strip():
                continue
            try:
                train, valid, test = _parts(line, separator)
                rows.add_session(number, None, [*train, *valid, *test], None, None)
                held.append((len(valid), len(test)))
            except BadLine as fault:
                rows.faults.add(number, fault)
    return source.count, held


def _parts(line: str, separator: str) -> tuple[list[str], list[str], list[str]]:
    """Returns the names of the three parts of a line. Raises BadLine."""
    parts = [part.split() for part in line.split(separator)]
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
