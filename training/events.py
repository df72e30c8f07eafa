"""Reads event logs (JSON lines or CSV), cuts them into sessions, splits the sessions and converts them to token ids.

A log is held as arrays of small integers. Reading it takes about 20 bytes an event, so that ten million events fit in
well under a gigabyte.

JSON lines have one session per line, the oldest session first. A line is a list of event names, or `{"session": ...,
"events": [...]}`. CSV files have a header, with the columns `session`, `time` and `item`, or those that `data.columns`
names. Each row is one event. The rows may be in any order, and so may the columns. An event's name is text or an
integer.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from wane.models.vocabulary import EOS, UNK, Vocabulary
from wane.training.config import ColumnsConfig, DataConfig
from wane.training.errors import DataError

JSON_LINES = (".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""The separator of columns, by the suffix of a file's name."""

NAMED_FAULTS = 5
"""The largest number of wrong lines that an error message describes. The message also gives the number of all wrong
lines."""

LATEST_TIME_S = 1e11
"""Times above this number of seconds since 1970 (a time in the year 5138) are assumed to be milliseconds, and refused.
"""

SEED = 0
"""The seed of `split = "session"`. Every run on the same data has the same splits."""


@dataclass(frozen=True, slots=True)
class EventLog:
    """Sessions of events, in the order of their ends.

    names: the event names. events: int32 (events,), the index in `names` of each event, session after session. begins:
    int64 (sessions + 1), the index in `events` of each session's first event and, as the last number, the length of
    `events`. ends: float64 (sessions,), the time of each session's last event in seconds since 1970, or None if the
    source has no times.
    """

    names: list[str]
    events: NDArray[np.int32]
    begins: NDArray[np.int64]
    ends: NDArray[np.float64] | None

    def sessions(self, chosen: NDArray[np.int64]) -> EventLog:
        """Returns the sessions with the indices `chosen`, int64 (n,), in the order of `chosen`."""
        lengths = np.diff(self.begins)[chosen]
        begins = np.concatenate([[0], np.cumsum(lengths)])
        index = np.repeat(self.begins[chosen] - begins[:-1], lengths) + np.arange(begins[-1])
        return EventLog(self.names, self.events[index], begins, None if self.ends is None else self.ends[chosen])

    def __len__(self) -> int:
        """Returns the number of sessions."""
        return len(self.begins) - 1


class _Reader:
    """Gives each event name of a log an index, and collects the faults of one file's lines."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self._faults: list[str] = []
        self._wrong = 0

    def id(self, name: object) -> int:
        """Returns the index of an event name. Raises ValueError if `name` cannot be an event name."""
        if type(name) is int:
            name = str(name)
        if type(name) is not str:
            raise ValueError("not a list of event names (texts or integers)")
        found = self.ids.get(name)
        if found is None:
            _check_name(name)
            found = self.ids[name] = len(self.ids)
        return found

    def wrong(self, line: int, reason: object) -> None:
        """Records that a line is wrong."""
        self._wrong += 1
        if len(self._faults) < NAMED_FAULTS:
            self._faults.append(f"line {line}: {reason}")

    def check(self, path: Path, lines: int) -> None:
        """Raises DataError if a line was wrong. The message describes the first wrong lines and gives the number of all
        wrong lines."""
        if self._wrong:
            more = "; ..." if self._wrong > len(self._faults) else ""
            raise DataError(
                f"{path}, {'; '.join(self._faults)}{more} ({self._wrong:,} of {lines:,} lines "
                f"{'is' if self._wrong == 1 else 'are'} wrong)"
            )


def _check_name(name: str) -> None:
    if not name.strip():
        raise ValueError("not a list of event names: a name is empty")
    if name in (EOS, UNK):
        raise ValueError(f"{name} is reserved by the vocabulary and cannot name an event")
    if "\n" in name or name != name.strip():
        raise ValueError(f"the event name {name!r} has a line break, or blanks around it")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"the event name {name!r} is not Unicode text")


def read_log(
    paths: Sequence[Path], columns: ColumnsConfig | None = None, session_gap_s: float | None = None
) -> EventLog:
    """Reads files of JSON lines, or CSV files with the named columns, as one log.

    If more than `session_gap_s` seconds lie between two successive events of a session, the later event starts a new
    session. Raises DataError, which names the file and its wrong lines.
    """
    reader = _Reader()
    kinds = {path.suffix for path in paths}
    if kinds <= set(JSON_LINES):
        if session_gap_s is not None:
            raise DataError(f"{paths[0]}: data.session_gap_s needs times, which JSON lines do not have: use CSV")
        return _read_json_lines(paths, reader)
    if kinds <= set(DELIMITERS):
        return _read_csv(paths, columns or ColumnsConfig(), session_gap_s, reader)
    known = ", ".join((*JSON_LINES, *DELIMITERS))
    raise DataError(f"{paths[0]}: events are read from files of one kind: {known}; found {', '.join(sorted(kinds))}")


def _read_json_lines(paths: Sequence[Path], reader: _Reader) -> EventLog:
    events, lengths, sessions = array("i"), array("q"), set[object]()
    for path in paths:
        lines = 0
        with _opened(path) as file:
            for lines, raw in enumerate(file, start=1):
                if not raw.strip():
                    continue
                before = len(events)
                try:
                    session, names = _parsed(raw.decode("utf-8-sig" if lines == 1 else "utf-8"))
                    if session is not None:
                        if session in sessions:
                            raise ValueError(f"an earlier line has the same session {session!r}")
                        sessions.add(session)
                    events.extend([reader.id(name) for name in names])
                except UnicodeDecodeError as error:
                    reader.wrong(lines, f"not UTF-8 at byte {error.start} of the line")
                except (ValueError, RecursionError) as error:
                    reader.wrong(lines, error)
                if len(events) > before:
                    lengths.append(len(events) - before)
        reader.check(path, lines)
    begins = np.concatenate([[0], np.cumsum(np.frombuffer(lengths, np.int64) if lengths else np.zeros(0, np.int64))])
    return EventLog(list(reader.ids), _int32(events), begins, None)


def _parsed(line: str) -> tuple[str | int | None, list[object]]:
    """Returns the id of the line's session, or None if the line has no id, and the names of the session's events.
    Raises ValueError."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    session = None
    if isinstance(record, dict):
        if record.keys() - {"session", "events"} or "events" not in record:
            raise ValueError('not a list of event names or {"session": ..., "events": [...]}')
        session, record = record.get("session"), record["events"]
        if session is not None and type(session) not in (str, int):
            raise ValueError('the value of "session" is neither text nor an integer')
    if not isinstance(record, list):
        raise ValueError("not a list of event names")
    return session, record


