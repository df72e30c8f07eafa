"""Trains on bad files of events: each fault is named by its line, and what is good is read whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.training.test_layouts import put
from wane.models.event_files.event_log import read_log
from wane.models.event_files.format import EventFormat
from wane.training.config import DataConfig
from wane.training.data import Corpus, load_corpus
from wane.training.errors import DataError

START = 1_396_860_669
HEADER = "session\titem\ttime"


def row(session: object, item: object, time: object) -> str:
    return f"{session}\t{item}\t{time}"


def good(count: int = 30) -> list[str]:
    return [row(at // 3, f"item {at % 5}", f"{START + at}.25") for at in range(count)]


def load(path: Path, **keys: object) -> Corpus:
    given = {"kind": "events", "path": path, "valid_share": 0.2, "test_share": 0.2}
    return load_corpus(DataConfig.model_validate(given | keys))


def events(corpus: Corpus) -> Counter[str]:
    eos = corpus.vocabulary.eos_id
    return Counter(corpus.vocabulary.token(token) for part in corpus.streams.values() for token in part[part != eos])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"3;a;{START}", "line 5: 1 columns, but the header has 3"),
        (f"3,a,{START}", "line 5: 1 columns, but the header has 3"),
        (row("3", "a", START) + "\tmore", "line 5: 4 columns, but the header has 3"),
        ("3\ta", "line 5: 2 columns, but the header has 3"),
        (row("3", "a", "NaN"), "line 5: .*'NaN'"),
        (row("3", "a", "yesterday"), "line 5: .*'yesterday'"),
        (row("3", "a", "inf"), "line 5: .*'inf'"),
        (row("", "a", START), "line 5: the value of 'session' is empty"),
        (row("3", "", START), "line 5: the value of 'item' is empty"),
        (row("3", "<unk>", START), "line 5: <unk> is reserved"),
        (row("3", " a", START), "line 5: the event name ' a' has a line break, or blanks around it"),
    ],
)
def test_a_bad_line_is_named_and_can_be_left_out(tmp_path: Path, line: str, told: str) -> None:
    lines = good()
    path = put(tmp_path / "clicks.tsv", [HEADER, *lines[:3], line, *lines[3:]])
    with pytest.raises(DataError, match=told) as caught:
        load(path)
    assert "1 of 32 lines is wrong" in str(caught.value)
    whole = load(put(tmp_path / "good.tsv", [HEADER, *lines]))
    assert events(load(path, on_bad_line="skip")) == events(whole)


def test_the_last_line_of_a_million_is_named(tmp_path: Path) -> None:
    count = 1_000_000
    body = "\n".join([HEADER, *(f"{at >> 3}\t{at & 63}\t{START + at}" for at in range(count - 2))])
    path = tmp_path / "million.tsv"
    path.write_text(f"{body}\n9\tno time\n")
    with pytest.raises(DataError, match=r"line 1000000: 2 columns, but the header has 3 \(1 of 1,000,000 lines"):
        load(path)


def test_a_byte_order_mark_time_zones_and_any_order_are_read(tmp_path: Path) -> None:
    lines = good()
    zones = [
        line.rsplit("\t", 1)[0] + f"\t2014-04-07T1{at // 20}:{at % 20:02}:00+02:00" for at, line in enumerate(lines)
    ]
    same = [
        line.rsplit("\t", 1)[0] + f"\t2014-04-07T{at // 20 + 8:02}:{at % 20:02}:00Z" for at, line in enumerate(lines)
    ]
    shuffled = np.random.default_rng(1).permutation(np.array(zones)).tolist()
    path = put(tmp_path / "zones.tsv", [HEADER, *shuffled])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    other = put(tmp_path / "same.tsv", [HEADER, *same])
    one, two = (read_log([given], EventFormat()) for given in (path, other))
    names = [[log.names[event] for event in log.events] for log in (one, two)]
    assert names[0] == names[1]
    assert one.ends is not None and two.ends is not None and one.ends.tolist() == two.ends.tolist()


def test_unicode_quoted_names_duplicates_and_sessions_of_one_event_are_kept(tmp_path: Path) -> None:
    names = ["caffè ☕", 'a ""b"", c', "日本", "e\u0301", "é"]
    lines = [f'{at // 4 if at < 28 else at},"{names[at % 5]}",{START + at}' for at in range(40)]
    path = put(tmp_path / "names.csv", ["session,item,time", *lines, lines[-1]])
    corpus = load(path)
    assert sum(events(corpus).values()) == 41
    assert set(events(corpus)) == {name.replace('""', '"') for name in names}
    assert "1 event repeats another of the same session, time and item" in " ".join(corpus.notes)
    assert sum(events(load(path, duplicates="drop")).values()) == 40


def test_numbers_and_text_name_different_items_and_are_noted(tmp_path: Path) -> None:
    lines = [row(at // 3, ("7", "7.0", "x")[at % 3], START + at) for at in range(30)]
    corpus = load(put(tmp_path / "mixed.tsv", [HEADER, *lines]))
    assert events(corpus) == Counter({"7": 10, "7.0": 10, "x": 10})
    assert "2 items differ from another one in form only" in " ".join(corpus.notes)
