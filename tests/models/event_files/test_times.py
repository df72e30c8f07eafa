"""Tests how times are read, and which numbers are refused."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.models.event_files.logs import read, sessions, written
from wane.models.event_files.faults import EventFileError
from wane.models.event_files.times import Clock

MOMENT = datetime(2024, 1, 31, 12, 0, 0, 250_000, UTC)


def table(path: Path, *times: object) -> Path:
    """Writes a table with one event at each time."""
    return written(path, "session,time,item", *(f"s{at},{time},x{at}" for at, time in enumerate(times)))


@pytest.mark.parametrize(
    "text",
    [
        "2024-01-31T12:00:00.250Z",
        "2024-01-31 12:00:00.25 UTC",
        "2024-01-31 12:00:00.25UTC",
        "2024-01-31 12:00:00.25 GMT",
        "2024-01-31 12:00:00.250 +0000",
        "2024-01-31 13:00:00.250 +01:00",
        "2024-01-31T12:00:00.250000000",
        "20240131T120000.250",
    ],
)
def test_text_is_iso_8601_with_the_usual_ways_to_say_utc(text: str) -> None:
    assert Clock(None).seconds([text]).tolist() == [MOMENT.timestamp()]


@pytest.mark.parametrize(("unit", "factor"), [("s", 1), ("ms", 1_000), ("us", 10**6), ("ns", 10**9)])
def test_the_unit_of_times_since_1970_is_found_by_their_size_and_said(tmp_path: Path, unit: str, factor: int) -> None:
    path = table(tmp_path / "clicks.csv", *(int((MOMENT.timestamp() + at) * factor) for at in range(3)))
    found, stated = read(path), read(path, time_unit=unit)
    assert found.ends is not None and stated.ends is not None
    for ends in (found.ends, stated.ends):
        assert ends.tolist() == pytest.approx([MOMENT.timestamp() + at for at in range(3)], abs=0.3)
    names = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
    assert f"the times are read as {names[unit]} since 1970" in found.notes[0]
    assert "the times are read" not in stated.notes[0]


@pytest.mark.parametrize(
    ("times", "bad", "unit", "hint"),
    [
        (["20240101", "20240102"], "s 2 and 3", "yyyymmdd", "days such as 20260131, set data.time_unit = 'yyyymmdd'"),
        (
            ["45292.5", "45293"],
            "s 2 and 3",
            "spreadsheet",
            "of a spreadsheet, set data.time_unit = 'spreadsheet'",
        ),
        (["2023", "2024"], "s 2 and 3", "year", "years, set data.time_unit = 'year'"),
        (["1", "2"], "s 2 and 3", "s", "if it counts seconds, set data.time_unit = 's'"),
        (
            ["978300760", "478300761"],
            " 3",
            "s",
            "seconds since 1970, between 1990 and 2100, as the first times",
        ),
    ],
)
def test_numbers_that_may_be_something_else_are_refused_until_their_unit_is_stated(
    tmp_path: Path, times: list[str], bad: str, unit: str, hint: str
) -> None:
    path = table(tmp_path / "clicks.csv", *times)
    with pytest.raises(EventFileError) as caught:
        read(path)
    assert hint in str(caught.value) and "(data.time_unit" not in str(caught.value).split(hint)[0]
    assert str(caught.value).startswith(f"{path}, line{bad}: the time ")
    assert len(read(path, time_unit=unit)) == 2


def test_stated_units_are_read_as_the_dates_that_they_mean() -> None:
    day = datetime(2024, 1, 1, tzinfo=UTC).timestamp()
    assert Clock("yyyymmdd").seconds(["20240101", "20240102"]).tolist() == [day, day + 86_400]
    assert Clock("spreadsheet").seconds(["45292.5", "45293"]).tolist() == [day + 43_200, day + 86_400]
    assert Clock("year").seconds(["2024", 2023.0]).tolist() == [day, day - 365 * 86_400]
    assert Clock("s").seconds(["-5", 7, "2024-01-01"]).tolist() == [-5, 7, day]


@pytest.mark.parametrize(
    ("unit", "time", "message"),
    [
        ("yyyymmdd", "20241301", "not one of days such as 20260131 (data.time_unit = 'yyyymmdd')"),
        ("yyyymmdd", "20240101.5", "not one of days"),
        ("year", "2024.5", "not one of years"),
        ("spreadsheet", "-3", "not one of day numbers"),
        ("s", "1e300", "not one of seconds since 1970 (data.time_unit = 's')"),
        (None, "inf", "is not finite"),
        (None, "1_700_000_000", "is neither a number nor ISO 8601"),
        (None, "soon", "is neither a number nor ISO 8601"),
        (None, "31.01.2024", "is not ISO 8601: write the day as year-month-day in the file"),
        (None, "31.01.2024 12:00", "is not ISO 8601: write the day as year-month-day in the file"),
        (None, "1/31/24 5:00 PM", "is not ISO 8601: write the day as year-month-day in the file"),
        (None, "2024/01/31", "is not ISO 8601: write the day as year-month-day in the file"),
        (None, "31-01-2024", "is not ISO 8601: write the day as year-month-day in the file"),
        (None, "12:00:00", "is neither a number nor ISO 8601"),
        (None, "", "is neither a number nor ISO 8601"),
    ],
)
def test_what_is_not_a_time_is_refused(tmp_path: Path, unit: str | None, time: str, message: str) -> None:
    good = {"yyyymmdd": "20240101", "year": "2024", "spreadsheet": "45292"}.get(unit or "", "1700000000")
    path = table(tmp_path / "clicks.csv", good, time, good)
    with pytest.raises(EventFileError) as caught:
        read(path, time_unit=unit)
    assert f", line 3: the time {time!r} " in str(caught.value) and message in str(caught.value)
    assert sessions(read(path, time_unit=unit, on_bad_line="skip")) == [["x0"], ["x2"]]


def test_one_wrong_time_at_the_begin_does_not_decide_the_unit(tmp_path: Path) -> None:
    path = table(tmp_path / "clicks.csv", 1_700_000_000, *(1_700_000_000_000 + at for at in range(9)), 0)
    with pytest.raises(EventFileError, match=r", lines 2 and 12: the time '1700000000' is not one of milliseconds"):
        read(path)


def test_a_number_beside_iso_8601_is_not_read_as_a_date(tmp_path: Path) -> None:
    """`fromisoformat` reads 13 digits as a day, any separator and a time."""
    path = table(tmp_path / "clicks.csv", "2021-01-08T00:00:00", "1610121530123", "20210109")
    log = read(path, on_bad_line="skip")
    assert log.ends is not None and log.ends.min() >= datetime(2021, 1, 8, tzinfo=UTC).timestamp()
