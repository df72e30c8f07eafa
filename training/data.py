"""Reads corpora (WikiText-2, any text, or event sequences) as streams of token ids.

A stream contains all sequences one after another, each preceded by `<eos>`. A server reads sequences in the same form.
The counts and hashes of known data sets are checked (`training/wikitext.py`), so that every result can be traced to the
bytes of its data.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from wane.models.event_files.event_log import EVENTS_ONLY, EventLog, suffix_of
from wane.models.event_files.format import EventFormat
from wane.models.manifest import Start
from wane.models.vocabulary import EOS, LINES_AT_ONCE, UNK, Vocabulary
from wane.training.config import TEXT_VOCABULARY, DataConfig, Protocol
from wane.training.errors import DataError
from wane.training.events import (
    describe_events,
    encode_log,
    event_tokenizer,
    read_log,
    sha256_of,
    split_items,
    split_log,
)
from wane.training.wikitext import fetch_wikitext_2, read_wikitext_2

Item = TypeVar("Item")

SPLITS = ("train", "valid", "test")

LEAST_LINES = 20
"""A text with fewer lines than this is split into train, valid and test between words instead of between lines."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The token streams of a corpus, by split, over one vocabulary, with the word counts of the splits and the hashes
    of the source files.

    The other fields are for events. `start`: "token" if a model reads `<eos>` before a sequence, "zero" if it does not.
    `missed`: for each split, the number of events that were left out because the vocabulary lacks them, and that follow
    a known event of their session. `notes`: lines about splits and vocabulary, for the user. `protocol`: which
    events validation and test predict. `validated`: whether the validation split is not a part of the training split.
    """

    vocabulary: Vocabulary
    tokenizer_json: str
    streams: dict[str, NDArray[np.int64]]
    words: dict[str, int]
    hashes: dict[str, str]
    start: Start = "token"
    missed: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    protocol: Protocol = "next"
    validated: bool = True

    @property
    def last_only(self) -> bool:
        """Whether validation and test predict only the last event of a session."""
        return self.protocol == "leave_one_out"


def load_corpus(config: DataConfig, tokenizer_json: str | None = None) -> Corpus:
    """Reads, checks and tokenises a corpus.

    Uses the vocabulary `tokenizer_json`, or trains a vocabulary if it is None. Raises DataError.
    """
    path = config.path
    if path is None:
        if config.kind != "wikitext-2":
            raise DataError("no data: name a file or folder with --data, or data.path in the experiment")
        path = fetch_wikitext_2()
    if config.kind == "events":
        return _load_events(config, path, tokenizer_json)
    lines, hashes = read_wikitext_2(path) if config.kind == "wikitext-2" else _read_text(config, path)
    words = {split: sum(len(line.split()) + 1 for line in lines[split]) for split in SPLITS}
    if tokenizer_json is None:
        tokenizer_json = _train_tokenizer(config, lines["train"])
    vocabulary = Vocabulary(config.vocabulary, tokenizer_json)
    streams = {split: _stream(vocabulary.encode_lines(lines[split]), vocabulary.eos_id) for split in SPLITS}
    return _checked(Corpus(vocabulary, tokenizer_json, streams, words, hashes), path)


def _stream(sequences: list[list[int]], eos_id: int) -> NDArray[np.int64]:
    """Returns the sequences with `<eos>` before each sequence and after the last one: (tokens,) int64."""
    flat = array("q", [eos_id])
    for sequence in sequences:
        flat.extend(sequence)
        flat.append(eos_id)
    return np.asarray(flat, dtype=np.int64)


def _checked(corpus: Corpus, path: Path, logs: dict[str, EventLog] | None = None) -> Corpus:
    """Raises DataError if a split has fewer than two tokens. `logs`: the sessions of the splits, if they are events."""
    for split, stream in corpus.streams.items():
        tokens = int(np.count_nonzero(stream != corpus.vocabulary.eos_id))
        if tokens >= 2:
            continue
        if corpus.vocabulary.kind != "events":
            raise DataError(f"{path}: the {split} split has {tokens} token(s) besides {EOS}; at least 2 are needed")
        message = f"{path}: the {split} split has {tokens} known event(s), and at least 2 are needed"
        if logs is not None:
            log = logs[split]
            message += f": the vocabulary lacks the others of its {len(log.events):,} events in {len(log):,} sessions"
            if split != "train":
                message += f" (give it more sessions with data.{split}_share, or data.split = 'session')"
        raise DataError(message)
    return corpus


def _read_file(path: Path) -> tuple[str, str]:
    """Returns a file's text, without a byte-order mark, and the file's SHA-256."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not raw.strip():
        raise DataError(f"{path}: the file is empty")
    try:
        return raw.decode("utf-8-sig"), hashlib.sha256(raw).hexdigest()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(f"{path}: not UTF-8 at byte {error.start} (line {line})") from error


