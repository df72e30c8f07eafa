from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.service.engine_harness import host_arrays
from wane.models.architecture import StateTensor
from wane.service.errors import Overloaded
from wane.service.state.pool import RESERVED, START, ZERO, StatePool

STATE = (StateTensor(name="a", shape=(2,)), StateTensor(name="b", shape=(3, 1)))
SLOT_BYTES = 4 * (2 + 3 + 4)


def make_slab(slots: int = 8) -> StatePool:
    return StatePool(STATE, 4, slots * SLOT_BYTES)


def test_the_budget_sets_the_number_of_slots() -> None:
    pool = StatePool(STATE, 4, 10 * SLOT_BYTES + SLOT_BYTES - 1)
    assert (pool.slot_bytes, pool.capacity) == (SLOT_BYTES, 10)
    assert StatePool(STATE, 4, 10 * SLOT_BYTES, beside_bytes=SLOT_BYTES // 4).capacity == 8


def test_a_budget_for_too_few_states_is_refused_with_the_needed_bytes() -> None:
    budget = 8 * SLOT_BYTES - 1
    with pytest.raises(ValueError, match=f"state_budget_bytes is {budget}.* need {8 * SLOT_BYTES}"):
        StatePool(STATE, 4, budget)


def test_gather_returns_the_rows_that_scatter_wrote() -> None:
    pool = make_slab()
    first, second = pool.acquire(), pool.acquire()
    pool.scatter(
        [second, None, first],
        {
            "next.a": np.array([[1, 2], [3, 4], [5, 6]], np.float32),
            "next.b": np.arange(9, dtype=np.float32).reshape(3, 3, 1),
            "hidden": np.arange(12, dtype=np.float32).reshape(3, 4),
        },
    )
    values = pool.memory.gather([first, ZERO, second])
    assert values["a"].tolist() == [[5, 6], [0, 0], [1, 2]]
    assert values["b"][:, :, 0].tolist() == [[6, 7, 8], [0, 0, 0], [0, 1, 2]]
    assert pool.memory.read([second, first])["hidden"].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    pool.check_integrity()


def test_a_packed_state_is_unpacked_in_another_pool() -> None:
    pool, other = make_slab(), make_slab()
    outputs = {
        "next.a": np.array([[1, 2]], np.float32),
        "next.b": np.arange(3, dtype=np.float32).reshape(1, 3, 1),
        "hidden": np.arange(4, dtype=np.float32).reshape(1, 4),
    }
    here, there = pool.acquire(), other.acquire()
    pool.scatter([here], outputs)
    packed = pool.pack(here)
    assert len(packed) == SLOT_BYTES
    other.unpack(there, packed)
    assert other.pack(there) == pool.pack(here)
    assert all((other.memory.gather([there])[name] == outputs[f"next.{name}"]).all() for name in "ab")
    assert (other.memory.read([there])["hidden"] == outputs["hidden"]).all()


def test_unpacking_a_state_of_another_size_fails() -> None:
    pool = make_slab()
    with pytest.raises(AssertionError, match="the size of another model's states"):
        pool.unpack(pool.acquire(), b"\0" * 4)


def test_a_slot_is_released_after_the_block_of_its_lease_unless_it_is_retained() -> None:
    pool = make_slab()
    with pool.lease() as slot:
        pool.retain(slot)
    assert pool.used_bytes == SLOT_BYTES
    with pool.hold(slot):
        pool.release(slot)
        assert pool.used_bytes == SLOT_BYTES
    assert pool.used_bytes == 0
    pool.check_integrity()


def test_a_released_slot_is_reused_and_a_full_pool_refuses() -> None:
    pool = make_slab()
    slots = [pool.acquire() for _ in range(pool.capacity - RESERVED)]
    with pytest.raises(Overloaded, match="all 8 states are in use"):
        pool.acquire()
    pool.release(slots[3])
    assert pool.acquire() == slots[3]
    pool.check_integrity()


def test_the_reserved_slots_are_not_counted() -> None:
    pool = make_slab()
    for _ in range(3):
        pool.release(ZERO)
    assert pool.used_bytes == 0
    pool.check_integrity()


def test_release_all_equals_single_releases() -> None:
    pool = make_slab()
    one, other = pool.acquire(), pool.acquire()
    pool.retain(one)
    pool.release_all([one, ZERO, START, other])
    assert pool.used == 1
    pool.release_all([one])
    assert pool.used == 0
    pool.check_integrity()
    with pytest.raises(AssertionError, match="once too often"):
        pool.release_all([one])


def test_a_free_slot_cannot_be_retained_or_released() -> None:
    pool = make_slab()
    slot = pool.acquire()
    pool.release(slot)
    with pytest.raises(AssertionError, match="retained"):
        pool.retain(slot)
    with pytest.raises(AssertionError, match="once too often"):
        pool.release(slot)


def test_the_zero_state_cannot_be_written_to() -> None:
    pool = make_slab()
    with pytest.raises(AssertionError, match="zero state"):
        pool.scatter([ZERO], {})


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda pool: pool.free.append(5), "freed twice"),
        (lambda pool: pool.free.append(99), "free slot does not exist"),
        (lambda pool: pool.free.remove(5), "neither in use nor free"),
        (lambda pool: pool.users.__setitem__(5, 1), "both in use and free"),
        (lambda pool: pool.users.__setitem__(4, -1), "released once too often"),
        (lambda pool: pool.users.__setitem__(4, 0), "neither in use nor free"),
        (lambda pool: host_arrays(pool)["b"].__setitem__(ZERO, 1.0), "zero state"),
    ],
    ids=["freed twice", "no slot", "not free", "in use and free", "negative", "not in use", "zero"],
)
def test_a_miscount_is_found(spoil: Callable[[StatePool], object], what: str) -> None:
    pool = make_slab()
    slots = [pool.acquire() for _ in range(4)]
    pool.release(slots[3])
    assert slots[2:] == [4, 5]
    pool.check_integrity()
    spoil(pool)
    with pytest.raises(AssertionError, match=what):
        pool.check_integrity()
