"""Tests the strict reading of tables: numbers of cells, quotation marks, headers and separators."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path

import pytest

from tests.models.event_files.logs import TIME, clicks, read, sessions, written
from wane.models.event_files import lines
from wane.models.event_files.faults import EventFileError
from wane.models.event_files.tables import split_row


def refused(path: Path, **keys: object) -> str:
    """Returns the message with which a file is refused, without the file's path."""
    with pytest.raises(EventFileError) as caught:
        read(path, **keys)
    message = str(caught.value)
    assert message.startswith(str(path))
    message.encode()  # can be printed
    return message.removeprefix(str(path))


def test_a_row_with_more_or_fewer_cells_than_the_header_is_refused(tmp_path: Path) -> None:
    path = clicks(tmp_path / "clicks.csv", "shirt", "shirt, blue", "shirt, red", "shirt,", "shirt, ", "cap")
    assert refused(path) == (
        ", lines 3 and 4: 4 columns, but the header has 3 "
        "(2 of 7 lines are wrong; data.on_bad_line = 'skip' leaves them out)"
    )
    written(path, "session,time,item,price", f"a,{TIME},shirt")
    assert refused(path) == ", line 2: 3 columns, but the header has 4 (1 of 2 lines is wrong)"


def test_an_empty_last_cell_is_allowed_with_and_without_its_name_in_the_header(tmp_path: Path) -> None:
    for header, end in (("session,time,item", ","), ("session,time,item,", ","), ("session,time,item,", "")):
        path = written(tmp_path / "clicks.csv", header, f"a,{TIME},x{end}", "", f"a,{TIME + 1},y")
        assert sessions(read(path)) == [["x", "y"]]


@pytest.mark.parametrize(
    "title",
    [
        '"Quiet room',  # never closed
        '"Quiet "room"',
        r'"a \"b\" c"',
        r'"5\" disk"',
    ],
)
def test_a_quoted_cell_that_does_not_end_as_it_should_is_named_by_the_line_where_it_begins(
    tmp_path: Path, title: str
) -> None:
    path = clicks(tmp_path / "clicks.csv", "a,x", "b,y", f"c,{title}", *["d,z"] * 6, header="session,time,item,title")
    assert ", line 4: a quoted cell begins here and does not end as it should" in refused(path)
    skipped = read(path, on_bad_line="skip")
    assert sessions(skipped) == [["a", "b"], ["d"] * 3, ["d"] * 3]
    assert "clicks.csv: left out 1 of 10 lines: line 4: a quoted cell" in skipped.notes[1]


@pytest.mark.parametrize("closing", ['Loud"', '"Loud"', 'Loud"er'])
@pytest.mark.parametrize("place", ["last", "middle"])
def test_a_cell_that_another_line_closes_is_named_by_the_line_where_it_begins(
    tmp_path: Path, closing: str, place: str
) -> None:
    def row(item: str, title: str) -> str:
        return f"{item},{title}" if place == "last" else f"{item},{title},0"

    header = "session,time,item,title" if place == "last" else "session,time,item,title,price"
    rows = [row("a", "x"), row("b", '"Quiet'), row("c", "y"), row("d", closing), row("e", "z"), row("f", "z")]
    path = clicks(tmp_path / "clicks.csv", *rows, header=header)
    assert ", line 3: a quoted cell begins here" in refused(path)
    assert "line 4" not in refused(path)


def test_a_quoted_cell_may_have_separators_marks_and_line_breaks(tmp_path: Path) -> None:
    header = "title,session,time,item"
    path = written(
        tmp_path / "clicks.csv",
        header,
        '"two',
        f'lines, and a ""mark""",a,{TIME},"x, ""y"""',
        f'plain,a,{TIME + 1},5" disk',
        f'"","a","{TIME + 2}","z"',
    )
    assert sessions(read(path)) == [['x, "y"', '5" disk', "z"]]
    path.write_text(path.read_text() + "c,a\n")
    assert ", line 6: 2 columns, but the header has 4" in refused(path)


def test_a_quotation_mark_after_blanks_is_refused(tmp_path: Path) -> None:
    path = clicks(tmp_path / "clicks.csv", "a", ' "b"')
    assert ", line 3: a quotation mark follows blanks" in refused(path)


