"""Reads corpora (WikiText-2, any text, or event sequences) as streams of token ids.

A stream contains all sequences one after another, each preceded by `<eos>`. A server reads sequences in the same form.
The counts and hashes of known data sets are checked (`training/wikitext.py`), so that every result can be traced to the
bytes of its data.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from wane.models.vocabulary import EOS, LINES_AT_ONCE, UNK, Vocabulary
from wane.training.config import DataConfig
from wane.training.errors import DataError
from wane.training.wikitext import fetch_wikitext_2, read_wikitext_2

Item = TypeVar("Item")

SPLITS = ("train", "valid", "test")

LEAST_LINES = 20
"""A text with fewer lines than this is split into train, valid and test between words instead of between lines."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The token streams of a corpus, by split, over one vocabulary, with the word counts of the splits and the hashes
    of the source files."""

    vocabulary: Vocabulary
    tokenizer_json: str
    streams: dict[str, NDArray[np.int64]]
    words: dict[str, int]
    hashes: dict[str, str]


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
    flat = [eos_id]
    for sequence in sequences:
        flat.extend(sequence)
        flat.append(eos_id)
    return np.asarray(flat, dtype=np.int64)


def _checked(corpus: Corpus, path: Path) -> Corpus:
    for split, stream in corpus.streams.items():
        tokens = int(np.count_nonzero(stream != corpus.vocabulary.eos_id))
        if tokens < 2:
            raise DataError(f"{path}: the {split} split has {tokens} token(s) besides {EOS}; at least 2 are needed")
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
    """Returns "events" if all files are .jsonl or .ndjson, and "text" if no file is. Raises DataError for a mixture."""
    files = _files(path) if path.is_dir() else [path]
    lines = [file for file in files if file.suffix in (".jsonl", ".ndjson")]
    if lines and len(lines) < len(files):
        raise DataError(f"{path}: holds both text and events (JSON lines, such as {lines[0].name})")
    return "events" if lines else "text"


def load_whole(path: Path, vocabulary: Vocabulary, tokenizer_json: str, tokens: int) -> Corpus:
    """Reads text, or events for a vocabulary of events, as one stream `audit`. Reads sequences up to a total of
    `tokens` tokens.

    The whole first sequence is always read. A folder's files are read in name order. Raises DataError.
    """
    hashes: dict[str, str] = {}
    sequences: list[list[int]] = []
    length = words = 0
    for file in _files(path) if path.is_dir() else [path]:
        if length >= tokens:
            break
        text, hashes[str(file.relative_to(path)) if path.is_dir() else file.name] = _read_file(file)
        lines = _lines(text)
        for start in range(0, len(lines), LINES_AT_ONCE):
            if length >= tokens:
                break
            some = lines[start : start + LINES_AT_ONCE]
            try:
                if vocabulary.kind == "events":
                    named = _sequences(some, file, start)
                    encoded = [vocabulary.encode_events(events) for events in named]
                else:
                    encoded = vocabulary.encode_lines(some)
            except ValueError as error:
                raise DataError(f"{file}, lines {start + 1} to {start + len(some)}: {error}") from error
            for index, sequence in enumerate(encoded):
                if sequences and length + len(sequence) + 1 > tokens:
                    length = tokens
                    break
                sequences.append(sequence)
                length += len(sequence) + 1
                words += len(some[index].split()) + 1 if vocabulary.kind != "events" else 0
    counted = {} if vocabulary.kind == "events" else {"audit": words}
    streams = {"audit": _stream(sequences, vocabulary.eos_id)}
    return _checked(Corpus(vocabulary, tokenizer_json, streams, counted, hashes), path)


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
    # some corpora are one long line, which is split between words
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
    """Splits lines by position, not at random. Neighbouring lines stay in the same split, so the test split does not
    continue text of the training split."""
    valid, test = (max(1, round(len(items) * share)) for share in (config.valid_share, config.test_share))
    train = len(items) - valid - test
    if train < 1:
        raise DataError(f"{path}: too short to split into train, valid and test")
    return {"train": items[:train], "valid": items[train : train + valid], "test": items[train + valid :]}


def _train_tokenizer(config: DataConfig, lines: list[str]) -> str:
    if config.vocabulary == "words":
        return _word_tokenizer(Counter(word for line in lines for word in line.split()), config.vocabulary_size, True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=config.vocabulary_size,
            special_tokens=[EOS, UNK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer.to_str()


def _word_tokenizer(counts: Counter[str], size: int, split_whitespace: bool) -> str:
    """Returns a word-level vocabulary of at most `size` tokens: the special tokens and the most frequent names. Ties
    are ordered by name."""
    names = sorted((name for name in counts if name not in (EOS, UNK)), key=lambda name: (-counts[name], name))
    table = {name: index for index, name in enumerate([EOS, UNK, *names[: size - 2]])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=UNK))
    if split_whitespace:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer.to_str()


def _load_events(config: DataConfig, path: Path, tokenizer_json: str | None) -> Corpus:
    """Reads JSON lines with one list of event names each. Raises DataError, which names the line."""
    text, digest = _read_file(path)
    split = _split(_sequences(_lines(text), path, 0), config, path)
    if tokenizer_json is None:
        counts = Counter(name for sequence in split["train"] for name in sequence)
        tokenizer_json = _word_tokenizer(counts, config.vocabulary_size, False)
    vocabulary = Vocabulary("events", tokenizer_json)
    streams = {
        name: _stream([vocabulary.encode_events(events) for events in split[name]], vocabulary.eos_id)
        for name in SPLITS
    }
    return _checked(Corpus(vocabulary, tokenizer_json, streams, {}, {path.name: digest}), path)


def _sequences(lines: list[str], path: Path, before: int) -> list[list[str]]:
    """Returns the event names of each line that is not blank. `before`: the number of lines in the file before the
    first of `lines`, for the line numbers in messages."""
    return [
        _events(line, f"{path}, line {number}") for number, line in enumerate(lines, start=before + 1) if line.strip()
    ]


def _events(line: str, where: str) -> list[str]:
    """Returns the event names of one line. Raises DataError."""
    try:
        events = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(events, list) or not all(isinstance(name, str) and name.strip() for name in events):
        raise DataError(f"{where}: not a list of event names")
    for name in events:
        if name in (EOS, UNK):
            raise DataError(f"{where}: {name} is reserved by the vocabulary and cannot name an event")
        if "\n" in name or name != name.strip():
            raise DataError(f"{where}: the event name {name!r} has a line break, or blanks around it")
        if not name.isprintable() and any("\ud800" <= character <= "\udfff" for character in name):
            raise DataError(f"{where}: the event name {name!r} is not Unicode text")
    return events


def batches(stream: NDArray[np.int64], batch: int, chunk: int, split: str) -> tuple[NDArray[np.int64], int]:
    """Splits a stream into `batch` parallel streams: (length, batch), time-major. Also returns the number of chunks per
    epoch.

    The inputs of chunk i are the rows from `i * chunk` up to, but not including, `(i + 1) * chunk`. Its targets are the
    rows one step later. Tokens that do not fill a chunk are dropped. Raises DataError if the stream is too short for
    one chunk.
    """
    length = (len(stream) - 1) // batch
    chunks = length // chunk
    if chunks < 1:
        raise DataError(
            f"the {split} split has {len(stream)} tokens, too few for one step: "
            f"batch {batch} x chunk {chunk} needs {batch * chunk + 1}"
        )
    rows = np.lib.stride_tricks.as_strided(
        stream, (length + 1, batch), (stream.strides[0], length * stream.strides[0]), writeable=False
    )
    return rows, chunks
