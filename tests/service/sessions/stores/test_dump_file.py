"""Tests of the file in which a process saves its sessions for the next process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.service.engine_harness import Clock
from tests.service.sessions.stores.append import append, present
from wane.service.sessions.stores import dump_file
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.packed import entry_bytes
from wane.service.sessions.stores.store import LastStep, SessionRecord, StoreError, TokenHistory
from wane.service.types.common import Mode

STEP = LastStep(1, b"t" * 16, b"key")


def names(folder: Path) -> list[str]:
    """Returns the names of the files in the folder."""
    return sorted(one.name for one in folder.iterdir())


def records() -> list[SessionRecord]:
    short = SessionRecord("a", "m", "1", Mode.AUTO, 0, TokenHistory.start(0, 300), vocabulary="v", idle_s=1.5)
    wide = SessionRecord(
        "b~:.-", "n", "2", Mode.WINDOW, 2, TokenHistory.start(7, 70_000).append((69_999, 3), 2, 9), 2**40, STEP, 9.0
    )
    return [short, wide]


def make_store(file: Path, **changes: Any) -> tuple[MemoryStore, Clock]:
    clock = Clock()
    return MemoryStore(
        **{"session_history_tokens": 4, "ttl_s": 100, "budget_bytes": 2**20, "file": file, **changes}, clock=clock
    ), clock


def test_saved_sessions_are_loaded_unchanged_in_order_of_last_use(tmp_path: Path) -> None:
    path = tmp_path / "sessions"
    dump_file.save(path, records(), lambda: 1000.0)
    assert dump_file.load(path, 9, lambda: 1000.0) == records()[::-1]
    assert [one.idle_s for one in dump_file.load(path, 9, lambda: 1007.0)] == [16.0, 8.5]
    # Here the wall clock was set back between the write and the load of the file.
    assert [one.idle_s for one in dump_file.load(path, 9, lambda: 7.0)] == [9.0, 1.5]
    # The limit of 2 tokens does not count <eos>. A history drops <eos> only together with the first token after <eos>.
    assert [len(one.tail) for one in dump_file.load(path, 2)] == [3, 1]
    assert names(tmp_path) == ["sessions"]


async def test_a_session_created_from_a_history_continues_in_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "sessions"
    begun = SessionRecord("s", "m", "1", Mode.AUTO, 9, TokenHistory.start(0, 300).ending((5, 6), 9, 4), vocabulary="v")
    store, _ = make_store(path)
    await store.open()
    assert await store.create(begun)
    await store.close()
    store, _ = make_store(path)
    await store.open()
    found = present(store.get_cached("s"))
    assert (found.position, found.tail.ids().tolist(), found.dropped_tokens, found.earliest) == (9, [5, 6], 7, 8)


def test_a_file_without_sessions_is_valid(tmp_path: Path) -> None:
    dump_file.save(tmp_path / "sessions", [])
    assert dump_file.load(tmp_path / "sessions", 9) == []


def broken(data: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "something else": b"PK\x03\x04" + data,
        "cut": data[:-1],
        "half": data[: len(data) // 2],
        "longer": data + b"\0",
        "a bit turned": data[:60] + bytes([data[60] ^ 1]) + data[61:],
        "a later format": data.replace(b"sessions 2", b"sessions 3"),
    }


@pytest.mark.parametrize("name", broken(b"x" * 100))
async def test_a_damaged_file_is_rejected_and_left_unchanged(tmp_path: Path, name: str) -> None:
    path = tmp_path / "sessions"
    dump_file.save(path, records())
    data = broken(path.read_bytes())[name]
    path.write_bytes(data)
    store, _ = make_store(path)
    with pytest.raises(StoreError, match=rf"^session_file {path} .*move it away"):
        await store.open()
    await store.close()
    assert path.read_bytes() == data


def test_a_failed_write_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sessions"
    dump_file.save(path, records())
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        dump_file.save(path, [])
    assert path.read_bytes() == before
    assert names(tmp_path) == ["sessions"]


async def test_a_store_opens_with_the_sessions_of_a_closed_store(tmp_path: Path) -> None:
    path = tmp_path / "sessions"
    store, clock = make_store(path)
    await store.open()  # there is no file yet
    for one in records():
        await store.create(one._replace(idle_s=0.0))
    begun = present(await store.get("a"))
    appended = await append(store, begun, (5, 6))
    clock.now_s += 60
    await store.touch("a")
    clock.now_s += 41  # the session b~:.- has expired
    await store.close()
    after, _ = make_store(path)
    await after.open()
    found = present(await after.get("a"))
    assert found.idle_s == pytest.approx(41, abs=40)
    assert found._replace(idle_s=0.0) == appended
    assert await after.get("b~:.-") is None
    assert (await after.count("m"), await after.count("n")) == (1, 0)
    assert after.sessions.used_bytes == entry_bytes("a", len(found.tail.data))
    # The file is renamed, because its sessions now continue in this process.
    assert names(tmp_path) == ["sessions.read"]
    assert await append(after, found, (7,))


async def test_a_store_that_is_closed_while_opening_leaves_the_file_to_the_next_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sessions"
    dump_file.save(path, records())
    store, _ = make_store(path)
    load, reading, go_on = dump_file.load, threading.Event(), threading.Event()

    def slow(path: Path, keep: int) -> list[SessionRecord]:
        reading.set()
        go_on.wait()
        return load(path, keep)

    monkeypatch.setattr(dump_file, "load", slow)
    opening = asyncio.create_task(store.open())
    await asyncio.to_thread(reading.wait)
    await store.close()
    go_on.set()
    await opening
    assert names(tmp_path) == ["sessions"]
    assert await store.count("m") == 0


async def test_a_store_with_a_smaller_budget_keeps_the_latest_sessions(tmp_path: Path) -> None:
    path = tmp_path / "sessions"
    dump_file.save(path, records())
    store, _ = make_store(path, budget_bytes=entry_bytes("a", 2))
    await store.open()
    assert await store.get("a") is not None
    assert await store.get("b~:.-") is None


def test_a_file_of_an_earlier_format_is_named_as_such_and_not_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "sessions"
    content = b"wane sessions 1\n" + struct.pack(">dQ", 1000.0, 0)
    path.write_bytes(content + hashlib.sha256(content).digest())  # the first format has its digest at the end
    with pytest.raises(StoreError, match="was written by an earlier version of Wane; the file was left unchanged"):
        dump_file.load(path, 9)
