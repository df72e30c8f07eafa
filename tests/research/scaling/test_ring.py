"""Tests of the hash ring: the replica of each session, and the sessions that move if replicas are added or removed."""

from __future__ import annotations

import numpy as np
import pytest

from research.scaling.ring import Ring, full, places, sdbm, starting

KEYS = places(f"session-{number}" for number in range(20_000))


def test_a_key_s_hash_is_sdbm() -> None:
    assert sdbm(b"") == 0
    assert sdbm(b"a") == 97
    assert sdbm(b"ab") == (97 * 65599 + 98) % 2**32


@pytest.mark.parametrize("replicas", [3, 10, 50])
def test_an_added_replica_takes_its_share_and_moves_no_other_session(replicas: int) -> None:
    before = Ring(full(range(1, replicas + 1))).owners(KEYS)
    after = Ring(full(range(1, replicas + 2))).owners(KEYS)
    moved = before != after
    assert (after[moved] == replicas + 1).all()
    assert moved.mean() == pytest.approx(1 / (replicas + 1), rel=0.2)


@pytest.mark.parametrize("replicas", [3, 10, 50])
def test_a_removed_replica_moves_only_its_own_sessions(replicas: int) -> None:
    before = Ring(full(range(1, replicas + 1))).owners(KEYS)
    after = Ring(full(range(2, replicas + 1))).owners(KEYS)
    assert ((before != after) == (before == 1)).all()


def test_the_replicas_shares_of_the_ring_add_up_to_one() -> None:
    shares = Ring(full(range(1, 8))).shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    owners = Ring(full(range(1, 8))).owners(KEYS)
    for number, share in shares.items():
        assert (owners == number).mean() == pytest.approx(share, abs=0.015)


def test_a_returning_replica_gets_its_sessions_gradually() -> None:
    points = [starting(age, 10.0) for age in range(12)]
    assert points == sorted(points)
    assert 0 < points[0] < points[5] < points[9] < points[10] == points[11] == full([1])[1]
    owned = []
    whole = Ring(full([1, 2, 3])).owners(KEYS) == 1
    for count in points:
        owners = Ring({**full([2, 3]), 1: count}).owners(KEYS)
        assert whole[owners == 1].mean() > 0.99
        owned.append(int((owners == 1).sum()))
    assert owned == sorted(owned)
    assert owned[-1] == np.count_nonzero(whole)