def test_a_tab_separated_file_has_no_quoting_unless_an_option_turns_it_on(tmp_path: Path) -> None:
    rows = ['"Heroes"', "Low", '"unclosed']
    path = written(
        tmp_path / "songs.tsv", "session\ttime\titem", *(f"a\t{TIME + at}\t{row}" for at, row in enumerate(rows))
    )
    assert sessions(read(path)) == [rows]
    assert ", line 4: a quoted cell begins here" in refused(path, quoting=True)
    written(path, "session\ttime\titem", *(f"a\t{TIME + at}\t{row}" for at, row in enumerate(rows[:2])))
    assert sessions(read(path, quoting=True)) == [["Heroes", "Low"]]
    comma = clicks(tmp_path / "songs.csv", *rows)
    assert sessions(read(comma, quoting=False)) == [rows]


@pytest.mark.parametrize("separator", [",", ";", "|", "\t", "::"])
def test_rows_are_split_as_a_csv_writer_joined_them(separator: str) -> None:
    source = random.Random(separator)
    for _ in range(300):
        cells = ["".join(source.choices('ab"\n,;|\t ', k=source.randrange(6))) for _ in range(source.randrange(2, 5))]
        if len(separator) == 1:
            written = io.StringIO()
            csv.writer(written, delimiter=separator, lineterminator="", quoting=csv.QUOTE_ALL).writerow(cells)
            text = written.getvalue()
        else:
            text = separator.join('"' + cell.replace('"', '""') + '"' for cell in cells)
        assert split_row(text, separator) == cells
        assert split_row(text[:-1], separator) != cells


def test_large_files_are_read_as_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(5)
    items = [source.choice(["plain", 'quoted ""mark""', "with, comma", "x" * 300, "größe"]) for _ in range(900)]
    path = clicks(tmp_path / "clicks.csv", *(f'"{item}"' for item in items))
    bad = written(tmp_path / "bad.csv", path.read_text().rstrip("\n"), "no time")
    expected = [item.replace('""', '"') for item in items]
    for block in (7, 100, 1 << 13, 1 << 20):
        monkeypatch.setattr(lines, "BLOCK", block)
        log = read(path)
        assert [log.names[event] for event in log.events] == expected
        assert (
            log.notes[0]
            == "read 900 events of 300 sessions from 901 lines; the times are read as seconds since 1970, by their size"
        )
        assert refused(bad).startswith(", line 902: 1 columns, but the header has 3 (1 of 902 lines is wrong")


def test_a_column_name_that_stands_twice_in_the_header_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "clicks.csv", "session,time,item,item", f"a,{TIME},x,y")
    assert refused(path) == ": columns 3 and 4 have the name 'item': name one by its number"
    assert sessions(read(path, columns={"item": 4})) == [["y"]]
    written(path, "session,time,item,price,price", f"a,{TIME},x,1,2")
    assert sessions(read(path)) == [["x"]]


@pytest.mark.parametrize(
    ("name", "separator"),
    [
        ("a.csv", ";"),
        ("a.csv", "\t"),
        ("a.csv", "|"),
        ("a.txt", "\t"),
        ("a.txt", ","),
        ("a.dat", "::"),
        ("u.data", "\t"),
        ("a.tsv", ","),
    ],
)
def test_the_usual_separators_are_found_in_the_header(tmp_path: Path, name: str, separator: str) -> None:
    rows = [["kind", "session", "time", "item"], ["view", "a", f"{TIME}", "x"], ["view", "a", f"{TIME + 1}", "y"]]
    path = written(tmp_path / name, *(separator.join(row) for row in rows))
    assert sessions(read(path)) == sessions(read(path, separator=separator)) == [["x", "y"]]
    numbers = {"session": 2, "time": 3, "item": 4}
    assert sessions(read(path, header=True, columns=numbers)) == [["x", "y"]]
    written(path, *(separator.join(row) for row in rows[1:]))
    assert sessions(read(path, columns=numbers)) == [["x", "y"]]
    assert sessions(read(path, fields=["kind", "session", "time", "item"])) == [["x", "y"]]


def test_another_separator_is_an_option(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "session<>time<>item", f"a<>{TIME}<>x")
    assert "data.columns.session, data.columns.time and data.columns.item, or data.separator" in refused(path)
    assert sessions(read(path, separator="<>")) == [["x"]]


def test_numbers_in_text_name_columns_if_the_first_line_has_no_such_names(tmp_path: Path) -> None:
    columns = {"session": "1", "time": "2", "item": "3"}
    path = written(tmp_path / "a.csv", f"1,{TIME},3", f"1,{TIME + 1},4")
    assert sessions(read(path, columns=columns)) == [["3", "4"]]
    written(path, "3,2,1", f"x,{TIME},a", f"y,{TIME + 1},a")
    assert sessions(read(path, columns=columns)) == [["x", "y"]]