def _lines(text: str) -> list[str]:
    """Splits lines in the same way as the service: at line feeds, with or without a carriage return."""
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def data_kind(path: Path) -> Literal["text", "events"]:
    """Returns "events" if all files have the suffix of a format of events, and "text" if no file has. Raises DataError
    for a mixture."""
    files = _files(path) if path.is_dir() else [path]
    events = [file for file in files if suffix_of(file) in EVENTS_ONLY]
    if events and len(events) < len(files):
        raise DataError(f"{path}: holds both text and events (such as {events[0].name})")
    return "events" if events else "text"


def load_whole(
    path: Path,
    vocabulary: Vocabulary,
    tokenizer_json: str,
    tokens: int,
    start: Start = "token",
    form: EventFormat | None = None,
) -> Corpus:
    """Reads text (or events, if the vocabulary is one of events) as one stream: the corpus's split `audit`. Reads
    sequences up to a total of `tokens` tokens.

    The whole first sequence is always read. A folder's files are read in name order. Events that a vocabulary without
    `<unk>` lacks are left out. `start`: the value of the corpus's field `start`. `form`: how files of events are read.
    Raises DataError.
    """
    files = _files(path) if path.is_dir() else [path]
    if vocabulary.kind != "events" and data_kind(path) == "events":
        raise DataError(f"{path}: holds events, but the vocabulary is of text")
    if vocabulary.kind == "events":
        log = read_log(files, form)
        fitting = max(1, int(np.searchsorted(log.begins + np.arange(len(log.begins)), tokens, side="right")) - 1)
        part = encode_log(log.sessions(np.arange(min(fitting, len(log)))), vocabulary, "token")
        streams, missed = {"audit": part.stream}, {"audit": part.missed}
        corpus = Corpus(vocabulary, tokenizer_json, streams, {}, _hashes(files, path), start, missed, log.notes)
        return _checked(corpus, path)
    hashes: dict[str, str] = {}
    sequences: list[list[int]] = []
    length = words = 0
    for file in files:
        if length >= tokens:
            break
        text, hashes[str(file.relative_to(path)) if path.is_dir() else file.name] = _read_file(file)
        lines = _lines(text)
        for first in range(0, len(lines), LINES_AT_ONCE):
            if length >= tokens:
                break
            some = lines[first : first + LINES_AT_ONCE]
            try:
                encoded = vocabulary.encode_lines(some)
            except ValueError as error:
                raise DataError(f"{file}, lines {first + 1} to {first + len(some)}: {error}") from error
            for index, sequence in enumerate(encoded):
                if sequences and length + len(sequence) + 1 > tokens:
                    length = tokens
                    break
                sequences.append(sequence)
                length += len(sequence) + 1
                words += len(some[index].split()) + 1
    streams = {"audit": _stream(sequences, vocabulary.eos_id)}
    return _checked(Corpus(vocabulary, tokenizer_json, streams, {"audit": words}, hashes), path)


