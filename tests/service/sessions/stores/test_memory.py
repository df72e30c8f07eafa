from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.service.engine_harness import Clock
from tests.service.sessions.stores.append import append, present
from wane.service.errors import Overloaded
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.packed import EXPIRED_AT_ONCE, entry_bytes
from wane.service.sessions.stores.store import LastStep, SessionRecord, TokenHistory, digest, follows, of_tokens
from wane.service.types.common import Mode


def make_store(session_history_tokens: int = 4, budget_bytes: int = 2**24) -> tuple[MemoryStore, Clock]:
    clock = Clock()
    return MemoryStore(session_history_tokens, 10, budget_bytes, clock), clock


def record(session: str = "s", model: str = "m") -> SessionRecord:
    return SessionRecord(session, model, "1", Mode.AUTO, 0, TokenHistory.start(0, 300))


async def step(store: MemoryStore, session: str, tokens: tuple[int, ...]) -> SessionRecord | None:
    """Appends tokens to the store's current record of the session."""
    return await append(store, await store.get(session) or record(session), tokens)


async def rewind(store: MemoryStore, session: str, position: int) -> SessionRecord | None:
    """Rewinds the store's current record of the session."""
    there = present(await store.get(session))
    return await store.rewind(session, there.revision, position)


async def test_an_append_changes_position_revision_history_and_last_step() -> None:
    store, _ = make_store()
    assert await store.create(record())
    before = await store.get("s")
    appended = await step(store, "s", (7, 8))
    assert before is not None
    assert appended is not None
    last = LastStep(0, of_tokens((7, 8)), None)
    assert (appended.position, appended.revision, appended.last) == (2, before.revision + 1, last)
    assert appended.tail.ids().tolist() == [0, 7, 8]
    assert await store.get("s") == appended


async def test_an_append_at_another_revision_has_no_effect() -> None:
    store, _ = make_store()
    await store.create(record())
    before = present(await store.get("s"))
    assert await append(store, before._replace(revision=before.revision + 1), (7,)) is None
    assert await step(store, "t", (7,)) is None
    assert await store.get("s") == before


async def test_an_append_with_the_revision_of_a_deleted_session_has_no_effect_on_its_successor() -> None:
    store, _ = make_store()
    await store.create(record())
    deleted = present(await store.get("s"))
    await store.delete("s")
    await store.create(record(model="other")._replace(position=2, tail=deleted.tail.append((7, 8), 2, 4)))
    created = await store.get("s")
    assert await append(store, deleted, (9,)) is None
    assert await store.get("s") == created
    await store.delete("s")
    assert store.sessions.used_bytes == 0


async def test_a_rewind_removes_tokens_and_the_last_step_and_changes_the_revision() -> None:
    store, _ = make_store()
    await store.create(record())
    created = await store.get("s")
    for token in range(10, 16):
        await step(store, "s", (token,))
    full = await store.get("s")
    assert created is not None and full is not None
    assert follows(full.revision, created.revision)
    assert not follows(created.revision, full.revision)
    assert (full.dropped_tokens, full.earliest) == (2, 3)
    assert await store.rewind("s", full.revision - 1, 4) is None
    rewound = present(await store.rewind("s", full.revision, 4))
    assert rewound.tail.ids().tolist() == [12, 13]
    assert (rewound.position, rewound.last, rewound.dropped_tokens) == (4, None, 2)
    assert not follows(rewound.revision, full.revision)


async def test_an_id_cannot_be_used_again_until_its_session_is_deleted() -> None:
    store, _ = make_store()
    assert await store.create(record())
    assert not await store.create(record())
    assert await store.delete("s")
    assert not await store.delete("s")
    assert await store.create(record())


async def test_a_session_idle_beyond_its_ttl_does_not_exist() -> None:
    store, clock = make_store()
    await store.create(record())
    clock.now_s += 10
    found = present(await store.get("s"))
    assert found.idle_s == 10
    clock.now_s += 0.001
    assert await store.get("s") is None
    assert await step(store, "s", (7,)) is None
    assert await store.count("m") == 0


async def test_touch_append_and_rewind_reset_the_idle_time_but_reads_do_not() -> None:
    store, clock = make_store()
    await store.create(record())
    changes: list[Callable[[], Awaitable[object]]] = [
        lambda: store.touch("s"),
        lambda: step(store, "s", (7,)),
        lambda: rewind(store, "s", 0),
    ]
    for change in changes:
        clock.now_s += 8
        assert (await store.get("s")) is not None
        await change()
        found = present(await store.get("s"))
        assert found.idle_s == 0


async def test_idle_sessions_expire_in_order_of_last_use() -> None:
    store, clock = make_store()
    for name in "abc":
        await store.create(record(name))
        clock.now_s += 1
    await store.touch("a")
    clock.now_s += 8.5
    assert [name for name in "abc" if await store.get(name)] == ["a", "c"]


