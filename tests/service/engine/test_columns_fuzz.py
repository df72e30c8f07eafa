"""Tests that two engines give the same answers to short random histories of steps. One engine processes steps in
columns (arrays for a batch of one-token steps), and the other does not. `python -m tests.service.engine.columns_fuzz`
runs longer histories."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.service.engine.columns_fuzz import EPISODE_STEPS, MakeEngine, cached_engine, fake_engine, run
from wane.service.sessions.resident import ResidentSessions

SEED = 1
# One episode of each of the four kinds: with or without evictions, and with runs on the event loop or on a thread.
STEPS = 4 * EPISODE_STEPS


@pytest.mark.parametrize("make", [fake_engine, cached_engine])
async def test_steps_in_columns_have_the_results_of_the_general_procedure(make: MakeEngine) -> None:
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