def _read_text(config: DataConfig, path: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Splits the text of a file, or of a folder's files in name order, by position into train, valid and test."""
    files = _files(path) if path.is_dir() else [path]
    lines, hashes = [], {}
    for file in files:
        text, digest = _read_file(file)
        hashes[str(file.relative_to(path)) if path.is_dir() else file.name] = digest
        lines.extend(_lines(text))
    if len(lines) >= LEAST_LINES:
        return _split(lines, config, path), hashes
    # A text with fewer lines, such as a corpus of one long line, is split between words.
    words = _split("\n".join(lines).split(" "), config, path)
    return {split: " ".join(part).split("\n") for split, part in words.items()}, hashes


def _files(folder: Path) -> list[Path]:
    """Returns a folder's files. Skips empty files, hidden files and files in hidden folders. Raises DataError if no
    file is left."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.stat().st_size
    )
    if not files:
        raise DataError(f"{folder}: the folder holds no files, or only empty or hidden ones")
    return files


def _split(items: list[Item], config: DataConfig, path: Path) -> dict[str, list[Item]]:
    """Splits lines or words by position, not at random. Neighbouring lines stay in the same split, so the test split
    does not continue text of the training split."""
    valid, test = (max(1, round(len(items) * share)) for share in (config.valid_share, config.test_share))
    train = len(items) - valid - test
    if train < 1:
        raise DataError(f"{path}: too short to split into train, valid and test")
    return {"train": items[:train], "valid": items[train : train + valid], "test": items[train + valid :]}


def _train_tokenizer(config: DataConfig, lines: list[str]) -> str:
    size = config.vocabulary_size or TEXT_VOCABULARY
    if config.vocabulary == "words":
        return _word_tokenizer(Counter(word for line in lines for word in line.split()), size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[EOS, UNK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer.to_str()


def _word_tokenizer(counts: Counter[str], size: int) -> str:
    """Returns a word-level vocabulary of at most `size` tokens: the special tokens and the most frequent words. Equally
    frequent words are in alphabetical order."""
    names = sorted((name for name in counts if name not in (EOS, UNK)), key=lambda name: (-counts[name], name))
    table = {name: index for index, name in enumerate([EOS, UNK, *names[: size - 2]])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer.to_str()


def _load_events(config: DataConfig, path: Path, tokenizer_json: str | None) -> Corpus:
    """Reads event logs (`training/events.py`) as a corpus. Raises DataError."""
    named = _split_files(config, path)
    files = list(dict.fromkeys(file for some in named.values() for file in some)) if named else _source_files(path)
    if named:
        logs = {split: read_log(some, config) for split, some in named.items()}
        read = tuple(f"{split}: {note}" for split, log in logs.items() for note in log.notes)
        how = "by the files of the folder"
    else:
        log = read_log(files, config)
        logs = split_items(log, config) if log.held is not None else split_log(log, config, path)
        read = log.notes
        how = "at random by session" if config.split == "session" else "by the end of the sessions"
        if log.held is not None:
            how = "by the parts of each line"
    if tokenizer_json is None:
        tokenizer_json = event_tokenizer(logs["train"], config)
    vocabulary = Vocabulary("events", tokenizer_json)
    if config.unknown == "token" and not vocabulary.has_unknown:
        raise DataError(f"{path}: data.unknown = 'token' needs a vocabulary with {UNK}")
    last_only = config.judged_by == "leave_one_out"
    encoded = {
        split: encode_log(log, vocabulary, config.unknown, last_only=last_only and split != "train")
        for split, log in logs.items()
    }
    missed = {split: part.missed for split, part in encoded.items()}
    corpus = Corpus(
        vocabulary,
        tokenizer_json,
        {split: part.stream for split, part in encoded.items()},
        {},
        _hashes(files, path),
        start=config.start,
        missed=missed,
        protocol=config.judged_by,
        validated=config.train_on == "train",
        notes=(*read, *describe_events(logs, vocabulary, how, missed)),
    )
    return _checked(corpus, path, logs)


def _split_files(config: DataConfig, path: Path) -> dict[str, list[Path]]:
    """Returns the files of each split: those that the experiment names, or those of a folder that has nothing but
    `train`, `valid` and `test`. Returns an empty dictionary if the data is to be split. Raises DataError."""
    if config.train is not None and config.valid is not None and config.test is not None:
        if not path.is_dir():
            raise DataError(f"{path}: data.train, data.valid and data.test name files of a folder, and this is none")
        given = {"train": config.train, "valid": config.valid, "test": config.test}
        if config.train_on == "train_and_valid" and config.whole is not None:
            given["train"] = config.whole
        named = {
            split: [path / name for name in ([some] if isinstance(some, str) else some)]
            for split, some in given.items()
        }
        return named if config.whole is not None else _with_valid(named, config)
    if not path.is_dir() or config.layout == "leave_one_out":
        return {}
    files = _files(path)
    by_split = {file.stem: [file] for file in files}
    is_split = sorted(by_split) == sorted(SPLITS) and len(files) == len(SPLITS)
    return _with_valid({split: by_split[split] for split in SPLITS}, config) if is_split else {}


def _with_valid(named: dict[str, list[Path]], config: DataConfig) -> dict[str, list[Path]]:
    """Returns the files of each split, with those of `valid` added to `train` if the run trains on both."""
    if config.train_on == "train":
        return named
    return named | {"train": list(dict.fromkeys([*named["train"], *named["valid"]]))}


def _source_files(path: Path) -> list[Path]:
    return _files(path) if path.is_dir() else [path]


def source_hashes(config: DataConfig, path: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of the data, by name, as in `Corpus.hashes`. Raises DataError."""
    named = _split_files(config, path) if config.kind == "events" else {}
    return _hashes(list(dict.fromkeys(file for some in named.values() for file in some)) or _source_files(path), path)


def _hashes(files: list[Path], path: Path) -> dict[str, str]:
    return {str(file.relative_to(path)) if path.is_dir() else file.name: sha256_of(file) for file in files}
