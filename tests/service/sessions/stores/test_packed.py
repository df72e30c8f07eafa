"""Tests of packed sessions in memory."""

from __future__ import annotations

from tests.service.engine_harness import Clock
from wane.service.sessions.stores.packed import PackedSessions, entry_bytes
from wane.service.sessions.stores.store import SessionRecord, TokenHistory
from wane.service.types.common import Mode

ONE = entry_bytes("a", 2)


def record(session: str, model: str = "m") -> SessionRecord:
    return SessionRecord(session, model, "1", Mode.AUTO, 0, TokenHistory.start(0, 300), revision=2**63)


def make(budget_bytes: int = 2**20) -> tuple[PackedSessions, Clock]:
    clock = Clock()
    return PackedSessions(10.0, budget_bytes, clock), clock


def test_a_packed_session_is_returned_unchanged() -> None:
    remembered, _ = make()
    remembered.put(record("a"))
    assert remembered.get("a") == record("a")
    remembered.put(record("a")._replace(position=7))
    assert remembered.get("a") == record("a")._replace(position=7)
    remembered.forget("a")
    remembered.forget("a")
    assert remembered.get("a") is None


def test_the_least_recently_used_session_is_evicted_first() -> None:
    remembered, clock = make(2 * ONE)
    for name in "abac":
        clock.now_s += 1
        remembered.put(record(name))
    assert [*remembered.squeeze()] == ["m"]
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


def test_a_session_that_was_created_again_with_another_model_counts_for_that_model() -> None:
    remembered, _ = make()
    remembered.put(record("a"))
    remembered.put(record("a", "n"))
    assert [remembered.count(model) for model in "mn"] == [0, 1]
    remembered.forget("a")
    assert [remembered.count(model) for model in "mn"] == [0, 0]
