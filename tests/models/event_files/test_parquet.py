"""Tests Parquet files of events."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.models.event_files.logs import TIME, read, sessions
from wane.models.event_files.faults import EventFileError

MOMENTS = [datetime.fromtimestamp(TIME + at, UTC) for at in (2, 1, 0)]


def table(path: Path, times: Any, **columns: Any) -> Path:
    """Writes a table with the events x, y and z of one session, at the given times."""
    parquet.write_table(pyarrow.table({"session": [7, 7, 7], "time": times, "item": ["x", "y", "z"], **columns}), path)
    return path


@pytest.mark.parametrize(
    "times",
    [
        [TIME + 2, TIME + 1, TIME],
        [(TIME + at) * 1000 for at in (2, 1, 0)],
        [moment.isoformat() for moment in MOMENTS],
        *(pyarrow.array(MOMENTS, pyarrow.timestamp(unit, "UTC")) for unit in ("s", "ms", "us", "ns")),
        pyarrow.array([moment.replace(tzinfo=None) for moment in MOMENTS], pyarrow.timestamp("us")),
    ],
    ids=["seconds", "milliseconds", "text", "s", "ms", "us", "ns", "without a zone"],
)
def test_numbers_text_and_timestamps_are_times(tmp_path: Path, times: Any) -> None:
    log = read(table(tmp_path / "clicks.parquet", times))
    assert sessions(log) == [["z", "y", "x"]]
    assert log.ends is not None and log.ends.tolist() == [TIME + 2]


def test_dates_and_an_order_are_read(tmp_path: Path) -> None:
    path = table(tmp_path / "clicks.pq", [date(2026, 1, 31)] * 3, place=[3, 1, 2])
    log = read(path, columns={"order": "place"})
    assert sessions(log) == [["y", "z", "x"]]
    assert log.ends is not None and log.ends.tolist() == [datetime(2026, 1, 31, tzinfo=UTC).timestamp()]
    assert sessions(read(path, columns={"session": 1, "time": 2, "item": 4})) == [["3", "1", "2"]]


def test_empty_values_and_unknown_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "clicks.parquet"
    parquet.write_table(pyarrow.table({"session": ["a", None], "time": [TIME, TIME], "item": [1, 2]}), path)
    with pytest.raises(EventFileError, match=r"line 2: the value of 'session' is empty \(1 of 2 lines is wrong\)"):
        read(path)
    assert sessions(read(path, on_bad_line="skip")) == [["1"]]
    with pytest.raises(EventFileError, match=r"no column 'aid' \(session, time, item\): set data\.columns\.item"):
        read(path, columns={"item": "aid"})
    parquet.write_table(pyarrow.table({"session": ["a"], "time": [TIME], "item": [[1, 2]]}), path)
    with pytest.raises(EventFileError, match="the column 'item' has lists or records"):
        read(path)


def test_what_is_not_parquet_or_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clicks.parquet"
    with pytest.raises(EventFileError, match=r"clicks\.parquet: .*No such file"):
        read(path)
    path.write_bytes(b"session,time,item\n" * 9)
    with pytest.raises(EventFileError, match="not a Parquet file that can be read"):
        read(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EventFileError, match="Parquet files need pyarrow"):
        read(path)


def test_bytes_are_text_and_values_that_are_no_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "clicks.parquet"
    parquet.write_table(pyarrow.table({"session": [b"s", b"s"], "time": [TIME, TIME + 1], "item": [b"a", b"b"]}), path)
    assert sessions(read(path)) == [["a", "b"]]
    parquet.write_table(pyarrow.table({"session": [1.0, float("nan")], "time": [TIME, TIME], "item": [1, 2]}), path)
    with pytest.raises(EventFileError, match=r"line 2: the value of 'session' is empty"):
        read(path)
    parquet.write_table(pyarrow.table({"session": [1], "time": [TIME], "item": [True]}), path)
    with pytest.raises(EventFileError, match="the column 'item' has true and false"):
        read(path)
