"""A short history of steps in columns and by the general procedure; `python -m tests.service.engine.columns_fuzz` plays
longer ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.service.engine.columns_fuzz import EPISODE_STEPS, MakeEngine, cached_engine, fake_engine, run
from wane.service.sessions.resident import ResidentSessions

SEED = 1
STEPS = 4 * EPISODE_STEPS  # an episode of each kind: with and without evictions, on the event loop and on a thread


@pytest.mark.parametrize("make", [fake_engine, cached_engine])
async def test_columns_equal_the_general_procedure(make: MakeEngine) -> None:
    counted, differences = await run(STEPS, SEED, make)
    assert differences == []
    assert counted["in columns"] > STEPS / 4
    kinds = ("conflicts", "replays", "evictions", "late", "cancelled before a batch", "cancelled in a batch")
    assert [kind for kind in kinds if not counted[kind]] == []


async def test_the_fuzz_finds_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    flush = ResidentSessions.flush

    def loses_a_token(self: ResidentSessions, session: str) -> tuple[Sequence[int], float]:
        tokens, idle_s = flush(self, session)
        return tokens[1:], idle_s

    monkeypatch.setattr(ResidentSessions, "flush", loses_a_token)
    _, differences = await run(STEPS, SEED)
    assert differences
