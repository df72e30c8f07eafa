"""The faults of a file's lines: each reason once, with the number of its lines and the first three."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

NAMED_LINES = 3
"""The number of lines that a message names for each reason."""

SHOWN = 60
"""The largest number of characters of a value in a message."""


class EventFileError(ValueError):
    """A file of events that cannot be read. The message names the file and the fault."""


class BadLine(ValueError):
    """A line that cannot be read. `reason` is the same for all lines with this fault. `text` is the reason with the
    line's values in the places of `{}`."""

    def __init__(self, reason: str, *values: object) -> None:
        super().__init__(reason)
        self.reason = reason
        self.text = reason
        for value in values:
            self.text = self.text.replace("{}", shown(value), 1)


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 line" or "1,200 lines"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(items: Iterable[str]) -> str:
    """Returns "a", "a and b" or "a, b and c". There is at least one item."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def shown(value: object) -> str:
    """Returns a short form of a value for a message. It can be printed in every encoding of Unicode."""
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN else f"{value[:SHOWN]!r}..."
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


@dataclass(slots=True)
class _Reason:
    text: str
    count: int = 0
    lines: list[int] = field(default_factory=list)


class Faults:
    """The bad lines of one file, by reason."""

    def __init__(self) -> None:
        self._reasons: dict[str, _Reason] = {}

    def add(self, line: int, fault: BadLine) -> None:
        """Records the fault of a line. `line` counts from 1."""
        reason = self._reasons.setdefault(fault.reason, _Reason(fault.text))
        reason.count += 1
        if len(reason.lines) < NAMED_LINES:
            reason.lines.append(line)

    @property
    def count(self) -> int:
        """The number of faults."""
        return sum(reason.count for reason in self._reasons.values())

    def describe(self) -> str:
        """Returns the reasons in the order of their first lines, each with its lines and the text of the first one."""
        ordered = sorted(self._reasons.values(), key=lambda reason: reason.lines[0])
        return "; ".join(map(_described, ordered))


def _described(reason: _Reason) -> str:
    lines = [f"{line}" for line in reason.lines]
    if more := reason.count - len(lines):
        return f"lines {', '.join(lines)} and {more:,} more: {reason.text}"
    if len(lines) == 1:
        return f"line {lines[0]}: {reason.text}"
    return f"lines {listed(lines)}: {reason.text}"
