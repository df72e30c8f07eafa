"""Compares the hash ring of the fleet simulation with the real HAProxy and its real configuration."""

from __future__ import annotations

import pytest

from research.scaling.ring import Ring, full, places
from tests.stack.harness.replicas import three_replicas
from tests.stack.harness.states import until
from tests.stack.test_haproxy import SESSIONS, haproxy

pytestmark = pytest.mark.stack


def owners(*servers: int) -> dict[str, int]:
    """Returns, for each session, the replica that the ring selects. Replicas are numbered from 0, and HAProxy's servers
    (`servers`) from 1."""
    found = Ring(full(servers)).owners(places(SESSIONS))
    return {session: int(owner) - 1 for session, owner in zip(SESSIONS, found, strict=True)}


async def test_every_session_has_and_moves_to_the_server_that_the_ring_selects() -> None:
    async with three_replicas() as replicas, haproxy(replicas) as balanced:
        assert await balanced.replica_of_each() == owners(1, 2, 3)
        replicas[1].stop()
        await until(balanced.operations, wane_2="DOWN")
        assert await balanced.replica_of_each() == owners(1, 3)
