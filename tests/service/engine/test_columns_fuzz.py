"""One history of steps, in columns and by the general procedure; `python -m tests.service.engine.columns_fuzz` is
longer."""

from __future__ import annotations

from tests.service.engine.columns_fuzz import EPISODE_STEPS, run

SEED = 1
STEPS = 4 * EPISODE_STEPS  # an episode of each kind: with and without evictions, on the event loop and on a thread


async def test_a_history_of_steps_is_the_same_in_columns_and_by_the_general_procedure() -> None:
    counted, differences = await run(STEPS, SEED)
    assert differences == []
    assert counted["in columns"] > STEPS / 4
    kinds = ("conflicts", "replays", "evictions", "late", "cancelled before a batch", "cancelled in a batch")
    assert [kind for kind in kinds if not counted[kind]] == []
