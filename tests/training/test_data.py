from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.training.corpora import text_corpus, write_events
from wane.models.vocabulary import Vocabulary
from wane.training.config import DataConfig
from wane.training.data import load_corpus
from wane.training.errors import DataError
from wane.training.lanes import batches


def load_text(path: Path, **keys: object) -> None:
    load_corpus(DataConfig.model_validate({"kind": "text", "path": path, **keys}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"the file is empty"),
        (b" \n\n ", r"the file is empty"),
        (b"fine\nnot \xff fine\n", r"not UTF-8 at byte 9 \(line 2\)"),
        (b"word", r"too short to split into train, valid and test"),
        (b"x y z", r"the train split has 1 token\(s\) besides <eos>; at least 2 are needed"),
    ],
    ids=["empty", "blank", "not UTF-8", "one token", "one token per split"],
)
def test_an_unusable_text_is_named_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"text\.txt: {message}"):
        load_text(path)


def test_the_error_names_missing_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.txt: No such file"):
        load_text(tmp_path / "missing.txt")
    with pytest.raises(DataError, match=r"the folder holds no files, or only empty or hidden ones"):
        load_text(tmp_path)
    with pytest.raises(DataError, match=r"no data: name a file or folder with --data"):
        load_corpus(DataConfig(kind="text"))


def test_the_files_of_a_folder_are_read_in_the_order_of_their_names_and_hashed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, lines in (("b.txt", range(40, 80)), ("a.txt", range(40)), ("sub/c.py", range(80, 100))):
        (tmp_path / name).write_text("".join(f"line number {number}\n" for number in lines))
    corpus = load_corpus(DataConfig(kind="text", path=tmp_path, vocabulary_size=300))
    assert list(corpus.hashes) == ["a.txt", "b.txt", "sub/c.py"]
    decoded = corpus.vocabulary.decode(corpus.streams["train"].tolist())
    assert decoded.startswith("\nline number 0\nline number 1\n")
    assert corpus.vocabulary.decode(corpus.streams["test"].tolist()).endswith("line number 99\n")


def test_the_splits_contain_every_line_once_in_order() -> None:
    corpus = text_corpus()
    text = "".join(corpus.vocabulary.decode(corpus.streams[split].tolist()[1:]) for split in ("train", "valid", "test"))
    source = (Path(__file__).parents[2] / "LICENSE").read_text()
    assert text == source
    assert sum(corpus.words.values()) == sum(len(line.split()) + 1 for line in source.splitlines())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2.5]", "not a list of event names"),
        ("[true]", "not a list of event names"),
        ('"a"', "not a list of event names"),
        ('{"a": 1}', "not a list of event names"),
        ('["a", ""]', "not a list of event names"),
        ('["a\\nb"]', "line break, or blanks around"),
        ("[", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5000, "not JSON"),
        ('["a", "<eos>"]', "<eos> is reserved"),
        ('["<unk>"]', "<unk> is reserved"),
        ('["\\ud800"]', "not Unicode text"),
    ],
)
def test_the_error_names_an_invalid_event_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f'["a", "b"]\n\n{line}\n')
    with pytest.raises(DataError, match=rf"events\.jsonl, line 3: .*{message}"):
        load_corpus(DataConfig(kind="events", path=path))


def test_byte_order_mark_and_carriage_returns_are_stripped(tmp_path: Path) -> None:
    lines = [f"line {number}\u2028 and on" for number in range(40)]
    plain, windows = tmp_path / "plain.txt", tmp_path / "windows.txt"
    plain.write_bytes("\n".join(lines).encode())
    windows.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    one, other = (
        load_corpus(DataConfig(kind="text", path=path, vocabulary_size=300)).streams for path in (plain, windows)
    )
    assert all(np.array_equal(one[split], other[split]) for split in one)
    assert np.count_nonzero(one["train"] == 0) == 37


def test_a_text_of_one_line_is_split_between_words(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    text = " ".join(f"word{number}" for number in range(200))
    path.write_text(text)
    corpus = load_corpus(DataConfig(kind="text", path=path, vocabulary_size=300))
    parts = [corpus.vocabulary.decode(corpus.streams[split].tolist()).strip() for split in ("train", "valid", "test")]
    assert " ".join(parts) == text
    assert len(parts[1].split()) == 10


def test_hidden_and_empty_files_are_skipped(tmp_path: Path) -> None:
    for name, content in ((".git/index", b"\xff\xfe"), ("__init__.py", b""), ("a.py", b"x = 1\n" * 40)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert list(load_corpus(DataConfig(kind="text", path=tmp_path, vocabulary_size=300)).hashes) == ["a.py"]


def test_the_vocabulary_is_trained_on_the_training_split_alone(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("alpha beta gamma\n" * 90 + "zzzzzz qqqqqq\n" * 10)
    corpus = load_corpus(DataConfig(kind="text", path=path, vocabulary_size=400))
    assert len(corpus.vocabulary.encode("alpha")) == 1
    assert len(corpus.vocabulary.encode("zzzzzz")) == 6


def test_events_keep_their_names_and_unknown_events_become_unk_if_the_experiment_says_so(tmp_path: Path) -> None:
    sequences = [["log in", "view item", "view item"], ["view item", "buy"]] * 30 + [["never seen before", "buy"]] * 2
    path = write_events(tmp_path / "events.jsonl", sequences)
    corpus = load_corpus(DataConfig(kind="events", path=path, unknown="token"))
    vocabulary = corpus.vocabulary
    assert vocabulary.decode(vocabulary.encode_events(["log in", "buy"])) == "log in\nbuy"
    assert [vocabulary.token(index) for index in range(3)] == ["<eos>", "<unk>", "view item"]
    assert 1 in corpus.streams["test"]
    skipping = load_corpus(DataConfig(kind="events", path=path))
    assert not skipping.vocabulary.has_unknown
    assert skipping.vocabulary.size == vocabulary.size - 1


def test_a_word_vocabulary_keeps_the_most_frequent_words(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the cat the dog the end\n" * 50 + "rare words only here\n" * 6)
    corpus = load_corpus(DataConfig(kind="text", path=path, vocabulary="words"))
    assert corpus.vocabulary.encode("the cat sat") == [2, corpus.vocabulary.encode("cat")[0], 1]


def test_a_token_that_is_a_part_of_a_character_has_its_bytes() -> None:
    vocabulary = text_corpus().vocabulary
    ids = vocabulary.encode("戦")
    assert len(ids) == 3
    assert b"".join(vocabulary.token_bytes(index) for index in ids) == "戦".encode()
    assert vocabulary.token(ids[0]) == "\ufffd"


def test_a_vocabulary_without_eos_is_refused() -> None:
    with pytest.raises(ValueError, match="no <eos> token"):
        Vocabulary("words", '{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}')


def test_batches_are_contiguous_and_cover_the_stream_in_order() -> None:
    stream = np.arange(50, dtype=np.int64)
    rows, chunks = batches(stream, batch=3, chunk=4, split="train")
    assert chunks == 4
    assert rows[:, 0].tolist() == list(range(17))
    assert rows[:, 2].tolist() == list(range(32, 49))


def test_a_stream_too_short_for_a_step_is_refused() -> None:
    with pytest.raises(
        DataError, match="the valid split has 10 tokens, too few for one step: batch 4 x chunk 8 needs 33"
    ):
        batches(np.arange(10, dtype=np.int64), batch=4, chunk=8, split="valid")
