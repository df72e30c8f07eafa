"""Tests of the format in which sessions are stored for other processes."""

from __future__ import annotations

import struct

import pytest

from wane.service.sessions.stores import codec
from wane.service.sessions.stores.codec import read_snapshot, write_snapshot
from wane.service.sessions.stores.store import LastStep, SessionRecord, Snapshot, TokenHistory
from wane.service.types.common import Mode

WIDE = TokenHistory.start(7, 70_000).append((69_999, 3), 2, 300)
PLAIN = SessionRecord("s", "m", "1", Mode.AUTO, 0, TokenHistory.start(0, 300))


@pytest.mark.parametrize(
    "record",
    [
        PLAIN,
        PLAIN._replace(model="ünïcode", vocabulary="v" * 16, mode=Mode.WINDOW),
        PLAIN._replace(tail=WIDE, position=2**40, revision=2**64 - 1, last=LastStep(2**40, b"t" * 16, b"k" * 16)),
        PLAIN._replace(last=LastStep(0, b"7", None)),
    ],
)
def test_a_written_session_is_read_back(record: SessionRecord) -> None:
    data = codec.write(record)
    assert codec.read("s", data, 300) == record
    assert data.startswith(codec.REVISION.pack(record.revision))


def test_two_writers_of_the_same_change_write_different_heads() -> None:
    assert codec.head(PLAIN) != codec.head(PLAIN)


def test_only_the_latest_tokens_are_read() -> None:
    tail = TokenHistory.start(0, 300).append((5, 6, 7), 3, 300)
    record = PLAIN._replace(position=3, tail=tail)
    assert codec.read("s", codec.write(record), 3).tail == tail
    assert codec.read("s", codec.write(record), 2).tail.ids().tolist() == [6, 7]


def invalid_records() -> dict[str, bytes]:
    data = codec.write(PLAIN)
    whole = PLAIN._replace(position=3, tail=PLAIN.tail.append((5, 6, 7), 3, 300), last=LastStep(1, b"t", None))
    return {
        "nothing": b"",
        "a beginning": data[:10],
        "no tail": data[:-2],
        "half a token": data + b"\0",
        "a token too many": data + b"\0\0",
        "no identity": data.replace(b'["m"', b'("m"'),
        "another mode": data.replace(b"auto", b"none"),
        "another width": data.replace(b", 2, ", b", 3, "),
        "a position that scripts cannot count": codec.write(whole._replace(position=2**53 + 1)),
        "a position over int64": codec.write(whole._replace(position=2**63 + 5)),
        "fewer positions than tokens": codec.write(whole._replace(position=2, last=None)),
        "no position": codec.write(whole._replace(position=0, last=None)),
        "as many positions as tokens and <eos>": codec.write(whole._replace(position=4)),
        "a last step after the end": codec.write(whole._replace(last=LastStep(4, b"t", None))),
        "a last step before the start": codec.write(whole._replace(last=LastStep(-9, b"t", None))),
        "a token outside the vocabulary": codec.write(whole)[:-2] + (300).to_bytes(2, "little"),
    }


@pytest.mark.parametrize("name", invalid_records())
def test_invalid_bytes_are_unreadable(name: str) -> None:
    with pytest.raises(codec.Unreadable, match="'s'"):
        codec.read("s", invalid_records()[name], 300, vocabulary_sizes={"": 300})


IDENTITY = b'["m", "1", "auto", 2, ""]'
FORMAT_1 = struct.pack(">QIHBQQq17p17p", 2**32, 0, 59 + len(IDENTITY), 1, 3, 1, 0, b"\5", b"") + IDENTITY + b"\0\0\5\0"
"""A session as the earlier format had it: the length of the head stands where format 2 has its number."""


@pytest.mark.parametrize("data", [FORMAT_1, codec.write(PLAIN)[:12] + b"\3" + codec.write(PLAIN)[13:]])
def test_a_session_of_another_format_is_unreadable(data: bytes) -> None:
    with pytest.raises(codec.Unreadable, match="not written in format 2, which is the only one this version reads"):
        codec.read("s", data, 300)


def test_a_snapshot_round_trips() -> None:
    snapshot = Snapshot(2**40, 3, b"maker", b"\0\1\2")
    assert read_snapshot(write_snapshot(snapshot)) == snapshot
    assert read_snapshot(write_snapshot(snapshot)[:10]) is None


def test_a_deeply_nested_identity_is_unreadable() -> None:
    nested = b"[" * 60_000
    head = codec._HEAD.pack(codec.FORMAT, 0, len(nested), 2, 1, codec.NO_STEP, b"", b"")
    with pytest.raises(codec.Unreadable, match="cannot be read"):
        codec.read("owner/name", bytes(codec._HEAD_AT) + head + nested + bytes(2), 10)
