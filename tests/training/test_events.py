"""Tests the reading of event logs, their splits, and the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.training.corpora import write_events
from wane.models.event_files.event_log import EventLog
from wane.models.event_files.format import EventFormat
from wane.models.vocabulary import Vocabulary
from wane.training.config import DataConfig
from wane.training.data import Corpus, load_corpus, load_whole
from wane.training.errors import DataError
from wane.training.events import encode_log, event_tokenizer, read_log, split_log

SECONDS = EventFormat(time_unit="s")


def sessions(log: EventLog) -> list[list[str]]:
    """Returns the event names of each session of a log."""
    return [[log.names[event] for event in part] for part in np.split(log.events, log.begins[1:-1])]


def decoded(corpus: Corpus, split: str) -> list[list[str]]:
    """Returns the event names of each session of a corpus's split."""
    stream = corpus.streams[split]
    edges = np.flatnonzero(stream == corpus.vocabulary.eos_id)
    assert edges[0] == 0
    assert edges[-1] == len(stream) - 1
    return [[corpus.vocabulary.token(token) for token in part[1:]] for part in np.split(stream, edges[1:])[:-1]]


def csv_file(path: Path, *rows: str, header: str = "session,time,item") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_lines_are_lists_or_objects_and_integers_are_names(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text('\ufeff["a", 2]\n\n{"session": 7, "events": ["2", "b"]}\n[]\n{"events": [-1]}\n', encoding="utf-8")
    log = read_log([path])
    assert sessions(log) == [["a", "2"], ["2", "b"], ["-1"]]
    assert log.names == ["a", "2", "b", "-1"]


def test_a_pause_longer_than_the_gap_starts_a_new_session(tmp_path: Path) -> None:
    path = csv_file(tmp_path / "clicks.csv", "u,0,a", "u,100,b", "v,150,x", "u,201,c", "u,301,d")
    assert sessions(read_log([path], SECONDS.model_copy(update={"session_gap_s": 100}))) == [
        ["a", "b"],
        ["x"],
        ["c", "d"],
    ]
    assert sessions(read_log([path], SECONDS)) == [["x"], ["a", "b", "c", "d"]]


def test_each_reason_is_given_once_with_its_first_three_lines_and_the_number_of_all(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(['["a"]', "no", '["b"]', *["no"] * 4, "[1.5]", '"a"', '"b"']) + "\n")
    with pytest.raises(DataError) as caught:
        read_log([path])
    assert str(caught.value) == (
        f"{path}, lines 2, 4, 5 and 2 more: not JSON: Expecting value: line 1 column 1 (char 0); "
        "line 8: not a list of event names (texts or integers); lines 9 and 10: not a list of event names "
        "(8 of 10 lines are wrong)"
    )


def test_files_of_two_kinds_and_a_gap_without_times_are_refused(tmp_path: Path) -> None:
    lines, rows = write_events(tmp_path / "a.jsonl", [["a"]]), csv_file(tmp_path / "b.csv", "u,1,a")
    with pytest.raises(DataError, match=r"files of one kind: .* found \.csv, \.jsonl"):
        read_log([lines, rows])
    with pytest.raises(DataError, match=r"found \.xlsx"):
        read_log([tmp_path / "c.xlsx"])
    with pytest.raises(DataError, match="session_gap_s needs times"):
        read_log([lines], EventFormat(session_gap_s=10))


def test_a_split_by_time_gives_the_test_the_sessions_that_end_last(tmp_path: Path) -> None:
    rows = [f"s{(7 * index) % 40},{1_700_000_000 + (7 * index) % 40},e{(7 * index) % 40}" for index in range(40)]
    path = csv_file(tmp_path / "clicks.csv", *rows)
    config = DataConfig(kind="events", path=path, valid_share=0.1, test_share=0.2)
    parts = {name: sessions(log) for name, log in split_log(read_log([path]), config, path).items()}
    assert parts["train"] == [[f"e{index}"] for index in range(28)]
    assert parts["valid"] == [[f"e{index}"] for index in range(28, 32)]
    assert parts["test"] == [[f"e{index}"] for index in range(32, 40)]


def test_a_split_by_session_draws_every_session_once_and_always_the_same_ones(tmp_path: Path) -> None:
    path = write_events(tmp_path / "sessions.jsonl", [[str(index)] for index in range(200)])
    config = DataConfig(kind="events", path=path, split="session", valid_share=0.1, test_share=0.1)
    log = read_log([path])
    parts = [sessions(part) for part in split_log(log, config, path).values()]
    assert [len(part) for part in parts] == [160, 20, 20]
    assert sorted(int(name) for part in parts for (name,) in part) == list(range(200))
    assert parts[2] != [[str(index)] for index in range(180, 200)]
    assert parts == [sessions(part) for part in split_log(log, config, path).values()]


def test_a_folder_may_hold_the_splits(tmp_path: Path) -> None:
    for split, name in (("train", "a"), ("valid", "b"), ("test", "a")):
        write_events(tmp_path / f"{split}.jsonl", [["a", "a", name]] * 3)
    corpus = load_corpus(DataConfig(kind="events", path=tmp_path))
    assert decoded(corpus, "train") == [["a", "a", "a"]] * 3
    assert decoded(corpus, "valid") == [["a", "a"]] * 3
    assert corpus.missed == {"train": 0, "valid": 3, "test": 0}
    assert sorted(corpus.hashes) == ["test.jsonl", "train.jsonl", "valid.jsonl"]
    assert corpus.notes[0] == "train: read 9 events of 3 sessions from 3 lines"
    assert corpus.notes[3].startswith("split by the files of the folder; train: 9 events")


def test_the_vocabulary_has_every_event_that_occurs_often_enough_in_training(tmp_path: Path) -> None:
    names = [f"item-{index}" for index in range(3000)]
    lines = [*([name] for name in names), *([name] for name in names[:2500]), ["never trained on"], ["item-0"]]
    path = write_events(tmp_path / "sessions.jsonl", lines)
    shares = {"valid_share": 1e-4, "test_share": 1e-4}

    def load(**keys: object) -> Corpus:
        return load_corpus(DataConfig.model_validate({"kind": "events", "path": path, **shares, **keys}))

    with pytest.raises(
        DataError, match=r"the valid split has 0 known event\(s\).* lacks the others of its 1 events in 1 sessions"
    ):
        load()
    lines[-2] = ["item-1", "item-2"]
    write_events(path, [*lines[:-1], ["item-3", "item-4"]])
    assert load().vocabulary.size == 3001
    assert "vocabulary: 3,000 events; it has every event of the training split" in load().notes[-1]
    assert load(min_count=2).vocabulary.size == 2501
    assert load(min_count=2).notes[-1] == (
        "vocabulary: 2,500 events; it lacks 500 events, whose occurrences are 9.09% of the training split"
    )
    assert load(vocabulary_size=11, unknown="token").vocabulary.size == 11
    with pytest.raises(DataError, match="no event occurs 3 times in the training split"):
        load(min_count=3)


def test_unknown_events_are_left_out_or_become_unk(tmp_path: Path) -> None:
    path = write_events(tmp_path / "a.jsonl", [["b", "a", "a"], ["new", "a", "new", "new", "b"], ["new"], ["c", "new"]])
    log = read_log([path])
    train = log.sessions(np.array([0]))
    skipping = Vocabulary("events", event_tokenizer(train, DataConfig(kind="events")))
    assert skipping.texts == ("<eos>", "a", "b")
    skipped = encode_log(log, skipping, "skip")
    assert skipped.stream.tolist() == [0, 2, 1, 1, 0, 1, 2, 0]
    assert skipped.missed == 2
    last = encode_log(log, skipping, "skip", last_only=True)
    assert last.stream.tolist() == [0, 2, 1, 1, 0, 1, 2, 0]
    assert last.missed == 0  # no known event comes before the last one of ["new"] and of ["c", "new"]
    early = log.first_events(np.array([0, 1, 2, 3]), np.array([3, 4, 1, 2]))  # the second one ends with "new"
    assert encode_log(early, skipping, "skip", last_only=True).missed == 1
    reading = Vocabulary("events", event_tokenizer(train, DataConfig(kind="events", unknown="token")))
    assert reading.texts == ("<eos>", "<unk>", "a", "b")
    read = encode_log(log, reading, "token")
    assert read.stream.tolist() == [0, 3, 2, 2, 0, 1, 2, 1, 1, 3, 0, 1, 0, 1, 1, 0]
    assert read.missed == 0


def test_load_whole_reads_whole_sessions_up_to_a_number_of_tokens(tmp_path: Path) -> None:
    path = write_events(tmp_path / "a.jsonl", [["a", "b"]] * 30)
    corpus = load_corpus(DataConfig(kind="events", path=path))
    whole = load_whole(path, corpus.vocabulary, corpus.tokenizer_json, 10**6).streams["audit"]
    assert whole.tolist() == [0, 1, 2] * 30 + [0]
    part = load_whole(path, corpus.vocabulary, corpus.tokenizer_json, 8).streams["audit"]
    assert part.tolist() == [0, 1, 2, 0, 1, 2, 0]
    first = load_whole(path, corpus.vocabulary, corpus.tokenizer_json, 1).streams["audit"]
    assert first.tolist() == [0, 1, 2, 0]


def test_csv_and_json_lines_of_the_same_sessions_are_the_same_corpus(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    lists = [[f"e{event}" for event in random.integers(9, size=random.integers(1, 6))] for _ in range(60)]
    lines = write_events(tmp_path / "a.jsonl", lists)
    rows = [
        f"s{index},{1_700_000_000 + index * 100 + at},{name}"
        for index, names in enumerate(lists)
        for at, name in enumerate(names)
    ]
    random.shuffle(rows)
    table = csv_file(tmp_path / "a.csv", *rows)
    one, other = (load_corpus(DataConfig(kind="events", path=path)) for path in (lines, table))
    assert json.loads(one.tokenizer_json) == json.loads(other.tokenizer_json)
    for split, stream in one.streams.items():
        assert np.array_equal(stream, other.streams[split])
