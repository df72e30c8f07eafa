"""Tests JSON lines whose events are objects, or that have one event each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.models.event_files.logs import TIME, read, sessions, written
from wane.models.event_files.faults import EventFileError

COLUMNS = {"item": "aid", "time": "ts"}


def session(name: int, *events: tuple[object, object]) -> str:
    return json.dumps({"session": name, "events": [{"aid": aid, "ts": ts, "type": "clicks"} for aid, ts in events]})


def test_event_objects_have_an_item_and_a_time(tmp_path: Path) -> None:
    first, second = session(1, (5, TIME * 1000 + 9), (6, TIME * 1000)), session(2, ("b", TIME * 1000 - 5))
    path = written(tmp_path / "sessions.jsonl", first, "", second)
    log = read(path, columns=COLUMNS)
    assert sessions(log) == [["b"], ["6", "5"]]
    assert log.ends is not None and log.ends.tolist() == [TIME - 0.005, TIME + 0.009]
    (tmp_path / "sessions.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert sessions(read(tmp_path / "sessions.jsonl.gz", columns=COLUMNS)) == sessions(log)
    gaps = written(tmp_path / "gaps.jsonl", session(1, ("a", TIME), ("b", TIME + 5), ("c", TIME + 100)))
    assert sessions(read(gaps, columns=COLUMNS, session_gap_s=50)) == [["a", "b"], ["c"]]


def test_a_line_may_be_one_event_with_its_session(tmp_path: Path) -> None:
    rows = [{"user": "u", "item": "b", "time": TIME + 1, "price": 3}, {"user": 7, "item": 8, "time": TIME + 5}]
    rows.append({"user": "u", "item": "a", "time": "2023-11-14T22:13:20Z", "price": None})
    path = written(tmp_path / "events.ndjson", *map(json.dumps, rows))
    assert sessions(read(path, columns={"session": "user"})) == [["a", "b"], ["8"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"session": 2, "events": [{"id": 1, "ts": 1}]}',
            "an event has no 'aid' (data.columns.item): it has 'id, ts'",
        ),
        ('{"session": 2, "events": [{"aid": 1}]}', "the events have no 'ts' (data.columns.time): they have 'aid'"),
        ('{"session": 2, "events": [{"aid": 1, "ts": 1700000000}, {"aid": 1}]}', "an event has no 'ts', but others"),
        ('{"session": 2, "events": [{"aid": 1, "ts": 1700000000}, "a"]}', "not a list of event names"),
        ('["a"]', "the events of some lines have times, and those of others have none"),
        (session(2, (1, None)), "the time None is neither a number nor ISO 8601"),
        (session(2, (1, [3])), "the time [3] is neither a number nor ISO 8601"),
        (session(2, (1, True)), "the time True is neither a number nor ISO 8601"),
        (session(2, (1.5, TIME)), "not a list of event names (texts or integers)"),
        (session(1, (1, TIME)), "an earlier line has the same session 1"),
        ('{"session": 2, "aid": 1}', "the event has no 'ts' (data.columns.time)"),
        ('{"session": 2, "ts": 1700000000}', "and not an event with the key 'aid' (data.columns.item): it has"),
        ('{"session": [2], "aid": 1, "ts": 1700000000}', "the value of 'session' is neither text nor an integer"),
        ('{"session": "2", "aid": "", "ts": 1700000000}', "the value of 'aid' is empty"),
    ],
)
def test_the_error_names_a_line_that_is_not_as_the_others(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "sessions.jsonl", session(1, (5, TIME)), line, session(3, (6, TIME)))
    with pytest.raises(EventFileError) as caught:
        read(path, columns=COLUMNS)
    assert str(caught.value).startswith(f"{path}, line 2: ") and message in str(caught.value)
    assert sessions(read(path, columns=COLUMNS, on_bad_line="skip")) == [["5"], ["6"]]


def test_a_session_after_a_bad_line_of_the_same_session_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "sessions.jsonl", session(1, (5, "soon")), session(1, (6, TIME)))
    assert sessions(read(path, columns=COLUMNS, on_bad_line="skip")) == [["6"]]


def test_events_with_times_after_sessions_without_times_are_bad_lines(tmp_path: Path) -> None:
    event = json.dumps({"session": 1, "aid": 5, "ts": TIME})
    path = written(tmp_path / "sessions.jsonl", '["a", "b"]', event, event)
    with pytest.raises(EventFileError, match="lines 2 and 3: the events of some lines have times"):
        read(path, columns=COLUMNS)
    assert sessions(read(path, columns=COLUMNS, on_bad_line="skip")) == [["a", "b"]]


def test_numbers_of_columns_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "sessions.jsonl", '["a"]')
    with pytest.raises(EventFileError, match=r"data\.columns\.item is a number"):
        read(path, columns={"item": 3})


def test_true_is_not_the_item_1_nor_a_decimal_number_an_item(tmp_path: Path) -> None:
    path = written(tmp_path / "sessions.jsonl", '[1, "a"]', "[true]", "[1.0]", '["1"]')
    with pytest.raises(EventFileError, match=r"lines 2 and 3: not a list of event names \(texts or integers\)"):
        read(path)
    assert sessions(read(path, on_bad_line="skip")) == [["1", "a"], ["1"]]


@pytest.mark.parametrize("place", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"])
def test_a_line_ends_at_a_line_feed_only(tmp_path: Path, place: str) -> None:
    name = f"size{place}M"
    lines = [json.dumps([name, "b"])]
    if place >= " ":
        lines.append(json.dumps([name, "c"], ensure_ascii=False))
    log = read(written(tmp_path / "sessions.jsonl", *lines))
    assert sessions(log) == [[name, "b"], [name, "c"]][: len(lines)]
    if place >= " ":
        table = written(tmp_path / "clicks.csv", "session,time,item", f"a,{TIME},{name}", f"a,{TIME + 1},b")
        assert sessions(read(table)) == [[name, "b"]]


def test_names_and_lines_of_many_kibibytes_are_read(tmp_path: Path) -> None:
    name = "x" * (1 << 20)
    path = written(tmp_path / "sessions.jsonl", json.dumps([name, *map(str, range(200_000))]))
    (found,) = sessions(read(path))
    assert found[0] == name and len(found) == 200_001
