"""Tests that two engines give the same answers to short random histories of steps. One engine processes steps in
columns (arrays for a batch of one-token steps), and the other does not. `python -m tests.service.engine.columns_fuzz`
runs longer histories."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.service.engine.columns_fuzz import (
    EPISODE_STEPS,
    MakeEngine,
    cached_engine,
    fake_engine,
    recorded,
    run,
)
from wane.service.sessions.resident import ResidentSessions
from wane.service.sessions.stores.store import TokenHistory

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


RECORD = Path(__file__).with_name("columns_record.json.gz")


async def test_steps_have_the_recorded_results() -> None:
    """The record was written by the code before steps with options and other stores were rows."""
    expected = json.loads(gzip.decompress(RECORD.read_bytes()))
    for found, episode in zip(await recorded(), expected, strict=True):
        assert len(found) == len(episode)
        for (action, result), (recorded_action, recorded_result) in zip(found, episode, strict=True):
            assert action == recorded_action
            assert differing(result, recorded_result) == [], action


def differing(value: Any, other: Any, path: str = "") -> list[str]:
    """Returns the paths of the values that differ, of numbers those that differ by more than 1e-5."""
    if isinstance(value, dict) and isinstance(other, dict) and value.keys() == other.keys():
        return [found for name in value for found in differing(value[name], other[name], f"{path}.{name}")]
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        pairs = zip(value, other, strict=True)
        return [found for index, (one, two) in enumerate(pairs) for found in differing(one, two, f"{path}.{index}")]
    if isinstance(value, float) and isinstance(other, float):
        return [] if abs(value - other) <= 1e-5 else [path]
    return [] if value == other else [path]


async def test_the_fuzz_finds_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    flush = ResidentSessions.flush

    def loses_a_token(self: ResidentSessions, session: str) -> tuple[TokenHistory, int, float]:
        tail, position, idle_s = flush(self, session)
        return TokenHistory(tail.data[tail.width :], tail.width), position, idle_s

    monkeypatch.setattr(ResidentSessions, "flush", loses_a_token)
    _, differences = await run(STEPS, SEED)
    assert differences
