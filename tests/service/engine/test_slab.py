from __future__ import annotations

import numpy as np
import pytest

from models.manifest import StateTensor
from service.engine.slab import RESERVED, ZERO, Resident, Slab
from service.errors import Overloaded

STATE = (StateTensor(name="a", shape=(2,)), StateTensor(name="b", shape=(3, 1)))
SLOT_BYTES = 4 * (2 + 3 + 4)


def make_slab(slots: int = 8) -> Slab:
    return Slab(STATE, 4, slots * SLOT_BYTES)


def resident(slot: int, touched_s: float = 0.0) -> Resident:
    return Resident(slot, revision=1, cut=0, touched_s=touched_s)


def fill(slab: Slab, slot: int, value: float) -> None:
    slab.scatter(
        [slot],
        {
            "next.a": np.full((1, 2), value, np.float32),
            "next.b": np.full((1, 3, 1), value, np.float32),
            "hidden": np.full((1, 4), value, np.float32),
        },
    )


def test_the_budget_sets_the_number_of_slots() -> None:
    slab = Slab(STATE, 4, 10 * SLOT_BYTES + SLOT_BYTES - 1)
    assert (slab.slot_bytes, slab.capacity) == (SLOT_BYTES, 10)


def test_a_budget_for_too_few_states_is_refused_with_the_bytes_it_takes() -> None:
    with pytest.raises(ValueError, match=f"state_budget_bytes is {SLOT_BYTES}.* need {8 * SLOT_BYTES}"):
        Slab(STATE, 4, SLOT_BYTES)


def test_what_is_scattered_is_gathered_again_row_by_row() -> None:
    slab = make_slab()
    first, second = slab.acquire(), slab.acquire()
    slab.scatter(
        [second, None, first],
        {
            "next.a": np.array([[1, 2], [3, 4], [5, 6]], np.float32),
            "next.b": np.arange(9, dtype=np.float32).reshape(3, 3, 1),
            "hidden": np.arange(12, dtype=np.float32).reshape(3, 4),
        },
    )
    values = slab.gather([first, ZERO, second])
    assert values["a"].tolist() == [[5, 6], [0, 0], [1, 2]]
    assert values["b"][:, :, 0].tolist() == [[6, 7, 8], [0, 0, 0], [0, 1, 2]]
    assert slab.gather_hidden([second, first]).tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    slab.check_integrity()


def test_a_lease_ends_with_its_block_unless_somebody_retains_the_slot() -> None:
    slab = make_slab()
    with slab.lease() as slot:
        slab.put("s", resident(slot))
    assert slab.find("s", 1.0) is not None
    assert slab.used_bytes == SLOT_BYTES
    slab.drop("s")
    assert slab.used_bytes == 0
    slab.check_integrity()


def test_a_new_state_of_a_session_takes_the_place_of_the_old_one() -> None:
    slab = make_slab()
    for _ in range(100):
        with slab.lease() as slot:
            slab.put("s", resident(slot))
    assert len(slab) == 1
    assert slab.used_bytes == SLOT_BYTES
    slab.check_integrity()


def test_the_least_recently_used_session_is_evicted_first() -> None:
    evicted: list[None] = []
    slab = Slab(STATE, 4, 8 * SLOT_BYTES, lambda: evicted.append(None))
    for name in "abcdef":
        with slab.lease() as slot:
            slab.put(name, resident(slot))
    assert slab.find("a", 1.0) is not None  # used: now b is the oldest
    assert slab.peek("b") is not None  # looked at: still the oldest
    with slab.lease():
        assert slab.peek("b") is None
        assert slab.peek("a") is not None
    assert len(evicted) == 1
    slab.check_integrity()


def test_a_state_in_use_is_never_evicted_and_a_full_slab_refuses() -> None:
    slab = make_slab()
    slots = [slab.acquire() for _ in range(slab.capacity - RESERVED - 1)]
    with slab.lease() as slot:
        slab.put("s", resident(slot))
    with slab.hold(slot), pytest.raises(Overloaded, match="all 8 states are in use"):
        slab.acquire()
    assert slab.peek("s") is not None
    slots.append(slab.acquire())
    assert slab.peek("s") is None
    for slot in slots:
        slab.release(slot)
    slab.check_integrity()


def test_states_of_sessions_long_idle_are_dropped() -> None:
    slab = make_slab()
    for name, touched_s in (("old", 1.0), ("new", 5.0)):
        with slab.lease() as slot:
            slab.put(name, resident(slot, touched_s))
    slab.drop_idle(since_s=2.0)
    assert slab.peek("old") is None
    assert slab.peek("new") is not None


def test_a_state_that_is_used_is_not_idle() -> None:
    slab = make_slab()
    for name in ("a", "b"):
        with slab.lease() as slot:
            slab.put(name, resident(slot, touched_s=1.0))
    slab.find("a", now_s=5.0)
    slab.drop_idle(since_s=2.0)
    assert slab.peek("a") is not None
    assert slab.peek("b") is None


def test_the_integrity_check_finds_a_lost_slot_a_shared_one_and_a_spoilt_zero() -> None:
    slab = make_slab()
    slot = slab.acquire()
    slab.check_integrity()
    del slab._users[slot]
    with pytest.raises(AssertionError, match="lost"):
        slab.check_integrity()

    slab = make_slab()
    with slab.lease() as slot:
        slab.put("a", resident(slot))
        slab.put("b", resident(slot))
        with pytest.raises(AssertionError, match="share"):
            slab.check_integrity()

    slab = make_slab()
    with pytest.raises(AssertionError, match="zero state"):
        fill(slab, ZERO, 1.0)
    slab._arrays["a"][ZERO] = 1.0
    with pytest.raises(AssertionError, match="zero state"):
        slab.check_integrity()