async def test_sessions_are_counted_for_each_model() -> None:
    store, _ = make_store()
    for name, model in (("a", "m"), ("b", "m"), ("c", "n")):
        await store.create(record(name, model))
    await store.delete("a")
    assert [await store.count(model) for model in ("m", "n", "o")] == [1, 1, 0]


async def test_a_record_with_every_field_round_trips() -> None:
    store, clock = make_store(session_history_tokens=300)
    wide = SessionRecord("w", "n", "2", Mode.WINDOW, 2, TokenHistory.start(7, 70_000).append((69_999, 3), 2, 300))
    for whole in (record(), wide, record("x")._replace(position=2**40, vocabulary="v")):
        for last in (None, LastStep(0, b"7", None), LastStep(2**40, b"t" * 16, b"k" * 16)):
            kept = whole._replace(last=last)
            assert await store.create(kept)
            clock.now_s += 1.5
            found = present(await store.get(kept.session))
            assert found == kept._replace(idle_s=1.5, revision=found.revision)
            await store.delete(kept.session)


async def test_a_new_session_needs_memory_for_a_full_history_and_expired_sessions_free_memory() -> None:
    whole = entry_bytes("a", 5 * 2)
    store, clock = make_store(budget_bytes=2 * whole)
    await store.create(record("a"))
    await store.create(record("b"))
    assert store.sessions.used_bytes == 2 * entry_bytes("a", 2)
    with pytest.raises(Overloaded, match=f"a new session uses up to {whole}.*session_budget_bytes.* {2 * whole}"):
        await store.create(record("c"))
    clock.now_s += 11
    assert await store.create(record("c"))


async def test_memory_is_counted_through_every_change_and_freed() -> None:
    store, clock = make_store()
    names = [str(index) for index in range(200)]
    for name in names:
        await store.create(record(name))
        await step(store, name, (7, 8))
    assert store.sessions.used_bytes == sum(entry_bytes(name, 6) for name in names)
    for name in names:
        await step(store, name, (7, 8, 9))
    assert store.sessions.used_bytes == sum(entry_bytes(name, 8) for name in names)
    for name in names:
        await rewind(store, name, 3)
        await store.touch(name)
    assert store.sessions.used_bytes == sum(entry_bytes(name, 4) for name in names)
    for name in names[:100]:
        await store.delete(name)
    clock.now_s += 11
    assert await store.count("m") == 0
    assert store.sessions.used_bytes == 0


async def test_sessions_over_the_budget_evict_the_session_that_is_idle_longest() -> None:
    ended: list[str] = []
    small, whole = entry_bytes("a", 2), entry_bytes("a", 10)
    clock = Clock()
    store = MemoryStore(4, 10, 2 * small + whole, clock, ended.append)
    for name, model in (("a", "m"), ("b", "n"), ("c", "m")):
        clock.now_s += 1
        await store.create(record(name, model))
    await store.touch("a")  # now the session b has been idle longest
    await step(store, "c", (1, 2, 3, 4))
    assert ended == []
    await step(store, "a", (1,))
    assert ended == ["n"]
    assert [name for name in "abc" if await store.get(name)] == ["a", "c"]
    assert [await store.count(model) for model in "mn"] == [2, 0]
    assert store.sessions.used_bytes <= 2 * small + whole


async def test_one_call_removes_a_limited_number_of_expired_sessions() -> None:
    store, clock = make_store()
    names = [str(index) for index in range(2 * EXPIRED_AT_ONCE + 5)]
    for name in names:
        await store.create(record(name))
    clock.now_s += 11
    assert not any([await store.get(name) for name in names])
    assert await step(store, names[-1], (7,)) is None
    assert not await store.delete(names[0])
    assert [await store.count("m") for _ in range(3)] == [EXPIRED_AT_ONCE + 4, 4, 0]


async def test_the_store_returns_the_model_and_vocabulary_of_a_session_until_it_expires() -> None:
    store, clock = make_store()
    await store.create(record()._replace(vocabulary="v"))
    await store.create(record("t", "n")._replace(vocabulary="w"))
    await step(store, "s", (7,))
    assert [store.kind(session) for session in "stu"] == [("m", "v"), ("n", "w"), None]
    clock.now_s += 11
    assert store.kind("s") is None


async def test_the_id_of_an_expired_session_is_free() -> None:
    store, clock = make_store()
    await store.create(record())
    await step(store, "s", (7,))
    clock.now_s += 11
    assert await store.create(record())
    found = present(await store.get("s"))
    assert found == record()._replace(revision=found.revision)
    assert await store.count("m") == 1


@pytest.mark.parametrize(("data", "length"), [(b"", 0), (b"x" * 15, 15), (b"x" * 16, 16), (b"x" * 9000, 16)])
def test_a_digest_is_short_data_itself_or_16_bytes(data: bytes, length: int) -> None:
    assert len(digest(data)) == length
    assert (digest(data) == data) == (len(data) < 16)
    assert digest(data) != digest(data + b"x")
