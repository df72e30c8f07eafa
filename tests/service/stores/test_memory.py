from __future__ import annotations

import pytest

from service.engine.sessions import token_hash
from service.engine.types import Mode
from service.errors import Overloaded
from service.stores.memory import EXPIRED_AT_ONCE, MemoryStore
from service.stores.store import LastStep, Record
from service.stores.tail import Tail
from tests.service.engine.fakes import Clock

STEP = LastStep(0, b"hash", None)


def make_store(**changes: int) -> tuple[MemoryStore, Clock]:
    clock = Clock()
    return MemoryStore(**{"tail_tokens": 4, "ttl_s": 10, "max_sessions": 100, **changes}, clock=clock), clock


def record(session: str = "s", model: str = "m") -> Record:
    return Record(session, model, "1", Mode.AUTO, 0, Tail.start(0, 300))


async def test_an_append_moves_position_revision_and_tail_and_remembers_the_step() -> None:
    store, _ = make_store()
    assert await store.create(record())
    appended = await store.append("s", 0, (7, 8), STEP)
    assert appended is not None
    assert (appended.position, appended.revision, appended.last) == (2, 1, STEP)
    assert appended.tail.ids().tolist() == [0, 7, 8]
    assert await store.get("s") == appended


async def test_an_append_at_another_revision_does_nothing() -> None:
    store, _ = make_store()
    await store.create(record())
    before = await store.get("s")
    assert await store.append("s", 1, (7,), STEP) is None
    assert await store.append("t", 0, (7,), STEP) is None
    assert await store.get("s") == before


async def test_a_rewind_cuts_the_tail_forgets_the_step_and_counts_as_a_change() -> None:
    store, _ = make_store()
    await store.create(record())
    for revision in range(6):
        await store.append("s", revision, (10 + revision,), STEP)
    full = await store.get("s")
    assert full is not None
    assert (full.cut, full.earliest) == (2, 3)
    assert await store.rewind("s", 5, 4) is None
    rewound = await store.rewind("s", 6, 4)
    assert rewound is not None
    assert rewound.tail.ids().tolist() == [12, 13]
    assert (rewound.position, rewound.revision, rewound.last, rewound.cut) == (4, 7, None, 2)


async def test_a_whole_tail_has_lost_nothing_and_goes_back_to_0() -> None:
    store, _ = make_store()
    await store.create(record())
    await store.append("s", 0, (1, 2, 3, 4), STEP)
    whole = await store.get("s")
    assert whole is not None
    assert (whole.cut, whole.earliest) == (0, 0)


async def test_an_id_is_taken_until_it_is_deleted() -> None:
    store, _ = make_store()
    assert await store.create(record())
    assert not await store.create(record())
    assert await store.delete("s")
    assert not await store.delete("s")
    assert await store.create(record())


async def test_a_session_idle_for_longer_than_the_time_to_live_does_not_exist() -> None:
    store, clock = make_store()
    await store.create(record())
    clock.now_s += 10
    found = await store.get("s")
    assert found is not None
    assert found.idle_s == 10
    clock.now_s += 0.001
    assert await store.get("s") is None
    assert await store.append("s", 0, (7,), STEP) is None
    assert await store.count("m") == 0


async def test_touching_appending_and_rewinding_start_the_idle_time_again_and_reading_does_not() -> None:
    store, clock = make_store()
    await store.create(record())
    for change in (
        lambda: store.touch("s"),
        lambda: store.append("s", 0, (7,), STEP),
        lambda: store.rewind("s", 1, 0),
    ):
        clock.now_s += 8
        assert (await store.get("s")) is not None
        await change()
        found = await store.get("s")
        assert found is not None
        assert found.idle_s == 0


async def test_the_idle_expire_in_order_though_they_were_used_in_another() -> None:
    store, clock = make_store()
    for name in "abc":
        await store.create(record(name))
        clock.now_s += 1
    await store.touch("a")
    clock.now_s += 8.5
    assert [name for name in "abc" if await store.get(name)] == ["a", "c"]


async def test_sessions_are_counted_by_model() -> None:
    store, _ = make_store()
    for name, model in (("a", "m"), ("b", "m"), ("c", "n")):
        await store.create(record(name, model))
    await store.delete("a")
    assert [await store.count(model) for model in ("m", "n", "o")] == [1, 1, 0]


async def test_there_is_a_most_of_sessions_and_the_expired_make_room() -> None:
    store, clock = make_store(max_sessions=2)
    await store.create(record("a"))
    await store.create(record("b"))
    with pytest.raises(Overloaded, match="2 sessions"):
        await store.create(record("c"))
    clock.now_s += 11
    assert await store.create(record("c"))


async def test_one_call_forgets_only_so_many_and_the_others_are_over_all_the_same() -> None:
    store, clock = make_store(max_sessions=2 * EXPIRED_AT_ONCE + 5)
    names = [str(index) for index in range(2 * EXPIRED_AT_ONCE + 5)]
    for name in names:
        await store.create(record(name))
    clock.now_s += 11
    assert await store.count("m") == EXPIRED_AT_ONCE + 5
    assert await store.get(names[-1]) is None
    assert await store.count("m") == 0

    for name in names:
        await store.create(record(name))
    clock.now_s += 11
    last = names[-1]
    assert await store.append(last, 0, (7,), STEP) is None
    assert await store.create(record(last))
    assert not await store.delete(names[-2])
    assert await store.delete(last)
    assert await store.count("m") == 0


def test_a_steps_tokens_are_remembered_by_32_bytes_however_many_they_are() -> None:
    assert {len(token_hash((7,) * count)) for count in (1, 1000)} == {32}
    assert token_hash((7,)) != token_hash((8,))
