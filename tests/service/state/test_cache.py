from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.service.state.test_pool import SLOT_BYTES, STATE
from wane.service.errors import Overloaded
from wane.service.state.pool import RESERVED, CachedState, StatePool


def make_residents(slots: int = 8) -> StatePool:
    return StatePool(STATE, 4, slots * SLOT_BYTES)


def keep(state_cache: StatePool, session: str, touched_s: float = 0.0, value: float = 0.0) -> int:
    """Stores a resident state for the session. Every unit has the value `value`. Returns the state's slot."""
    with state_cache.lease() as slot:
        outputs = {"next.a": np.full((1, 2), value), "next.b": np.full((1, 3, 1), value), "hidden": np.zeros((1, 4))}
        state_cache.scatter([slot], outputs)
        state_cache.put(session, CachedState(slot, revision=1, dropped_tokens=0, position=1), touched_s)
    return slot


def test_a_resident_state_keeps_its_revision_and_position() -> None:
    state_cache = make_residents()
    with state_cache.lease() as slot:
        state_cache.put("s", CachedState(slot, revision=2**40, dropped_tokens=7, position=2**41), 1.0)
    assert state_cache.peek("s") == state_cache.find("s", 2.0) == CachedState(slot, 2**40, 7, 2**41)
    assert state_cache.used_bytes == SLOT_BYTES
    state_cache.drop("s")
    assert state_cache.peek("s") is None
    assert state_cache.used_bytes == 0
    state_cache.check_integrity(idle=True)


def test_a_sessions_new_state_replaces_the_old_state() -> None:
    state_cache = make_residents()
    for _ in range(100):
        keep(state_cache, "s")
    assert len(state_cache) == 1
    assert state_cache.used_bytes == SLOT_BYTES
    state_cache.check_integrity(idle=True)


def test_the_least_recently_used_session_is_evicted_first() -> None:
    evicted: list[None] = []
    state_cache = StatePool(STATE, 4, 8 * SLOT_BYTES, on_evict=lambda: evicted.append(None))
    for name in "abcdef":
        keep(state_cache, name)
    assert state_cache.find("a", 1.0) is not None  # `find` counts as a use of a, so b is now the least recently used
    assert state_cache.peek("b") is not None  # `peek` does not count as a use, so b is still the least recently used
    with state_cache.lease():
        assert state_cache.peek("b") is None
        assert state_cache.peek("a") is not None
    assert len(evicted) == 1
    state_cache.check_integrity(idle=True)


def test_a_state_in_use_is_never_evicted_and_a_full_pool_refuses() -> None:
    state_cache = make_residents()
    slots = [state_cache.acquire() for _ in range(state_cache.capacity - RESERVED - 1)]
    slot = keep(state_cache, "s")
    with state_cache.hold(slot), pytest.raises(Overloaded, match="all 8 states are in use"):
        state_cache.acquire()
    assert state_cache.peek("s") is not None
    slots.append(state_cache.acquire())
    assert state_cache.peek("s") is None
    for slot in slots:
        state_cache.release(slot)
    state_cache.check_integrity(idle=True)


def test_idle_states_are_dropped() -> None:
    state_cache = make_residents()
    keep(state_cache, "old", 1.0)
    keep(state_cache, "new", 2.0)
    state_cache.drop_idle(since_s=2.0)
    assert state_cache.peek("old") is None
    assert state_cache.peek("new") is not None


def test_using_a_state_resets_its_idle_time() -> None:
    state_cache = make_residents()
    for name in "ab":
        keep(state_cache, name, 1.0)
    state_cache.find("a", now_s=5.0)
    state_cache.drop_idle(since_s=2.0)
    assert state_cache.peek("a") is not None
    assert state_cache.peek("b") is None


SPOILT: dict[str, Callable[[StatePool], object]] = {
    "4 slots are in use for 3 sessions, but no request is in flight": lambda state_cache: state_cache.order.pop("b"),
    "a slot has the states of two sessions": lambda state_cache: state_cache.order.__setitem__("b", 2),
    "a slot with a state is free": lambda state_cache: state_cache.users.__setitem__(3, 0),
    "not the least recently used": lambda state_cache: state_cache.order.move_to_end("a"),
    "a slot is neither in use nor free": lambda state_cache: state_cache.free.pop(),
    "a slot has two users": lambda state_cache: state_cache.retain(3),
    "5 slots are in use for 4 sessions, but no request is in flight": lambda state_cache: state_cache.acquire(),
}


@pytest.mark.parametrize("text", SPOILT)
def test_an_inconsistent_cache_is_found(text: str) -> None:
    state_cache = make_residents()
    for index, name in enumerate("abcd"):
        keep(state_cache, name, float(index))
    state_cache.release(state_cache.acquire())
    state_cache.check_integrity(idle=True)
    SPOILT[text](state_cache)
    with pytest.raises(AssertionError, match=text):
        state_cache.check_integrity(idle=True)


def test_a_request_in_flight_may_use_a_slot_without_a_session_and_share_a_slot() -> None:
    state_cache = make_residents()
    state_cache.acquire()
    state_cache.retain(keep(state_cache, "s"))
    state_cache.check_integrity()
    with pytest.raises(AssertionError, match="no request is in flight"):
        state_cache.check_integrity(idle=True)