def _read_csv(paths: Sequence[Path], columns: ColumnsConfig, session_gap_s: float | None, reader: _Reader) -> EventLog:
    users: dict[str, int] = {}
    owners, times, events = array("i"), array("d"), array("i")
    for path in paths:
        line = 0
        with (
            _opened(path),
            path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
        ):
            rows = csv.reader(file, delimiter=DELIMITERS[path.suffix])
            try:
                at = _column_indices(path, next(rows), columns)
            except csv.Error as error:
                raise DataError(f"{path}, line 1: {error}") from error
            while True:
                try:
                    row = next(rows)
                except StopIteration:
                    break
                except csv.Error as error:
                    reader.wrong(rows.line_num, error)
                    continue
                if not row:
                    continue
                try:
                    session, time, item = (row[index].strip() for index in at)
                    if not session:
                        raise ValueError(f"the value of {columns.session!r} is empty")
                    if not item:
                        raise ValueError(f"the value of {columns.item!r} is empty")
                    seconds, event = _seconds(time), reader.id(item)
                except IndexError:
                    reader.wrong(rows.line_num, f"{len(row)} columns, too few")
                except ValueError as error:
                    reader.wrong(rows.line_num, error)
                else:
                    owners.append(users.setdefault(session, len(users)))
                    times.append(seconds)
                    events.append(event)
            line = rows.line_num
        reader.check(path, line)
    return _grouped(list(reader.ids), _int32(owners), np.frombuffer(times, np.float64), _int32(events), session_gap_s)


def _column_indices(path: Path, header: list[str], columns: ColumnsConfig) -> tuple[int, int, int]:
    """Returns the indices of the columns session, time and item. Raises DataError."""
    names = [name.strip() for name in header]
    for key in ("session", "time", "item"):
        if (wanted := getattr(columns, key)) not in names:
            raise DataError(f"{path}: no column {wanted!r} in the header ({', '.join(names)}): set data.columns.{key}")
    return names.index(columns.session), names.index(columns.time), names.index(columns.item)


def _seconds(text: str) -> float:
    """Converts a text to seconds since 1970. A time without a zone is UTC. Raises ValueError."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ValueError(f"the time {text!r} is neither a number of seconds nor ISO 8601") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"the time {text!r} is not finite")
    if abs(seconds) > LATEST_TIME_S:
        raise ValueError(f"the time {text} is not in seconds since 1970 (is it in milliseconds?)")
    return seconds


def _grouped(
    names: list[str],
    owners: NDArray[np.int32],
    times: NDArray[np.float64],
    events: NDArray[np.int32],
    session_gap_s: float | None,
) -> EventLog:
    """Returns the rows of a log as sessions. Rows of the same time keep their order."""
    order = np.lexsort((times, owners))
    owners, times, events = owners[order], times[order], events[order]
    new = owners[1:] != owners[:-1]
    if session_gap_s is not None:
        new |= np.diff(times) > session_gap_s
    edges = np.flatnonzero(new) + 1
    begins = np.concatenate([np.zeros(min(1, len(events)), np.int64), edges, [len(events)]])
    log = EventLog(names, events, begins, times[begins[1:] - 1])
    return log.sessions(np.argsort(times[begins[1:] - 1], kind="stable"))


def _int32(values: array[int]) -> NDArray[np.int32]:
    return np.frombuffer(values, np.int32) if values else np.zeros(0, np.int32)


def _opened(path: Path) -> BinaryIO:
    """Opens a file of bytes. Raises DataError if it cannot be read or is empty."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not any(line.strip() for line in file):
        file.close()
        raise DataError(f"{path}: the file is empty")
    file.seek(0)
    return file


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split_log(log: EventLog, config: DataConfig, path: Path) -> dict[str, EventLog]:
    """Splits sessions into train, valid and test: in the order of the log, so that the test has the sessions that end
    last, or at random. Raises DataError if there are too few sessions."""
    count = len(log)
    valid, test = (max(1, round(count * share)) for share in (config.valid_share, config.test_share))
    train = count - valid - test
    if train < 1:
        raise DataError(f"{path}: {count} sessions are too few to split into train, valid and test")
    order = np.arange(count)
    if config.split == "session":
        order = np.random.default_rng(SEED).permutation(count)
    parts = {"train": order[:train], "valid": order[train : train + valid], "test": order[train + valid :]}
    return {name: log.sessions(np.sort(chosen)) for name, chosen in parts.items()}


