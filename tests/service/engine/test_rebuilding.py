from __future__ import annotations

from tests.service.engine_harness import MakeHarness
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import PredictRequest, StepRequest


async def test_short_lived_states_are_rebuilt_from_the_tokens_of_a_window(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(certified=True, window=130, max_window=140, session_history_tokens=400)
    epsilon = harness.manifest.certificate.error_bound_at
    session = (await harness.engine.create_session()).session
    await harness.engine.submit(StepRequest(session, (5,) * 410))
    answers = []
    for _ in range(30):
        harness.engine.state_cache.drop(session)
        answers.append(await harness.engine.submit(StepRequest(session, (6,))))
    assert all(answer.state is StateSource.REBUILT for answer in answers)
    assert [len(rows[0]) for role, rows in harness.runner.calls if role == "window"] == 25 * [401] + 5 * [130]
    assert (answers[0].error_bound, answers[-1].error_bound) == (epsilon(140), epsilon(130))
    assert (await harness.engine.get_session(session)).error_bound == epsilon(130)
    harness.engine.state_cache.drop(session)
    assert (await harness.engine.get_session(session)).error_bound == epsilon(130)
    asked = await harness.engine.submit(PredictRequest(session=session, mode=Mode.RECURRENT))
    assert asked.error_bound == epsilon(140)


async def test_a_state_is_rebuilt_from_all_tokens_if_the_window_has_a_large_bound(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(certified=True, window=64, max_window=140, session_history_tokens=400)
    session = (await harness.engine.create_session()).session
    await harness.engine.submit(StepRequest(session, (5,) * 300))
    harness.engine.steps.share_found = 0.0
    harness.engine.state_cache.drop(session)
    rebuilt = await harness.engine.submit(StepRequest(session, (6,)))
    assert (rebuilt.state, rebuilt.error_bound) == (StateSource.REBUILT, 0.0)


async def test_a_state_is_rebuilt_if_only_all_stored_tokens_meet_the_tolerance(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(certified=True, window=130, max_window=140, session_history_tokens=400)
    epsilon = harness.manifest.certificate.error_bound_at
    session = (await harness.engine.create_session()).session
    await harness.engine.submit(StepRequest(session, (5,) * 300))
    harness.engine.steps.share_found = 0.0
    harness.engine.state_cache.drop(session)
    rebuilt = await harness.engine.submit(StepRequest(session, (6,)))
    assert (rebuilt.state, rebuilt.error_bound) == (StateSource.REBUILT, epsilon(130))
    kept = await harness.engine.submit(PredictRequest(session=session, tolerance=1.0))
    assert (kept.state, kept.error_bound) == (StateSource.RESIDENT, epsilon(130))
    strict = await harness.engine.submit(PredictRequest(session=session, tolerance=1e-9))
    assert (strict.state, strict.error_bound) == (StateSource.REBUILT, 0.0)
    again = await harness.engine.submit(PredictRequest(session=session, tolerance=1e-9))
    assert (again.state, again.error_bound) == (StateSource.RESIDENT, 0.0)
