from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.state.test_cache import keep
from tests.service.state.test_pool import SLOT_BYTES, STATE
from wane.service.state import prefixes
from wane.service.state.pool import ZERO, StatePool
from wane.service.state.prefixes import BLOCK, ENTRY_BYTES, Path

SLOTS = 16


def tokens(count: int, first: int = 7) -> NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64) % 250


def make_cache(slots: int = SLOTS, clock: Callable[[], float] = lambda: 0.0) -> StatePool:
    """Returns a cache all of whose slots may have states of prefixes, although these states are smaller than keys."""
    cache = StatePool(STATE, 4, slots * SLOT_BYTES, clock=clock)
    cache.prefixes._most = slots
    return cache


def leave(cache: StatePool, path: Path, length: int | None = None) -> int | None:
    """Keeps the state after the first `length` tokens of a path. Returns its slot; None if no slot is spare."""
    with cache.spare() as slot:
        if slot is not None:
            cache.prefixes.keep(path, path.length if length is None else length, slot)
        return slot


@pytest.mark.parametrize("length", [64, 65, 127, 128, 200])
def test_a_longer_sequence_finds_the_state_at_the_end_of_a_shorter_one(length: int) -> None:
    cache = make_cache()
    slot = leave(cache, Path("", tokens(length)))
    for more in (0, 1, 63, 64, 1000):
        assert cache.prefixes.find(Path("", tokens(length + more)))[:2] == (slot, length)
    assert cache.prefixes.find(Path("", tokens(length - 1)))[:2] == (ZERO, 0)
    cache.check_integrity(idle=True)


def test_the_longest_kept_beginning_is_found() -> None:
    cache = make_cache()
    slots = {length: leave(cache, Path("", tokens(length))) for length in (300, 64, 90, 91, 128, 255)}
    for length in range(64, 310):
        longest = max(one for one in slots if one <= length)
        assert cache.prefixes.find(Path("", tokens(length)))[:2] == (slots[longest], longest)


def test_a_sequence_that_differs_in_one_token_does_not_find_the_state() -> None:
    cache = make_cache()
    leave(cache, Path("", tokens(100)))
    for place in range(100):
        changed = tokens(120)
        changed[place] += 1
        assert cache.prefixes.find(Path("", changed))[:2] == (ZERO, 0)


def test_another_owner_finds_nothing() -> None:
    cache = make_cache()
    leave(cache, Path("ann", tokens(100)))
    for owner in ("", "bob", "an", "annn", "ann\0"):
        assert cache.prefixes.find(Path(owner, tokens(100)))[:3] == (ZERO, 0, 0)


def test_a_sequence_that_leaves_an_earlier_one_branches_at_the_last_common_block() -> None:
    cache = make_cache()
    leave(cache, Path("", tokens(300)))
    other = np.append(tokens(200), tokens(150, first=99))
    assert cache.prefixes.find(Path("", other))[:3] == (ZERO, 0, 192)
    slot = leave(cache, Path("", other), 192)
    assert cache.prefixes.find(Path("", other))[:3] == (slot, 192, 0)
    assert cache.prefixes.find(Path("bob", other))[:3] == (ZERO, 0, 0)


def test_states_of_prefixes_are_evicted_least_recently_used_first() -> None:
    cache = make_cache(8)
    paths = [Path("", tokens(64, first)) for first in range(6)]
    for path in paths:
        leave(cache, path)
    cache.prefixes.find(paths[0])
    leave(cache, Path("", tokens(64, 100)))
    assert [cache.prefixes.find(path).length for path in paths] == [64, 0, 64, 64, 64, 64]
    cache.check_integrity(idle=True)


def test_states_of_prefixes_are_evicted_before_states_of_sessions() -> None:
    cache = make_cache(8)
    keep(cache, "old")
    for first in range(5):
        leave(cache, Path("", tokens(64, first)))
    for name in "abcde":
        keep(cache, name)
    assert len(cache) == 6
    assert len(cache.prefixes) == 0
    cache.check_integrity(idle=True)