def event_tokenizer(train: EventLog, config: DataConfig) -> str:
    """Returns a vocabulary of the events that occur at least `min_count` times in the training split. The most frequent
    events come first. Ties are ordered by name. The vocabulary has at most `vocabulary_size` tokens, including the
    special tokens.

    The vocabulary has `<unk>` only if `unknown` is "token".
    """
    special = [EOS, UNK] if config.unknown == "token" else [EOS]
    counts = np.bincount(train.events, minlength=len(train.names))
    names: list[int] = np.flatnonzero(counts >= config.min_count).tolist()
    names.sort(key=lambda index: (-counts[index], train.names[index]))
    if config.vocabulary_size is not None:
        names = names[: config.vocabulary_size - len(special)]
    if not names:
        raise DataError(f"no event occurs {config.min_count} times in the training split: lower data.min_count")
    table = {name: index for index, name in enumerate([*special, *(train.names[index] for index in names)])}
    return str(Tokenizer(models.WordLevel(table, unk_token=UNK)).to_str())


@dataclass(frozen=True, slots=True)
class EncodedLog:
    """A split as token ids. stream: int64 (tokens,), the sessions with `<eos>` before each and after the last.

    missed: the number of events that the vocabulary lacks and that follow a known event of their session. They were
    left out of the stream, so an evaluation counts each as a miss.
    """

    stream: NDArray[np.int64]
    missed: int


def encode_log(log: EventLog, vocabulary: Vocabulary, unknown: str) -> EncodedLog:
    """Converts sessions to token ids. Events that the vocabulary lacks become `<unk>`, or are left out if `unknown` is
    "skip". Reserved names, such as padding, are left out. A session all of whose events are left out is left out,
    too."""
    ids = {name: -1 if index in vocabulary.reserved else index for index, name in enumerate(vocabulary.texts)}
    absent = ids.get(UNK, -1) if unknown == "token" else -1
    table = np.array([ids.get(name, absent) for name in log.names], np.int64)
    tokens = table[log.events]
    known = tokens >= 0
    missed = 0
    if not known.all():
        at = np.where(known, np.arange(len(tokens)), len(tokens))
        lengths = np.diff(log.begins)
        first = np.repeat(np.minimum.reduceat(at, log.begins[:-1]), lengths)
        missed = int(np.count_nonzero(~known & (np.arange(len(tokens)) > first)))
    kept = np.add.reduceat(known.astype(np.int64), log.begins[:-1]) if len(log) else np.zeros(0, np.int64)
    kept = kept[kept > 0]
    stream = np.full(int(kept.sum()) + len(kept) + 1, vocabulary.eos_id, np.int64)
    places = np.arange(int(kept.sum())) + np.repeat(np.arange(1, len(kept) + 1), kept)
    stream[places] = tokens[known]
    return EncodedLog(stream, missed)


def describe_events(splits: dict[str, EventLog], vocabulary: Vocabulary, how: str) -> tuple[str, ...]:
    """Returns lines about the splits and about what the vocabulary lacks. `how`: how the sessions were split."""
    lines = []
    for name, log in splits.items():
        line = f"{name}: {len(log.events):,} events in {len(log):,} sessions"
        if log.ends is not None and len(log):
            first, last = (datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds") for time in _range(log.ends))
            line += f" that end from {first} to {last}"
        lines.append(line)
    lines[0] = f"split {how}; {lines[0]}"
    train, known = splits["train"], set(vocabulary.texts)
    counts = np.bincount(train.events, minlength=len(train.names))
    lost = np.array([name not in known for name in train.names])
    events = int(np.count_nonzero(lost & (counts > 0)))
    share = float(counts[lost].sum() / max(1, counts.sum()))
    lines.append(
        f"vocabulary: {len(known - {EOS, UNK}):,} events"
        + (
            f"; it lacks {events:,} events, whose occurrences are {share:.2%} of the training split"
            if events
            else "; it has every event of the training split"
        )
    )
    return tuple(lines)


def _range(times: NDArray[np.float64]) -> Iterable[float]:
    return float(times.min()), float(times.max())
