"""Tests what is said about a log that was read: bad lines, names, ties in time, repeated events, and forms of ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.event_files.logs import TIME, clicks, read, sessions, written
from wane.models.event_files.event_log import read_log
from wane.models.event_files.faults import EventFileError
from wane.models.event_files.format import EventFormat


def test_bad_lines_are_left_out_by_an_option_and_counted_by_reason(tmp_path: Path) -> None:
    path = written(
        tmp_path / "clicks.csv",
        "session,time,item",
        f"a,{TIME},x",
        f",{TIME},x",
        "a,soon,x",
        f"a,{TIME + 1},y",
        f",{TIME},x",
        "a",
        f"a,{TIME + 2},",
        "a,later,z",
        f"a,{TIME + 2},z",
    )
    with pytest.raises(EventFileError) as caught:
        read(path)
    reasons = (
        "lines 3 and 6: the value of 'session' is empty; "
        "lines 4 and 9: the time 'soon' is neither a number nor ISO 8601, such as 2026-01-31 12:00:00; "
        "line 7: 1 columns, but the header has 3; line 8: the value of 'item' is empty"
    )
    assert str(caught.value) == f"{path}, {reasons} (6 of 10 lines are wrong)"
    log = read(path, on_bad_line="skip")
    assert sessions(log) == [["x", "y", "z"]]
    assert log.names == ["x", "y", "z"]
    assert log.notes == (
        "read 3 events of 1 session from 10 lines; the times are read as seconds since 1970, by their size",
        f"clicks.csv: left out 6 of 10 lines: {reasons}",
    )


def test_a_file_of_bad_lines_only_is_refused_even_if_they_are_skipped(tmp_path: Path) -> None:
    path = written(tmp_path / "clicks.csv", "session,time,item", f",{TIME},x")
    with pytest.raises(EventFileError, match=r"left out 1 of 2 lines: line 2: .*: the file has no events"):
        read(path, on_bad_line="skip")


def test_bad_names_are_refused_left_out_or_stripped(tmp_path: Path) -> None:
    path = clicks(tmp_path / "clicks.csv", "a", " a", '"two\nlines"', "<eos>", "b ", "b")
    with pytest.raises(EventFileError) as caught:
        read(path)
    assert (
        ", lines 3, 4 and 7: the event name ' a' has a line break, or blanks around it (data.on_bad_name = 'strip'); "
        "line 6: <eos> is reserved by the vocabulary and cannot name an event (4 of 8 lines are wrong)"
    ) in str(caught.value)
    skipped = read(path, on_bad_name="skip")
    assert sessions(skipped) == [["a"], ["b"]]
    assert "clicks.csv: left out 4 events for their names: lines 3, 4 and 7: the event name" in skipped.notes[1]
    stripped = read(path, on_bad_name="strip", on_bad_line="skip")
    assert sessions(stripped) == [["a", "a", "two lines"], ["b", "b"]]
    assert stripped.notes[-1] == "3 names read without the blanks around them or their line breaks"


def test_a_bad_name_leaves_out_an_event_and_not_its_session(tmp_path: Path) -> None:
    path = written(tmp_path / "sessions.jsonl", '["a", " ", "b\\n", "<unk>", "c"]')
    assert sessions(read(path, on_bad_name="skip")) == [["a", "c"]]
    with pytest.raises(EventFileError, match="line 1: not a list of event names: a name is empty"):
        read(path, on_bad_name="strip")


DAYS = ["session,day,elapsed,item", *(f"s{at // 4},2016-05-0{at // 4 + 1},{(37 * at) % 10},x{at}" for at in range(8))]
COLUMNS = {"time": "day"}


def test_ties_in_time_are_counted_and_keep_the_order_of_the_file(tmp_path: Path) -> None:
    log = read(written(tmp_path / "views.csv", *DAYS), columns=COLUMNS)
    assert sessions(log) == [["x0", "x1", "x2", "x3"], ["x4", "x5", "x6", "x7"]]
    assert log.notes[1] == (
        "6 of 6 neighbouring events of a session have the same time: they keep the order of the file "
        "(data.columns.order names a column that orders them)"
    )


def test_a_second_column_orders_events_of_the_same_time(tmp_path: Path) -> None:
    path = written(tmp_path / "views.csv", *DAYS)
    log = read(path, columns=COLUMNS | {"order": "elapsed"})
    assert sessions(log) == [["x0", "x3", "x2", "x1"], ["x6", "x5", "x4", "x7"]]
    assert len(log.notes) == 1
    path.write_text(path.read_text() + "s2,2016-05-01,first,x\n")
    with pytest.raises(EventFileError, match=r"line 10: the value of 'elapsed', 'first', is not a number"):
        read(path, columns=COLUMNS | {"order": "elapsed"})


def test_repeated_events_are_counted_and_dropped_by_an_option(tmp_path: Path) -> None:
    rows = [("a", 0, "x"), ("a", 0, "y"), ("a", 0, "x"), ("a", 1, "x"), ("b", 1, "x"), ("a", 0, "x"), ("b", 1, "x")]
    path = written(tmp_path / "clicks.csv", "session,time,item", *(f"{s},{TIME + t},{item}" for s, t, item in rows))
    kept = read(path)
    assert sessions(kept) == [["x", "y", "x", "x", "x"], ["x", "x"]]
    assert kept.notes[1:] == (
        "3 events repeat another of the same session, time and item "
        "(data.duplicates = 'drop' leaves out all but the first)",
        "4 of 5 neighbouring events of a session have the same time: they keep the order of the file "
        "(data.columns.order names a column that orders them)",
    )
    dropped = read(path, duplicates="drop")
    assert sessions(dropped) == [["x", "y", "x"], ["x"]]
    assert dropped.notes[1] == "3 events repeat another of the same session, time and item, and are left out"
    assert dropped.notes[2].startswith("1 of 2 neighbouring events of a session have the same time")


def test_repeated_events_of_another_order_are_kept(tmp_path: Path) -> None:
    rows = [f"a,{TIME},{order},x" for order in (1, 2, 2)]
    path = written(tmp_path / "clicks.csv", "session,time,order,item", *rows)
    log = read(path, columns={"order": "order"}, duplicates="drop")
    assert sessions(log) == [["x", "x"]]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1097", "1097.0", True),
        ("1097", "01097", True),
        ("1097", "+1097", True),
        ("-7", "-07.", True),
        ("Blue", "blue", True),
        ("red  shoe", "red shoe", True),
        ("é", "e\u0301", True),
        ("1097", "1097.5", False),
        ("1097", "10970", False),
        ("-7", "7", False),
        ("0", "-0.0", True),
        ("a0", "a00", False),
    ],
)
def test_ids_that_differ_in_form_only_are_noted_with_counts(tmp_path: Path, one: str, other: str, same: bool) -> None:
    path = clicks(tmp_path / "clicks.csv", one, "other", other, one)
    notes = read(path).notes[1:]
    if same:
        assert notes == (
            f"2 items differ from another one in form only, such as {one!r} (2 events) and {other!r} (1 event): "
            "they are read as different items",
        )
    else:
        assert notes == ()
    swapped = written(tmp_path / "s.csv", "session,time,item", f"{one},{TIME},a", f"{other},{TIME},b", f"c,{TIME},c")
    noted = [note for note in read(swapped).notes if note.startswith("2 sessions differ from another one in form only")]
    assert len(noted) == same


@pytest.mark.parametrize("name", ["NaN", "nan", "NULL", "<NA>"])
def test_ids_that_may_stand_for_an_absent_value_are_noted(tmp_path: Path, name: str) -> None:
    told = "may stand for an absent value: read as a name like any other"
    path = clicks(tmp_path / "clicks.csv", name, "nano", name)
    assert read(path).notes[1:] == (f"{name!r} (2 events) among the items {told}",)
    rows = [f"{name},{TIME},a", f"nano,{TIME},b"]
    assert read(written(tmp_path / "s.csv", "session,time,item", *rows)).notes[1:] == (
        f"{name!r} (1 event) among the sessions {told}",
    )


def test_files_of_several_kinds_of_tables_are_one_log(tmp_path: Path) -> None:
    one = written(tmp_path / "a.csv", "session,time,item", f"a,{TIME},x")
    two = written(tmp_path / "b.tsv", "item\ttime\tsession", f"y\t{TIME + 1}\ta")
    log = read_log([one, two], EventFormat())
    assert sessions(log) == [["x", "y"]]
    assert log.notes[0].startswith("read 2 events of 1 session from 4 lines of 2 files")
