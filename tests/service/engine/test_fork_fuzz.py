"""A short run of `fork_fuzz`, and a test that the fuzz finds a fault."""

from __future__ import annotations

import pytest

from tests.service.engine.fork_fuzz import OPERATIONS, run
from wane.service.state.pool import StatePool


async def test_random_forks_continuations_and_rewinds_are_within_their_bounds() -> None:
    counted = await run(400, 1)
    kinds = {*OPERATIONS, "exact", "bounded", "refused", "taken", "evictions"}
    assert [kind for kind in kinds if not counted[kind]] == []


async def test_the_fuzz_finds_a_fork_with_a_wrong_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePool, "copy", lambda *_: None)
    with pytest.raises(AssertionError):
        await run(400, 1)