def test_the_error_says_what_to_set_for_a_column_that_is_not_found(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", f"a,{TIME},x", f"a,{TIME},y")
    assert refused(path) == (
        f": no columns 'session', 'time' and 'item' in the header (a, {TIME}, x): set data.columns.session, "
        "data.columns.time and data.columns.item, to a number if the file has no header"
    )
    numbers = {"session": 1, "time": 2, "item": 5}
    assert refused(path, columns=numbers) == (
        f": no column 5: the first line has 3 columns (a, {TIME}, x): set data.columns.item or data.separator"
    )
    written(path, "visitor,at,name", f"a,{TIME},x")
    numbers["item"] = 3
    assert refused(path, columns=numbers) == (
        ": the first line has no time, but 'at': if it is a header, set data.header = true"
    )
    assert sessions(read(path, columns=numbers, header=True)) == [["x"]]
    assert refused(path, fields=["a", "b"]) == ": the first line has 3 columns, but data.fields has 2"


def test_compressed_files_and_upper_case_suffixes_are_read(tmp_path: Path) -> None:
    plain = clicks(tmp_path / "clicks.CSV", "a", "b", "c", "d")
    expected = [["a", "b", "c"], ["d"]]
    assert sessions(read(plain)) == expected
    (tmp_path / "marked.csv").write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert sessions(read(tmp_path / "marked.csv")) == expected
    for name in ("clicks.csv.gz", "clicks.CSV.GZ"):
        (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
        assert sessions(read(tmp_path / name)) == expected
    (tmp_path / "short.csv.gz").write_bytes(gzip.compress(plain.read_bytes() * 100)[:-30])
    assert ": damaged after line " in refused(tmp_path / "short.csv.gz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("session,time,größe\na,1,b\n".encode("latin-1"), ": the header is not UTF-8: convert the file"),
        ("session,time,item\n".encode("utf-16"), ": the file is UTF-16: convert it to UTF-8"),
        ("session,time,item\n".encode("utf-16-le"), ": the file has zero bytes: is it UTF-16"),
        (b"PK\x03\x04 and so on", ": the file is a ZIP archive or a spreadsheet"),
        (b"session,time,item\ra,1,b\ra,2,b\r", ": the lines end in carriage returns"),
        (b"", ": the file is empty"),
        (b"\n \n", ": the file is empty"),
        (b"session,time,item\n", ": the file has no events"),
        (b'session,"time,item\n', ": the first line: a quoted cell begins here"),
    ],
    ids=["Latin-1", "UTF-16", "UTF-16 without a mark", "ZIP", "CR", "empty", "blank", "header only", "open header"],
)
def test_a_file_that_is_no_table_of_utf_8_is_refused_with_the_reason(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "clicks.csv"
    path.write_bytes(content)
    assert refused(path).startswith(message)


def test_a_column_that_is_not_used_may_be_of_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_bytes(f"größe,session,time,item\nblöd,a,{TIME},x\r\n".encode("latin-1"))
    assert sessions(read(path)) == [["x"]]
    path.write_bytes(f"session,time,item\na,{TIME},blöd\n".encode("latin-1"))
    assert ", line 2: the event name 'bl\\udcf6d' is not Unicode text" in refused(path)


def test_cells_of_a_mebibyte_are_read_and_longer_names_are_refused(tmp_path: Path) -> None:
    largest = "x" * (1 << 20)
    for suffix, row in (("csv", '"{}"'), ("csv", "{}"), ("tsv", "{}")):
        separator = "," if suffix == "csv" else "\t"
        path = written(
            tmp_path / f"clicks.{suffix}",
            separator.join(("title", "session", "time", "item")),
            separator.join((row.format(largest[:-9]), "a", f"{TIME}", "x")),
            separator.join(("", "a", f"{TIME + 1}", row.format(largest))),
        )
        assert sessions(read(path)) == [["x", largest]]
        written(path, separator.join(("session", "time", "item")), separator.join(("a", f"{TIME}", largest + "x")))
        message = refused(path)
        assert ", line 2: the event name 'xxx" in message and "longer than 1 MiB" in message
        assert len(message) < 300


def test_a_line_is_bounded(tmp_path: Path) -> None:
    path = clicks(tmp_path / "clicks.csv", "a", "x" * (2 << 20))
    said = ": line 3 is longer than 1,048,576 bytes, which is data.longest_line_bytes (lines end at line feeds)"
    assert refused(path, longest_line_bytes=1 << 20) == said


@pytest.mark.parametrize("name", ["a\0b", "a\x1b[2J", "\x7f", "a\x9bb"], ids=ascii)
def test_a_name_with_a_control_character_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(json.dumps(["a", name]))
    message = refused(path)
    assert "has a control character" in message and message.isprintable()
