"""Converts the cells of a time column to seconds since 1970.

Text is ISO 8601. A number counts units since a date. If the unit is not stated, it is found by the size of the first
times: seconds, milliseconds, microseconds and nanoseconds between 1990 and 2100 cannot be confused. Other numbers, such
as days (20260131), day numbers of a spreadsheet and years, are refused unless their unit is stated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from wane.models.event_files.faults import BadLine
from wane.models.event_files.format import TimeUnit

EARLIEST_S, LATEST_S = 631_152_000.0, 4_102_444_800.0
"""The years 1990 and 2100 in seconds since 1970. The unit of times between them can be found."""

LAST_S = 253_402_300_799.0
"""The last second of the year 9999."""

DAY_S = 86_400
SPREADSHEET_EPOCH = 25_569
"""The day number of 1970-01-01 in a spreadsheet, which counts days since 1899-12-30."""

PER_SECOND: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
UNIT_NAMES: dict[TimeUnit, str] = {
    "s": "seconds since 1970",
    "ms": "milliseconds since 1970",
    "us": "microseconds since 1970",
    "ns": "nanoseconds since 1970",
    "yyyymmdd": "days such as 20260131",
    "spreadsheet": "day numbers of a spreadsheet",
    "year": "years",
}
assert set(UNIT_NAMES) == set(get_args(TimeUnit)), "a unit has no name: this is a bug"

ZONE = re.compile(r"\s*(?:UTC|GMT)$|\s+(?=[+-]\d\d:?\d\d$)")
"""What is removed from a time before it is ISO 8601: the zone `UTC`, and blanks before a numeric zone."""

DAY_AND_MONTH = re.compile(r"\s*\d{1,2}[./-]\d{1,2}[./-]\d{2,4}\b|\s*\d{4}[./]\d{1,2}[./]\d{1,2}\b")
"""How a day begins that is written in another order, or with other marks, than ISO 8601: 31.01.2026, 1/31/2026,
2026/01/31."""

Cell = str | int | float


class Clock:
    """Converts times. `unit` is the unit of numbers: None until it was stated or found."""

    def __init__(self, unit: TimeUnit | None) -> None:
        self.unit = unit
        self.stated = unit is not None

    def seconds(self, cells: Sequence[Cell]) -> NDArray[np.float64]:
        """Returns the times in seconds since 1970: float64 (n,), NaN for a cell that is not a time."""
        numbers = _mapped(float, cells) if _may_be_numbers(cells) else None
        if numbers is None:
            texts = _mapped(_iso, cells)
            if texts is not None:
                return texts
            numbers = np.array([number_or_nan(cell) for cell in cells], np.float64)
            texts = np.array([_iso_or_nan(cell) if np.isnan(numbers[at]) else np.nan for at, cell in enumerate(cells)])
            return np.where(np.isnan(numbers), texts, self._of_numbers(numbers))
        return self._of_numbers(numbers)

    def fault(self, cell: Cell) -> BadLine:
        """Returns the reason why `seconds` gave NaN for a cell."""
        number = number_or_nan(cell)
        if math.isnan(number) and DAY_AND_MONTH.match(str(cell)):
            return BadLine(
                "the time {} is not ISO 8601: write the day as year-month-day in the file, such as 2026-01-31 12:00:00 "
                "(no option reads other orders)",
                cell,
            )
        if math.isnan(number) and "nan" not in str(cell).lower():
            return BadLine("the time {} is neither a number nor ISO 8601, such as 2026-01-31 12:00:00", cell)
        if not math.isfinite(number):
            return BadLine("the time {} is not finite", cell)
        if self.stated:
            assert self.unit is not None, "a stated unit is None: this is a bug"
            return BadLine(
                f"the time {{}} is not one of {UNIT_NAMES[self.unit]} (data.time_unit = '{self.unit}')", cell
            )
        if (unit := _likely_unit(number)) is not None and self.unit is None:
            return BadLine(
                "the time {} does not count seconds to nanoseconds since 1970, between 1990 and 2100; "
                f"if it is one of {UNIT_NAMES[unit]}, set data.time_unit = '{unit}'",
                cell,
            )
        if self.unit is not None:
            return BadLine(
                f"the time {{}} is not one of {UNIT_NAMES[self.unit]}, between 1990 and 2100, as the first times are "
                f"(data.time_unit = '{self.unit}' allows all years)",
                cell,
            )
        return BadLine(
            "the time {} does not count seconds to nanoseconds since 1970, between 1990 and 2100; "
            "if it counts seconds, set data.time_unit = 's'",
            cell,
        )

    def describe(self) -> str | None:
        """Returns a sentence about the unit that was found, or None if the unit was stated or no time was a number."""
        if self.stated or self.unit is None:
            return None
        return f"the times are read as {UNIT_NAMES[self.unit]}, by their size"

    def _of_numbers(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.unit is None:
            self.unit = _found_unit(numbers)
            if self.unit is None:
                return np.full(len(numbers), np.nan)
        if self.unit in PER_SECOND:
            seconds = numbers / PER_SECOND[self.unit]
            first, last = (-LAST_S, LAST_S) if self.stated else (EARLIEST_S, LATEST_S)
            return np.where((seconds >= first) & (seconds <= last), seconds, np.nan)
        if self.unit == "spreadsheet":
            seconds = (numbers - SPREADSHEET_EPOCH) * DAY_S
            return np.where((numbers >= 1) & (seconds <= LAST_S), seconds, np.nan)
        values, places = np.unique(numbers, return_inverse=True)
        of_values = _day_s if self.unit == "yyyymmdd" else _year_s
        return np.array([of_values(value) for value in values.tolist()], np.float64)[places]


def _mapped(convert: Callable[[Cell], float], cells: Sequence[Cell]) -> NDArray[np.float64] | None:
    """Returns the converted cells, or None if one cannot be converted."""
    try:
        return np.fromiter(map(convert, cells), np.float64, len(cells))
    except (ValueError, TypeError, OverflowError):
        return None


def _may_be_numbers(cells: Sequence[Cell]) -> bool:
    """Returns False if a cell is true or false, or has an underscore, which `float` would accept."""
    kinds = set(map(type, cells))
    if kinds == {str}:
        return "_" not in "".join(cells)  # type: ignore[arg-type]  # all are texts
    return bool not in kinds and not any("_" in cell for cell in cells if isinstance(cell, str))


def number_or_nan(cell: object) -> float:
    """Returns a cell as a number, or NaN if it is none."""
    if isinstance(cell, bool) or "_" in str(cell):
        return math.nan
    try:
        return float(cell)  # type: ignore[arg-type]
    except (ValueError, TypeError, OverflowError):
        return math.nan


def _iso_or_nan(cell: object) -> float:
    try:
        return _iso(cell)
    except (ValueError, TypeError, OverflowError):
        return math.nan


def _iso(cell: object) -> float:
    """Returns the seconds since 1970 of an ISO 8601 text. `UTC` and `GMT` may stand for the zone, after a blank. Raises
    ValueError or TypeError."""
    if not isinstance(cell, str):
        raise TypeError("a time is neither text nor a number")
    text = cell.strip()
    if text.isdecimal() and len(text) != len("20260131"):
        raise ValueError("a number, of which `fromisoformat` would read the first digits as a date")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = datetime.fromisoformat(ZONE.sub("", text))
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _found_unit(numbers: NDArray[np.float64]) -> TimeUnit | None:
    """Returns the unit with which most of the times are between 1990 and 2100, or None if there is no such time."""
    counts = {
        unit: int(np.count_nonzero((numbers >= EARLIEST_S * factor) & (numbers <= LATEST_S * factor)))
        for unit, factor in PER_SECOND.items()
    }
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] else None


def _likely_unit(number: float) -> TimeUnit | None:
    """Returns the unit other than seconds that a refused number suggests."""
    if 1900 <= number < 2100 and number.is_integer():
        return "year"
    if 20_000 <= number < 80_000:
        return "spreadsheet"
    return None if math.isnan(_day_s(number)) else "yyyymmdd"


def _day_s(number: float) -> float:
    """Returns the seconds since 1970 of a day such as 20260131, or NaN if there is no such day."""
    if not number.is_integer():
        return math.nan
    year, rest = divmod(int(number), 10_000)
    try:
        return datetime(year, *divmod(rest, 100), tzinfo=UTC).timestamp() if year >= 1000 else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _year_s(number: float) -> float:
    """Returns the seconds since 1970 of the begin of a year, or NaN if the number is not a year."""
    return (
        datetime(int(number), 1, 1, tzinfo=UTC).timestamp()
        if number.is_integer() and 1 <= number < 10_000
        else math.nan
    )
