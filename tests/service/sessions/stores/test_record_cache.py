"""Tests of the cache of recently used session records."""

from __future__ import annotations

from tests.service.engine_harness import Clock
from wane.service.sessions.record import TokenHistory
from wane.service.sessions.stores.memory import entry_bytes
from wane.service.sessions.stores.record_cache import SNAPSHOTS, RecordCache
from wane.service.sessions.stores.store import SessionRecord, Snapshot
from wane.service.types import Mode

ONE = entry_bytes("a", 2)


def record(session: str, model: str = "m") -> SessionRecord:
    return SessionRecord(session, model, "1", Mode.AUTO, 0, TokenHistory.start(0, 300), revision=2**63, durable=True)


def make(budget_bytes: int = 2**20) -> tuple[RecordCache, Clock]:
    clock = Clock()
    return RecordCache(budget_bytes, 10.0, clock), clock


def test_a_cached_session_is_returned_unchanged() -> None:
    remembered, _ = make()
    remembered.put(record("a"))
    assert remembered.get("a") == record("a")
    remembered.put(record("a")._replace(position=7))
    assert remembered.get("a") == record("a")._replace(position=7)
    remembered.forget("a")
    remembered.forget("a")
    assert remembered.get("a") is None


def test_the_least_recently_used_session_is_evicted_first() -> None:
    remembered, _ = make(2 * ONE)
    for name in "aba":
        remembered.put(record(name))
    remembered.put(record("c"))
    assert [name for name in "abc" if remembered.get(name)] == ["a", "c"]
    assert remembered.count("m") == 2


def test_an_expired_session_is_neither_returned_nor_counted() -> None:
    remembered, clock = make()
    remembered.put(record("a"))
    remembered.put(record("b", "n"))
    clock.now_s += 6
    remembered.put(record("c"))
    clock.now_s += 5
    assert [name for name in "abc" if remembered.get(name)] == ["c"]
    assert [remembered.count(model) for model in "mn"] == [1, 0]


def test_a_limited_number_of_snapshots_is_cached_until_the_session_changes() -> None:
    remembered, _ = make()
    snapshot = Snapshot(0, 0, b"maker", b"state")
    remembered.put(record("a")._replace(snapshot=snapshot))
    found = remembered.get("a")
    assert found is not None
    assert found.snapshot == snapshot
    remembered.put(record("a"))
    assert remembered.get("a") == record("a")
    for index in range(SNAPSHOTS + 1):
        remembered.put(record(str(index))._replace(snapshot=snapshot))
    kept = [remembered.get(str(index)) for index in range(SNAPSHOTS + 1)]
    assert [one.snapshot is None for one in kept if one] == [True] + [False] * SNAPSHOTS


def test_the_cache_measures_whether_most_of_its_sessions_are_out_of_date() -> None:
    remembered, _ = make()
    assert not remembered.mostly_moved
    for _ in range(20):
        remembered.saw(moved=True)
    assert remembered.mostly_moved
    for _ in range(20):
        remembered.saw(moved=False)
    assert not remembered.mostly_moved
