"""Reads data whose splits are given: by files, and by the layout `leave_one_out`. Trains on training and validation
together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.training.corpora import event_experiment
from tests.training.test_layouts import put
from wane.training.cli import main
from wane.training.config import DataConfig, Experiment
from wane.training.data import Corpus, load_corpus
from wane.training.errors import ConfigError, DataError

COLUMNS = {"session": "SessionId", "time": "Time", "item": "ItemId"}
HEADER = "SessionId\tItemId\tTime"
FILES = {"train": "fit.tsv", "valid": "choose.tsv", "test": "judge.txt"}


def folder(path: Path, **files: list[str]) -> Path:
    """Writes tab-separated files of three sessions each, with epoch seconds and fractions, and a file of notes."""
    for start, name in enumerate(("fit.tsv", "choose.tsv", "judge.txt")):
        rows = [f"{start * 3 + at // 3}\t{at % 4}\t{1_396_860_669.277 + 1000 * start + at}" for at in range(9)]
        put(path / name, [HEADER, *files.get(name.split(".")[0], rows)])
    put(path / "SOURCE.txt", ["Where the files come from."])
    return path


def load(path: Path, **keys: object) -> Corpus:
    given = {"kind": "events", "path": path, "columns": COLUMNS, **FILES}
    return load_corpus(DataConfig.model_validate(given | keys))


def lines(path: Path, *rows: str) -> Path:
    return put(path / "users.csv", [*rows])


def leave_one_out(path: Path, **keys: object) -> Corpus:
    given = {"kind": "events", "path": path, "layout": "leave_one_out", "start": "zero"}
    return load_corpus(DataConfig.model_validate(given | keys))


def sessions(corpus: Corpus, split: str) -> list[str]:
    text = " ".join(corpus.vocabulary.token(token) for token in corpus.streams[split])
    return [part.strip() for part in text.split("<eos>") if part.strip()]


def test_named_files_are_the_splits_and_other_files_of_the_folder_are_not_read(tmp_path: Path) -> None:
    corpus = load(folder(tmp_path))
    assert sessions(corpus, "train") == ["0 1 2", "3 0 1", "2 3 0"]
    assert [sessions(corpus, split) for split in ("valid", "test")] == [sessions(corpus, "train")] * 2
    assert sorted(corpus.hashes) == ["choose.tsv", "fit.tsv", "judge.txt"]
    assert "the times are read as seconds since 1970" in corpus.notes[0]


def test_training_on_both_reads_the_files_of_training_and_validation_or_the_whole_file(tmp_path: Path) -> None:
    both = load(folder(tmp_path), train_on="train_and_valid")
    assert len(sessions(both, "train")) == 6
    assert not both.validated
    put(tmp_path / "all.tsv", [HEADER, f"1\t7\t{1_396_860_669}", f"1\t8\t{1_396_860_670}"])
    whole = load(tmp_path, train_on="train_and_valid", whole="all.tsv", test="all.tsv", valid="all.tsv")
    assert sessions(whole, "train") == ["7 8"]
    assert sessions(load(tmp_path, whole="all.tsv"), "train") == sessions(load(tmp_path), "train")
    listed = load(tmp_path, train=["fit.tsv", "choose.tsv"])
    assert sessions(listed, "train") == sessions(both, "train")


def test_a_rare_event_of_the_test_that_min_count_leaves_out_is_named_and_counts_as_a_miss(tmp_path: Path) -> None:
    start = 1_396_860_669
    rows = [f"{at}\t{item}\t{start + at}" for at in range(5) for item in ("a", "b", "b")]
    fit = [*rows, f"9\tb\t{start + 9}", f"9\trare\t{start + 10}"]
    judge = [f"1\tb\t{start}", f"1\trare\t{start + 1}", f"1\tnew\t{start + 2}", f"1\tb\t{start + 3}"]
    corpus = load(folder(tmp_path, fit=fit, choose=rows, judge=judge), min_count=2)
    assert corpus.missed == {"train": 1, "valid": 0, "test": 2}
    assert corpus.notes[-1] == (
        "test: the vocabulary lacks 2 next events, each of which counts as a miss; 1 event of this split occur in the "
        "training split, but data.min_count or data.vocabulary_size leaves them out"
    )
    assert "; none of them occurs in the training split" in load(tmp_path, min_count=1).notes[-1]


def test_leave_one_out_trains_on_the_first_part_and_counts_empty_ones(tmp_path: Path) -> None:
    path = lines(tmp_path, "5 6 7,8,6", "6 5,,", "7 8 5,6,", "8 7,5,9")
    corpus = leave_one_out(path)
    assert sessions(corpus, "train") == ["5 6 7", "6 5", "7 8 5", "8 7"]
    assert sessions(corpus, "valid") == ["5 6 7 8", "7 8 5 6", "8 7 5"]
    assert sessions(corpus, "test") == ["5 6 7 8 6"]
    assert corpus.missed == {"train": 0, "valid": 0, "test": 1}  # no training part has 9
    assert "of 4 sessions, 1 have no validation item and 2 have no test item" in corpus.notes
    assert corpus.last_only
    both = leave_one_out(path, train_on="train_and_valid")
    assert sessions(both, "train") == ["5 6 7 8", "6 5", "7 8 5 6", "8 7 5"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("5 6 7;8;9", "line 2: 1 parts with the separator ','"),
        ("5 6 7,8", "line 2: 2 parts with the separator ','"),
        ("5 6,7,8,9", "line 2: 4 parts with the separator ','"),
        (",8,9", "line 2: no training items"),
        ("5 6,7 8,9", "line 2: 2 items where the validation item is"),
        ("5 6,7,8 9 5", "line 2: 3 items where the test item is"),
        ("5 <eos>,7,8", "line 2: <eos> is reserved by the vocabulary"),
        ('"5 6",7,8', "line 2: quotation marks around '\"5 6\"'"),
        ('5 6,"7",8', "line 2: quotation marks around '\"7\"'"),
    ],
)
def test_bad_lines_of_items_are_named(tmp_path: Path, line: str, told: str) -> None:
    path = lines(tmp_path, "5 6 7,8,6", line, "6 5,8,7", "7 8 5,6,5")
    with pytest.raises(DataError, match=told.replace("<", r"\<")) as caught:
        leave_one_out(path)
    assert "(1 of 4 lines is wrong; data.on_bad_line = 'skip' leaves it out)" in str(caught.value)
    assert len(sessions(leave_one_out(path, on_bad_line="skip"), "train")) == 3


def test_a_header_is_a_bad_line_and_a_line_of_names_is_not(tmp_path: Path) -> None:
    rows = ["5 6 7,8,6", "6 5,8,7", "7 8 5,6,5"]
    path = lines(tmp_path, "train,valid,test", *rows)
    with pytest.raises(DataError, match="line 1: a line without digits before a line of numbers: it looks like a head"):
        leave_one_out(path)
    assert sessions(leave_one_out(path, on_bad_line="skip"), "train") == ["5 6 7", "6 5", "7 8 5"]
    named = leave_one_out(lines(tmp_path, "red blue,red,blue", "red 5,blue,red", *rows))
    assert sessions(named, "train") == ["red blue", "red 5", "5 6 7", "6 5", "7 8 5"]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"train": "a", "valid": "b"}, "there is only train and valid"),
        ({"whole": "a"}, "whole needs the files train, valid and test"),
        ({"layout": "leave_one_out", **FILES}, "has the three splits in each line"),
        ({"layout": "leave_one_out", "session_gap_s": 5}, "does not read session_gap_s"),
        ({"layout": "leave_one_out", "protocol": "next"}, "protocol cannot be next"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Experiment.parse(
            Path("x.toml"), event_experiment().model_dump(mode="json") | {"data": {"kind": "events", **keys}}
        )


def test_a_file_of_a_split_that_is_missing_is_named(tmp_path: Path) -> None:
    (folder(tmp_path) / "judge.txt").unlink()
    with pytest.raises(DataError, match=r"judge\.txt: No such file"):
        load(tmp_path)
    with pytest.raises(DataError, match="name files of a folder, and this is none"):
        load(tmp_path / "fit.tsv")


EXPERIMENT = """
name = "both"
[model]
cell = "gru"
hidden = 4
cache = 20
cache_in_loss = false
[data]
kind = "events"
start = "zero"
layout = "leave_one_out"
[training]
steps = 6
batch = 4
chunk = 8
warmup = 1
evaluate_every = 2
checkpoint_every = 2
label_smoothing = 0.1
threads = 1
device = "cpu"
"""


def test_a_run_is_chosen_and_then_trained_on_validation_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(1)
    rows = [
        f"{' '.join(map(str, random.permutation(12)[: random.integers(2, 6)]))},{random.integers(12, 15)},3"
        for _ in range(40)
    ]
    path = lines(tmp_path, *rows, *(f"{' '.join(map(str, range(15)))},1,2" for _ in range(2)))
    experiment = tmp_path / "both.toml"
    experiment.write_text(EXPERIMENT)
    one, two = tmp_path / "one", tmp_path / "two"
    train = ["train", str(experiment), "--data", str(path), "--run"]
    evaluate = ["--data", str(path), "--positions", "all", "--transitions"]
    assert main([*train, str(one)]) == 0
    early = [*train, str(tmp_path / "early"), "--after", str(one)]
    assert main(early) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "early"), *evaluate]) == 2
    told = "early has no transitions.json: run `wane evaluate RUN --transitions` on the run of --after first"
    assert told in capsys.readouterr().err
    assert main(["evaluate", str(one), *evaluate]) == 0
    printed = capsys.readouterr().out
    assert "both: test, 42 last events of sessions, k = 20" in printed
    assert "\nwithout transitions " in printed and "\ntransitions alone " in printed
    assert main([*train, str(two), "--after", str(one)]) == 0
    assert "the last weights are saved" in capsys.readouterr().out
    assert main(early) == 0  # what the message advises
    assert (tmp_path / "early" / "transitions.json").read_bytes() == (one / "transitions.json").read_bytes()
    assert not any("valid_loss" in line for line in (two / "log.jsonl").read_text().splitlines())
    assert (two / "transitions.json").read_bytes() == (one / "transitions.json").read_bytes()
    assert main(["evaluate", str(two), *evaluate]) == 0
    assert main([*train, str(tmp_path / "three"), "--after", str(two)]) == 2
    assert "data.train_on = 'train_and_valid', not 'train'" in capsys.readouterr().err
    other = put(tmp_path / "other.csv", path.read_text().splitlines()[::-1])
    of_other = ["train", str(experiment), "--data", str(other), "--run", str(tmp_path / "three")]
    assert main([*of_other, "--after", str(one)]) == 2
    assert f"--after {one}: {one} holds a run on other data: other.csv is not the file" in capsys.readouterr().err
    assert not (tmp_path / "three").exists()
    experiment.write_text(EXPERIMENT.replace("hidden = 4", "hidden = 5"))
    assert main([*train, str(tmp_path / "three"), "--after", str(one)]) == 2
    assert "holds a run with model.hidden = 4, not 5" in capsys.readouterr().err