def test_a_state_of_a_prefix_never_costs_a_session_its_state() -> None:
    cache = make_cache(8)
    for name in "abcdef":
        keep(cache, name)
    assert leave(cache, Path("", tokens(64))) is None
    assert len(cache) == 6


def test_requests_that_use_half_of_all_slots_get_no_slot_for_a_prefix() -> None:
    cache = make_cache(8)
    with cache.lease(), cache.lease(), cache.lease(), cache.lease(), cache.spare() as slot:
        assert slot is None


def test_a_state_in_use_is_not_evicted() -> None:
    cache = make_cache(8)
    path = Path("", tokens(64))
    slot = leave(cache, path)
    assert slot is not None
    with cache.hold(slot):
        for first in range(20, 40):
            leave(cache, Path("", tokens(64, first)))
        assert cache.prefixes.find(path)[:2] == (slot, 64)
    cache.check_integrity(idle=True)


def test_idle_states_are_dropped() -> None:
    now = [0.0]
    cache = make_cache(clock=lambda: now[0])
    early, late = Path("", tokens(64)), Path("", tokens(64, 9))
    leave(cache, early)
    now[0] = 5.0
    leave(cache, late)
    cache.drop_idle(5.0)
    assert (cache.prefixes.find(early).length, cache.prefixes.find(late).length) == (0, 64)


def test_the_keys_of_kept_states_count_in_the_budget() -> None:
    cache = StatePool(STATE, 4, 1000 * SLOT_BYTES)
    for first in range(250):
        leave(cache, Path("", tokens(64, first)))
    assert len(cache.prefixes) == 1000 * SLOT_BYTES // (SLOT_BYTES + ENTRY_BYTES) < 250


def test_few_blocks_without_a_state_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "BLOCKS_SEEN", 3)
    cache = make_cache()
    for first in range(5):
        leave(cache, Path("", tokens(64, first)))
    branches = [cache.prefixes.find(Path("", np.append(tokens(64, first), [0]))).branch for first in range(5)]
    assert len(cache.prefixes._seen) == 3
    assert branches == [0] * 5  # each has its state
    cache.drop_idle(1.0)
    branches = [cache.prefixes.find(Path("", np.append(tokens(64, first), [0]))).branch for first in range(5)]
    assert branches == [0, 0, 64, 64, 64]


def test_random_sequences_find_what_a_plain_search_finds() -> None:
    draw = random.Random(5)
    cache, kept = make_cache(40), dict[tuple[str, tuple[int, ...]], int]()
    base = [[draw.randrange(3) for _ in range(400)] for _ in range(3)]
    hits = 0
    for _ in range(4000):
        given = draw.choice(base)[: draw.randrange(1, 400)]
        if draw.random() < 0.5:
            given[draw.randrange(len(given))] = 3
        owner = draw.choice(["", "ann", "bob"])
        path = Path(owner, np.array(given, np.int64))
        resident = {key for key, slot in kept.items() if slot in {one.slot for one in cache.prefixes._kept.values()}}
        longest = max(
            (len(key[1]) for key in resident if key[0] == owner and tuple(given[: len(key[1])]) == key[1]), default=0
        )
        found = cache.prefixes.find(path)
        assert found.length == longest
        assert not found.branch or (found.branch % BLOCK == 0 and longest < found.branch < len(given))
        hits += bool(longest)
        if longest:
            assert kept[owner, tuple(given[:longest])] == found.slot
        draws = draw.random()
        if draws < 0.6 and len(given) >= BLOCK and longest < len(given):
            slot = leave(cache, path)
            kept = {key: one for key, one in kept.items() if one != slot}
            if slot is not None:
                kept[owner, tuple(given)] = slot
        elif draws < 0.65:
            keep(cache, f"s{draw.randrange(30)}")
        elif draws < 0.7:
            cache.drop(f"s{draw.randrange(30)}")
        if draw.random() < 0.05:
            cache.check_integrity(idle=True)
    assert hits > 200
