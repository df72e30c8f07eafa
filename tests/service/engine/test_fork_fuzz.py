"""A short run of `fork_fuzz`, and a test that the fuzz finds a fault."""

from __future__ import annotations

import pytest

from tests.service.engine.fork_fuzz import OPERATIONS, run
from wane.service.engine.forward import Forward
from wane.service.state.pool import StatePool
from wane.service.state.prefixes import Path


async def test_random_forks_continuations_and_rewinds_are_within_their_bounds() -> None:
    counted = await run(400, 1)
    kinds = {*OPERATIONS, "exact", "bounded", "refused", "taken", "evictions", "hits", "hits of scores"}
    assert [kind for kind in kinds if not counted[kind]] == []


async def test_the_fuzz_finds_a_fork_with_a_wrong_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePool, "unpack", lambda *_: None)
    with pytest.raises(AssertionError):
        await run(400, 1)


async def test_the_fuzz_finds_a_prefix_of_another_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Forward.path
    monkeypatch.setattr(Forward, "path", lambda self, tokens, owner: original(self, tokens, owner and "all"))
    with pytest.raises(AssertionError, match="no prompt of its owner"):
        await run(400, 1)


async def test_the_fuzz_finds_a_kept_state_that_has_read_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "key", lambda self, length: ("", length.to_bytes(4, "little")))
    with pytest.raises(AssertionError):
        await run(400, 1)
