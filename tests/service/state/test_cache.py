from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.service.state.test_pool import SLOT_BYTES, STATE
from wane.service.errors import Overloaded
from wane.service.state.cache import CachedState, Fault, StateCache
from wane.service.state.pool import RESERVED


def make_residents(slots: int = 8) -> StateCache:
    return StateCache(STATE, 4, slots * SLOT_BYTES)


def keep(residents: StateCache, session: str, touched_s: float = 0.0, value: float = 0.0) -> int:
    """A state of the session, of so much everywhere; its slot."""
    with residents.lease() as slot:
        outputs = {"next.a": np.full((1, 2), value), "next.b": np.full((1, 3, 1), value), "hidden": np.zeros((1, 4))}
        residents.scatter([slot], outputs)
        residents.put(session, CachedState(slot, revision=1, cut=0, position=1), touched_s)
    return slot


def test_what_is_known_of_a_resident_comes_back_with_its_state() -> None:
    residents = make_residents()
    with residents.lease() as slot:
        residents.put("s", CachedState(slot, revision=2**40, cut=7, position=2**41), 1.0)
    assert residents.peek("s") == residents.find("s", 2.0) == CachedState(slot, 2**40, 7, 2**41)
    assert residents.used_bytes == SLOT_BYTES
    residents.drop("s")
    assert residents.peek("s") is None
    assert residents.used_bytes == 0
    residents.check_integrity(idle=True)


def test_a_new_state_of_a_session_takes_the_place_of_the_old_one() -> None:
    residents = make_residents()
    for _ in range(100):
        keep(residents, "s")
    assert len(residents) == 1
    assert residents.used_bytes == SLOT_BYTES
    residents.check_integrity(idle=True)


def test_the_least_recently_used_session_is_evicted_first() -> None:
    evicted: list[None] = []
    residents = StateCache(STATE, 4, 8 * SLOT_BYTES, lambda: evicted.append(None))
    for name in "abcdef":
        keep(residents, name)
    assert residents.find("a", 1.0) is not None  # used: now b is the oldest
    assert residents.peek("b") is not None  # looked at: still the oldest
    with residents.lease():
        assert residents.peek("b") is None
        assert residents.peek("a") is not None
    assert len(evicted) == 1
    residents.check_integrity(idle=True)


def test_a_state_in_use_is_never_evicted_and_a_full_slab_refuses() -> None:
    residents = make_residents()
    slots = [residents.acquire() for _ in range(residents.capacity - RESERVED - 1)]
    slot = keep(residents, "s")
    with residents.hold(slot), pytest.raises(Overloaded, match="all 8 states are in use"):
        residents.acquire()
    assert residents.peek("s") is not None
    slots.append(residents.acquire())
    assert residents.peek("s") is None
    for slot in slots:
        residents.release(slot)
    residents.check_integrity(idle=True)


def test_states_of_sessions_long_idle_are_dropped() -> None:
    residents = make_residents()
    keep(residents, "old", 1.0)
    keep(residents, "new", 5.0)
    residents.drop_idle(since_s=2.0)
    assert residents.peek("old") is None
    assert residents.peek("new") is not None


def test_a_state_that_is_used_is_not_idle() -> None:
    residents = make_residents()
    for name in "ab":
        keep(residents, name, 1.0)
    residents.find("a", now_s=5.0)
    residents.drop_idle(since_s=2.0)
    assert residents.peek("a") is not None
    assert residents.peek("b") is None


SPOILT: dict[str, Callable[[StateCache], object]] = {
    "4 slots are those of 3 sessions": lambda residents: residents._order.pop("b"),
    "a slot is that of a session which has another": lambda residents: residents._order.__setitem__("b", 2),
    "a slot with a state is free": lambda residents: residents._users.__setitem__(3, 0),
    "not the least recently used": lambda residents: residents._order.move_to_end("a"),
    "a slot is lost": lambda residents: residents._free.pop(),
    "5 slots are in use for 4 sessions, and by no request": lambda residents: residents.acquire(),
}


@pytest.mark.parametrize("what", SPOILT)
def test_every_fault_of_the_bookkeeping_is_found_and_mending_it_costs_all_states(what: str) -> None:
    residents = make_residents()
    for index, name in enumerate("abcd"):
        keep(residents, name, float(index))
    residents.release(residents.acquire())
    residents.check_integrity(idle=True)
    SPOILT[what](residents)
    faults = residents.faults(idle=True)
    assert any(what in fault.text for fault in faults)
    residents.mend(faults, idle=True)
    assert (len(residents), residents.used_bytes) == (0, 0)
    residents.check_integrity(idle=True)
    assert sorted(residents.acquire() for _ in range(6)) == [2, 3, 4, 5, 6, 7]


def test_mending_leaves_slots_to_the_requests_that_use_them() -> None:
    residents = make_residents()
    mine = residents.acquire()
    kept = keep(residents, "s")
    residents.retain(kept)  # by a request, which reads it
    residents.mend([Fault("the bookkeeping is wrong")])
    assert len(residents) == 0
    assert residents.used_bytes == 2 * SLOT_BYTES
    residents.release(mine)
    residents.release(kept)
    residents.check_integrity(idle=True)


def test_a_resident_state_that_was_written_to_is_forgotten_and_the_others_stay() -> None:
    residents = make_residents()
    keep(residents, "a")
    slot = keep(residents, "b", 1.0)
    residents.scatter([slot], {"next.a": np.ones((1, 2)), "next.b": np.ones((1, 3, 1)), "hidden": np.ones((1, 4))})
    faults = residents.faults()
    assert faults == [Fault("a resident state was written to", "b")]
    residents.mend(faults)
    assert residents.peek("b") is None
    assert residents.peek("a") is not None
    residents.check_integrity(idle=True)


def test_a_resident_state_that_changed_by_itself_is_found_once_it_has_been_looked_at() -> None:
    residents = make_residents()
    keep(residents, "a", value=1.0)
    slot = keep(residents, "b", value=2.0)
    residents.check_integrity()
    residents._arrays["b"][slot, 1, 0] = 2.5
    faults = residents.faults()
    assert faults == [Fault("a resident state has changed by itself", "b")]
    residents.mend(faults)
    keep(residents, "b", value=3.0)
    residents.check_integrity(idle=True)


def test_only_the_states_asked_for_are_looked_at() -> None:
    residents = make_residents()
    first, second = keep(residents, "a"), keep(residents, "b")
    residents.check_integrity()
    residents._arrays["a"][second, 0] = 9.0
    assert residents.faults(range(first, second)) == []
    assert [fault.session for fault in residents.faults(range(second, second + 1))] == ["b"]
