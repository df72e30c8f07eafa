"""Splits logs of events and converts them to token ids. `wane.models.event_files` reads the logs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from wane.models.event_files.event_log import EventLog
from wane.models.event_files.event_log import read_log as read_files
from wane.models.event_files.faults import EventFileError, counted
from wane.models.event_files.format import EventFormat
from wane.models.vocabulary import EOS, UNK, Vocabulary
from wane.training.config import DataConfig
from wane.training.errors import DataError

SEED = 0
"""The seed of `split = "session"`. Every run on the same data has the same splits."""


def read_log(paths: Sequence[Path], form: EventFormat | None = None) -> EventLog:
    """Reads files of events of one kind as one log. Raises DataError, which names the file and its bad lines."""
    try:
        return read_files(paths, form or EventFormat())
    except EventFileError as error:
        raise DataError(str(error)) from error


def event_format(experiment: Path | None) -> EventFormat:
    """Returns how files of events are read: as the table `[data]` of an experiment file says. Raises DataError."""
    try:
        return EventFormat() if experiment is None else EventFormat.read(experiment)
    except EventFileError as error:
        raise DataError(str(error)) from error


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
    if config.train_on == "train_and_valid":
        parts["train"] = order[: train + valid]
    return {name: log.sessions(np.sort(chosen)) for name, chosen in parts.items()}


def split_items(log: EventLog, config: DataConfig) -> dict[str, EventLog]:
    """Splits a log of the layout `leave_one_out`. The training split has the training items of every session. The
    sessions of the other splits end with their validation item, or their test item; those without one are left out."""
    assert log.held is not None, "a log without held-out items: this is a bug"
    every, (valid, test) = np.arange(len(log)), log.held.T
    lengths = np.diff(log.begins)
    seen = lengths - test
    trained = seen if config.train_on == "train_and_valid" else seen - valid
    return {
        "train": log.first_events(every, trained),
        "valid": log.first_events(every[valid > 0], seen[valid > 0]),
        "test": log.first_events(every[test > 0], lengths[test > 0]),
    }


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


def encode_log(log: EventLog, vocabulary: Vocabulary, unknown: str, *, last_only: bool = False) -> EncodedLog:
    """Converts sessions to token ids. Events that the vocabulary lacks become `<unk>`, or are left out if `unknown` is
    "skip". Reserved names, such as padding, are left out. A session all of whose events are left out is left out,
    too. With `last_only`, only the last event of a session is predicted, so a session whose last event would be left
    out is left out, and only such sessions are `missed`, if they have a known event."""
    ids = {name: -1 if index in vocabulary.reserved else index for index, name in enumerate(vocabulary.texts)}
    absent = ids.get(UNK, -1) if unknown == "token" else -1
    table = np.array([ids.get(name, absent) for name in log.names], np.int64)
    tokens = table[log.events]
    known = tokens >= 0
    missed = 0
    if last_only and not (ends := known[log.begins[1:] - 1]).all():
        found = encode_log(log.sessions(np.flatnonzero(ends)), vocabulary, unknown, last_only=True)
        begun = np.logical_or.reduceat(known, log.begins[:-1])
        return EncodedLog(found.stream, int(np.count_nonzero(begun & ~ends)))
    if not known.all() and not last_only:
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


def describe_events(
    splits: dict[str, EventLog], vocabulary: Vocabulary, how: str, missed: dict[str, int]
) -> tuple[str, ...]:
    """Returns lines about the splits and about what the vocabulary lacks. `how`: how the sessions were split. `missed`:
    for each split, the number of next events that the vocabulary lacks."""
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
    trained_on = {train.names[index] for index in np.flatnonzero(counts)}
    for name in ("valid", "test"):
        if missed[name]:
            log = splits[name]
            left_out = np.array([text not in known and text in trained_on for text in log.names])
            rare = int(np.count_nonzero(left_out[log.events]))
            lines.append(
                f"{name}: the vocabulary lacks {counted(missed[name], 'next event')}, each of which counts as a miss"
                + (
                    f"; {counted(rare, 'event')} of this split occur in the training split, but data.min_count or "
                    "data.vocabulary_size leaves them out"
                    if rare
                    else "; none of them occurs in the training split"
                )
            )
    return tuple(lines)


def _range(times: NDArray[np.float64]) -> Iterable[float]:
    return float(times.min()), float(times.max())
