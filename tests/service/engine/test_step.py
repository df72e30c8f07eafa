"""Tests of the steps of sessions: replays, conflicts, resident and rebuilt states, modes, expiry and deletion.

`tests/service/test_conformance.py` tests the behaviour that all protocols share.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec.structs import asdict

from tests.service.engine_harness import Clock, EngineHarness, MakeHarness, listed
from tests.service.sessions.stores.append import append as append_to
from wane.service.errors import (
    DeadlineExceeded,
    IdempotencyKeyReused,
    InvalidRequest,
    Overloaded,
    PositionConflict,
    Unavailable,
    UnknownSession,
    WaneError,
)
from wane.service.sessions.sessions import SessionsReport
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.store import Appended, Commit, SessionRecord, Store
from wane.service.types.answer import SessionView
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import Filter, PredictRequest, ScoreRequest, StepRequest

EOS = 0


async def turn() -> None:
    """Runs all ready tasks until each waits again."""
    for _ in range(5):
        await asyncio.sleep(0)


def expected(harness: EngineHarness, tokens: Sequence[int]) -> list[tuple[int, object]]:
    """Returns the five most probable next tokens after <eos> and `tokens`, with their log-probabilities, directly from
    the model."""
    return ranked(harness.runner.logits([EOS, *tokens]))


def ranked(logits: np.ndarray[tuple[int], np.dtype[np.float32]]) -> list[tuple[int, object]]:
    logprobs = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    return [(int(token), pytest.approx(float(logprobs[token]))) for token in np.argsort(-logprobs)[:5]]


async def start(harness: EngineHarness, *tokens: int, mode: Mode | None = None) -> str:
    """Creates a session, and sends one step for each of `tokens`."""
    session = (await harness.engine.create_session(mode=mode)).session
    for token in tokens:
        await harness.engine.submit(StepRequest(session, (token,)))
    return session


async def test_a_new_session_is_at_position_0_and_exact(harness: EngineHarness) -> None:
    view = await harness.engine.create_session()
    assert (view.position, view.state, view.error_bound) == (0, StateSource.RESIDENT, 0.0)
    assert await harness.engine.get_session(view.session) == SessionView(**asdict(view))


async def test_predicting_from_a_session_appends_nothing(harness: EngineHarness) -> None:
    session = await start(harness, 5, 6)
    harness.runner.calls.clear()
    answer = await harness.engine.submit(PredictRequest(session=session))
    assert harness.runner.roles() == ["head"]
    assert listed(answer) == expected(harness, [5, 6])
    assert (answer.position, answer.replayed, answer.state) == (2, None, StateSource.RESIDENT)
    assert (await harness.engine.get_session(session)).position == 2


# Replays and conflicts


async def test_a_replay_of_an_evicted_session_is_answered_from_its_stored_tokens(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    await harness.engine.submit(StepRequest(session, (6,), expected_position=1))
    harness.engine.state_cache.drop(session)
    again = await harness.engine.submit(StepRequest(session, (6,), expected_position=1))
    assert again.replayed is True
    assert again.state is StateSource.REBUILT
    assert listed(again) == expected(harness, [5, 6])


async def test_the_same_step_with_another_key_is_a_conflict(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    await harness.engine.submit(StepRequest(session, (6,), expected_position=1, idempotency_key="k"))
    with pytest.raises(PositionConflict) as caught:
        await harness.engine.submit(StepRequest(session, (6,), expected_position=1, idempotency_key="l"))
    assert caught.value.position == 2
    assert caught.value.extra() == {"position": 2}


@pytest.mark.parametrize(
    ("tokens", "position"),
    [((7,), None), ((7,), 1), ((7,), 2), ((6,), 0), ((6,), 2), ((6, 7), None), ((6,), 9)],
    ids=str,
)
async def test_the_last_steps_key_with_other_tokens_or_another_position_is_refused(
    harness: EngineHarness, tokens: tuple[int, ...], position: int | None
) -> None:
    session = await start(harness, 5)
    await harness.engine.submit(StepRequest(session, (6,), expected_position=1, idempotency_key="k"))
    with pytest.raises(IdempotencyKeyReused, match="idempotency key") as caught:
        await harness.engine.submit(StepRequest(session, tokens, expected_position=position, idempotency_key="k"))
    assert caught.value.extra() == {"position": 2}
    assert (await harness.engine.get_session(session)).position == 2
    next_ = await harness.engine.submit(StepRequest(session, (7,), expected_position=2, idempotency_key="l"))
    assert (next_.position, next_.replayed) == (3, False)


async def test_the_same_tokens_with_another_key_and_no_position_are_a_new_step(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    for position, key in ((2, "k"), (3, "l")):
        answer = await harness.engine.submit(StepRequest(session, (6,), idempotency_key=key))
        assert (answer.position, answer.replayed) == (position, False)


@pytest.mark.parametrize(("position", "token"), [(0, 6), (1, 9), (7, 6)])
async def test_a_step_at_another_position_is_a_conflict(harness: EngineHarness, position: int, token: int) -> None:
    session = await start(harness, 5)
    await harness.engine.submit(StepRequest(session, (6,), expected_position=1))
    with pytest.raises(PositionConflict, match=f"at position 2, but the step starts at {position}"):
        await harness.engine.submit(StepRequest(session, (token,), expected_position=position))
    assert (await harness.engine.get_session(session)).position == 2


class ContendedStore(MemoryStore):
    """A store that another writer changes too. Before each of the next `losses` appends of the engine, the other writer
    appends the tokens `theirs`."""

    def __init__(self) -> None:
        super().__init__(16, 3600, 2**20, Clock())
        self.losses = 0
        self.theirs: tuple[int, ...] = (99,)
        self.attempts = 0
        self.lost = False

    async def append_many(self, commits: Sequence[Commit]) -> list[Appended]:
        if self.lost:
            raise Unavailable("the store is lost")
        self.attempts += 1
        if self.losses:
            self.losses -= 1
            (wanted,) = commits
            (won,) = await super().append_many([wanted._replace(tokens=self.theirs)])
            assert isinstance(won, SessionRecord)
        return await super().append_many(commits)


async def test_a_step_fails_with_a_conflict_after_three_retries(
    make_harness: MakeHarness,
) -> None:
    store = ContendedStore()
    harness = make_harness(store=store, puts_out_top=False)
    session = await start(harness, 5)
    store.attempts, store.losses = 0, 100
    with pytest.raises(PositionConflict) as caught:
        await harness.engine.submit(StepRequest(session, (6,)))
    assert store.attempts == 4
    assert caught.value.position == 5
    store.losses = 0
    answer = await harness.engine.submit(StepRequest(session, (7,)))
    assert [(one.token_id, one.logprob) for one in answer.predictions] == expected(harness, [5, *[99] * 4, 7])


async def test_a_step_that_loses_a_commit_race_to_its_own_retry_is_a_replay(make_harness: MakeHarness) -> None:
    store = ContendedStore()
    harness = make_harness(store=store, puts_out_top=False)
    session = await start(harness, 5)
    store.losses, store.theirs = 1, (6,)
    answer = await harness.engine.submit(StepRequest(session, (6,), expected_position=1))
    assert (answer.replayed, answer.position) == (True, 2)


async def append(store: Store, session: str, tokens: tuple[int, ...]) -> None:
    """Appends a step directly to the store, as another replica would."""
    record = await store.get(session)
    assert record is not None
    assert await append_to(store, record, tokens)


@pytest.mark.parametrize("appended", [False, True])
async def test_the_record_in_the_store_decides_whether_an_unanswered_commit_took_effect(
    appended: bool,
    make_harness: MakeHarness,
) -> None:
    store = ContendedStore()
    harness = make_harness(store=store, puts_out_top=False)
    session = await start(harness, 5)
    store.lost = True
    with pytest.raises(Unavailable):
        await harness.engine.submit(StepRequest(session, (6,)))
    store.lost = False
    if appended:
        await append(store, session, (6,))
    answer = await harness.engine.submit(StepRequest(session, (7,)))
    input_ids = [5, 6, 7] if appended else [5, 7]
    assert listed(answer) == expected(harness, input_ids)


async def test_a_state_that_is_older_than_all_stored_tokens_is_rebuilt(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    resident = harness.engine.state_cache.peek(session)
    assert resident is not None
    for _ in range(1, 20):  # the store keeps 16 tokens
        await append(harness.store, session, (6,))
    answer = await harness.engine.submit(StepRequest(session, (8,), expected_position=20))
    assert (answer.state, answer.position) == (StateSource.REBUILT, 21)


async def test_a_prediction_updates_a_state_that_lacks_the_latest_steps(
    harness: EngineHarness,
) -> None:
    session = await start(harness, 5)
    await append(harness.store, session, (6, 7))
    harness.runner.calls.clear()
    answer = await harness.engine.submit(PredictRequest(session=session))
    assert [(one.token_id, one.logprob) for one in answer.predictions] == expected(harness, [5, 6, 7])
    assert (answer.state, answer.position) == (StateSource.RESIDENT, 3)
    assert harness.runner.calls[0] == ("advance", [[6, 7]])
    harness.runner.calls.clear()
    await harness.engine.submit(PredictRequest(session=session))
    assert harness.runner.roles() == ["head"]


async def test_a_state_of_another_revision_at_the_same_position_is_rebuilt(harness: EngineHarness) -> None:
    session = await start(harness, 5, 6)
    record = await harness.store.get(session)
    assert record is not None
    # Another replica rewinds the session, and then appends another token, so the session has the same position as
    # before.
    rewound = await harness.store.rewind(session, record.revision, 1)
    assert rewound is not None
    await append(harness.store, session, (7,))
    answer = await harness.engine.submit(StepRequest(session, (8,), expected_position=2))
    assert answer.state is StateSource.REBUILT
    assert listed(answer) == expected(harness, [5, 7, 8])


# Failures and cancelled steps


async def test_a_nan_output_is_a_failed_run(harness: EngineHarness, caplog: pytest.LogCaptureFixture) -> None:
    session = await start(harness, 5)
    harness.runner.hot = 6
    for tokens in ((6,), (6, 7)):
        with pytest.raises(WaneError, match="failed to run"):
            await harness.engine.submit(StepRequest(session, tokens))
    with pytest.raises(WaneError, match="failed to run"):
        await harness.engine.score(ScoreRequest((6, 7)))
    assert "not finite" in caplog.text
    view = await harness.engine.get_session(session)
    assert (view.position, view.state) == (1, StateSource.RESIDENT)


async def test_a_long_step_that_fails_in_its_second_piece_commits_nothing(make_harness: MakeHarness) -> None:
    harness = make_harness()
    session = await start(harness, 5)
    harness.runner.poison = 200
    with pytest.raises(WaneError, match="failed to run"):
        await harness.engine.submit(StepRequest(session, (*[6] * 600, 200)))
    view = await harness.engine.get_session(session)
    assert (view.position, view.state) == (1, StateSource.RESIDENT)
    assert [one.token_id for one in (await harness.engine.submit(PredictRequest(session=session))).predictions] == [
        token for token, _ in expected(harness, [5])
    ]


async def test_a_step_that_fails_after_a_disconnection_logs_only_the_failed_run(
    harness: EngineHarness, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()
    caplog.clear()  # removes the log records of earlier tests
    session = await start(harness, 5)
    harness.runner.poison = 6
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    cancelled = asyncio.ensure_future(harness.engine.submit(StepRequest(session, (6,), expected_position=1)))
    await harness.runner.until_busy()
    cancelled.cancel()
    await turn()
    harness.runner.gate.set()
    await harness.engine.drain()
    await turn()
    del cancelled  # the future holds a reference to the step
    gc.collect()
    # The log has only the message about the failed run.
    assert {record.name for record in caplog.records} == {"wane.engine"}
    assert (await harness.engine.get_session(session)).position == 1


async def test_a_cancelled_long_step_commits_once_its_first_piece_runs(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    tokens = tuple(10 + index % 50 for index in range(1100))
    cancelled = asyncio.ensure_future(harness.engine.submit(StepRequest(session, tokens)))
    await harness.runner.until_busy()
    cancelled.cancel()
    await turn()
    harness.runner.gate.set()
    await harness.engine.drain()
    assert (await harness.engine.get_session(session)).position == 1101


async def test_rewind_and_delete_fail_at_their_deadlines_during_a_step(
    harness: EngineHarness, travel: Callable[[float], None]
) -> None:
    session = await start(harness, 5)
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    step = asyncio.ensure_future(harness.engine.submit(StepRequest(session, (6,))))
    await harness.runner.until_busy()
    deadline = asyncio.get_running_loop().time() + 3600
    rewind = asyncio.create_task(harness.engine.rewind(session, 0, deadline))
    end = asyncio.create_task(harness.engine.delete_session(session, deadline))
    await turn()
    travel(2 * 3600)
    for late in (rewind, end):
        with pytest.raises(DeadlineExceeded):
            await late
    harness.runner.gate.set()
    await step
    assert (await harness.engine.get_session(session)).position == 2


async def test_too_many_requests_for_one_session_are_refused(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    waiting = [asyncio.ensure_future(harness.engine.submit(StepRequest(session, (6,)))) for _ in range(65)]
    await harness.runner.until_busy()
    with pytest.raises(Overloaded, match=f"64 requests are already waiting for session '{session}'"):
        await harness.engine.submit(StepRequest(session, (6,)))
    harness.runner.gate.set()
    await asyncio.gather(*waiting)
    assert (await harness.engine.get_session(session)).position == 66


# Evictions, rebuilds and rewinds


async def test_a_session_rebuilt_from_all_its_tokens_is_exact(harness: EngineHarness) -> None:
    session = await start(harness, 5, 6, 7)
    harness.engine.state_cache.drop(session)
    view = await harness.engine.get_session(session)
    assert (view.state, view.error_bound) == (StateSource.REBUILT, 0.0)
    answer = await harness.engine.submit(StepRequest(session, (8,)))
    assert (answer.state, answer.error_bound) == (StateSource.REBUILT, 0.0)
    assert [(one.token_id, one.logprob) for one in answer.predictions] == expected(harness, [5, 6, 7, 8])
    assert (await harness.engine.submit(StepRequest(session, (9,)))).state is StateSource.RESIDENT
    assert harness.sample("wane_state_rebuilds_total") == 1


async def test_an_uncertified_session_rebuilt_from_a_part_of_its_tokens_has_no_bound(
    harness: EngineHarness,
) -> None:
    input_ids = [10 + index for index in range(20)]
    session = await start(harness, *input_ids)
    assert (await harness.engine.get_session(session)).error_bound == 0.0
    harness.engine.state_cache.drop(session)
    answer = await harness.engine.submit(StepRequest(session, (6,)))
    assert (answer.state, answer.error_bound) == (StateSource.REBUILT, None)
    tail = input_ids[-16:]
    assert [(one.token_id, one.logprob) for one in answer.predictions] == ranked(harness.runner.logits([*tail, 6]))
    after = await harness.engine.submit(StepRequest(session, (7,)))
    assert (after.state, after.error_bound) == (StateSource.RESIDENT, None)


async def test_a_session_of_as_many_tokens_as_the_store_keeps_is_rebuilt_exactly(harness: EngineHarness) -> None:
    input_ids = [10 + index for index in range(16)]
    session = await start(harness, *input_ids)
    harness.engine.state_cache.drop(session)
    answer = await harness.engine.submit(PredictRequest(session=session))
    assert (answer.state, answer.error_bound) == (StateSource.REBUILT, 0.0)
    assert listed(answer) == expected(harness, input_ids)


async def test_predicting_from_an_evicted_session_makes_it_resident(harness: EngineHarness) -> None:
    session = await start(harness, 5, 6)
    harness.engine.state_cache.drop(session)
    first = await harness.engine.submit(PredictRequest(session=session))
    second = await harness.engine.submit(PredictRequest(session=session))
    assert (first.state, second.state) == (StateSource.REBUILT, StateSource.RESIDENT)


async def test_sessions_beyond_the_budget_are_evicted_and_rebuilt_exactly(make_harness: MakeHarness) -> None:
    slot_bytes = 4 * (4 + 4 + 4)
    harness = make_harness(state_budget_bytes=8 * slot_bytes)
    sessions = [await start(harness, 10 + index, 20 + index) for index in range(12)]
    counts = (await harness.engine.report()).sessions
    assert counts == SessionsReport(resident=6, parked=6, rebuilt=0)  # two of eight slots are reserved
    for index, session in enumerate(sessions):
        answer = await harness.engine.submit(StepRequest(session, (7,)))
        assert [(one.token_id, one.logprob) for one in answer.predictions] == expected(
            harness, [10 + index, 20 + index, 7]
        )
    assert harness.sample("wane_states_evicted_total") > 0
    harness.engine.state_cache.check_integrity()


async def test_a_rewound_session_continues_at_its_new_position(harness: EngineHarness) -> None:
    session = await start(harness, 5, 6, 7)
    view = await harness.engine.rewind(session, 1)
    assert (view.position, view.state, view.error_bound) == (1, StateSource.REBUILT, 0.0)
    answer = await harness.engine.submit(StepRequest(session, (8,)))
    assert (answer.position, answer.state) == (2, StateSource.REBUILT)
    assert listed(answer) == expected(harness, [5, 8])


async def test_a_step_after_a_rewind_is_never_a_replay(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    step = StepRequest(session, (6,), expected_position=1, idempotency_key="k")
    await harness.engine.submit(step)
    await harness.engine.rewind(session, 1)
    assert (await harness.engine.submit(step)).replayed is False


async def test_a_session_can_be_rewound_to_its_start_and_its_position(harness: EngineHarness) -> None:
    session = await start(harness, 5, 6)
    assert (await harness.engine.rewind(session, 2)).position == 2
    assert (await harness.engine.rewind(session, 0)).position == 0
    answer = await harness.engine.submit(StepRequest(session, (7,)))
    assert [(one.token_id, one.logprob) for one in answer.predictions] == expected(harness, [7])


async def test_a_rewind_to_the_current_position_keeps_state_and_last_step(
    harness: EngineHarness,
) -> None:
    session = await start(harness, *range(10, 30))
    step = StepRequest(session, (6,), expected_position=20)
    await harness.engine.submit(step)
    harness.clock.now_s += 10
    view = await harness.engine.rewind(session, 21)
    assert (view.position, view.state, view.error_bound, view.idle_s) == (21, StateSource.RESIDENT, 0.0, 0.0)
    assert await harness.engine.get_session(session) == view
    assert (await harness.engine.submit(step)).replayed is True


@pytest.mark.parametrize("position", [-1, 3, 4, 21])
async def test_a_rewind_to_a_dropped_position_fails_with_the_possible_positions(
    harness: EngineHarness, position: int
) -> None:
    session = await start(harness, *range(10, 30))
    with pytest.raises(InvalidRequest, match=f"position is {position}.* positions 5 to 20"):
        await harness.engine.rewind(session, position)
    assert (await harness.engine.rewind(session, 5)).position == 5


# Modes


async def test_a_window_session_answers_from_its_stored_tokens_and_keeps_no_state(harness: EngineHarness) -> None:
    session = await start(harness, *range(10, 20), mode=Mode.WINDOW)
    harness.runner.calls.clear()
    answer = await harness.engine.submit(StepRequest(session, (6,)))
    assert harness.runner.calls == [("window", [[17, 18, 19, 6]])]
    assert (answer.mode, answer.window, answer.state) == (Mode.WINDOW, 4, StateSource.WINDOW)
    assert answer.error_bound is None
    assert len(harness.engine.state_cache) == 0
    assert listed(answer) == ranked(harness.runner.logits([17, 18, 19, 6]))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("count", [0, 3, 4, 5, 20])
async def test_a_view_has_the_state_and_bound_of_the_next_answer(
    harness: EngineHarness, mode: Mode, count: int
) -> None:
    session = await start(harness, *range(10, 10 + count), mode=mode)
    view = await harness.engine.get_session(session)
    answer = await harness.engine.submit(PredictRequest(session=session))
    assert (view.state, view.error_bound) == (answer.state, answer.error_bound)


async def test_a_step_in_window_mode_advances_an_existing_state(harness: EngineHarness) -> None:
    input_ids = [10 + index for index in range(20)]
    session = await start(harness, *input_ids)
    answer = await harness.engine.submit(StepRequest(session, (6,), mode=Mode.WINDOW))
    assert (answer.mode, answer.state, answer.error_bound) == (Mode.WINDOW, StateSource.WINDOW, None)
    assert [(one.token_id, one.logprob) for one in answer.predictions] == ranked(
        harness.runner.logits([*input_ids[-3:], 6])
    )
    answer = await harness.engine.submit(StepRequest(session, (7,)))
    assert (answer.state, answer.error_bound) == (StateSource.RESIDENT, 0.0)
    assert listed(answer) == expected(harness, [*input_ids, 6, 7])


async def test_a_step_in_window_mode_rebuilds_no_state(harness: EngineHarness) -> None:
    session = await start(harness, 5, 6)
    harness.engine.state_cache.drop(session)
    harness.runner.calls.clear()
    await harness.engine.submit(StepRequest(session, (7,), mode=Mode.WINDOW))
    assert harness.runner.roles() == ["window"]
    assert harness.engine.state_cache.peek(session) is None


async def test_mode_both_answers_from_the_recurrent_state_and_compares_the_window(harness: EngineHarness) -> None:
    session = await start(harness, *range(10, 20))
    answer = await harness.engine.submit(StepRequest(session, (6,), mode=Mode.BOTH))
    assert answer.modes is not None
    assert answer.agreement is not None
    assert listed(answer) == expected(harness, [*range(10, 20), 6])
    assert answer.modes[Mode.RECURRENT].predictions == answer.predictions
    window = [(one.token_id, one.logprob) for one in answer.modes[Mode.WINDOW].predictions]
    assert window == ranked(harness.runner.logits([17, 18, 19, 6]))
    assert 0 < answer.agreement.total_variation < 1
    assert answer.error_bound == 0.0
    assert answer.agreement.error_bound is None
    assert (await harness.engine.submit(StepRequest(session, (7,)))).state is StateSource.RESIDENT


async def test_a_step_uses_the_sessions_mode_unless_it_names_another(harness: EngineHarness) -> None:
    session = await start(harness, 5, mode=Mode.BOTH)
    assert (await harness.engine.submit(StepRequest(session, (6,)))).mode is Mode.BOTH
    assert (await harness.engine.submit(StepRequest(session, (6,), mode=Mode.AUTO))).mode is Mode.BOTH
    answer = await harness.engine.submit(StepRequest(session, (6,), mode=Mode.RECURRENT))
    assert (answer.mode, answer.window, answer.modes) == (Mode.RECURRENT, None, None)


async def test_a_window_longer_than_the_stored_tokens_of_a_rewound_session_is_refused(
    harness: EngineHarness,
) -> None:
    session = await start(harness, *range(10, 30))
    await harness.engine.rewind(session, 6)
    with pytest.raises(InvalidRequest, match="window is 3, but the session keeps only its last 2 tokens"):
        await harness.engine.submit(PredictRequest(session=session, mode=Mode.WINDOW, window=3))
    answer = await harness.engine.submit(PredictRequest(session=session, mode=Mode.WINDOW))
    assert answer.window == 2


@pytest.mark.parametrize("mode", [None, Mode.RECURRENT, Mode.BOTH])
async def test_a_tolerance_that_the_session_does_not_meet_is_refused(harness: EngineHarness, mode: Mode | None) -> None:
    session = await start(harness, *range(10, 30), mode=mode)
    exact = await harness.engine.submit(PredictRequest(session=session, tolerance=0.0))
    assert exact.error_bound == 0.0
    harness.engine.state_cache.drop(session)
    harness.runner.calls.clear()
    with pytest.raises(InvalidRequest, match=r"tolerance is 0\.5, but .* has no error bound") as caught:
        await harness.engine.submit(PredictRequest(session=session, tolerance=0.5))
    assert caught.value.field == "tolerance"
    assert harness.runner.calls == []


async def test_a_window_for_a_recurrent_session_is_refused(harness: EngineHarness) -> None:
    session = await start(harness, *range(10, 20))
    with pytest.raises(
        InvalidRequest, match="answers in mode recurrent; window is only for the modes window and both"
    ) as caught:
        await harness.engine.submit(PredictRequest(session=session, window=3))
    assert caught.value.field == "window"
    own = await start(harness, *range(10, 20), mode=Mode.WINDOW)
    assert (await harness.engine.submit(PredictRequest(session=own, window=3))).window == 3


# Expiry and deletion


async def test_an_idle_session_expires_with_its_state(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    harness.clock.now_s += 3600
    assert (await harness.engine.get_session(session)).idle_s == 3600
    harness.clock.now_s += 1
    with pytest.raises(UnknownSession, match="expired"):
        await harness.engine.submit(StepRequest(session, (6,)))
    assert len(harness.engine.state_cache) == 0


async def test_states_of_expired_sessions_are_released_without_a_request(harness: EngineHarness) -> None:
    await start(harness, 5)
    harness.clock.now_s += 3601
    assert (await harness.engine.report()).sessions == SessionsReport(resident=0, parked=0, rebuilt=0)
    assert harness.engine.state_cache.used_bytes == 0


async def test_a_prediction_resets_the_idle_time_but_a_read_does_not(
    harness: EngineHarness,
) -> None:
    session = await start(harness, 5)
    harness.clock.now_s += 10
    await harness.engine.get_session(session)
    assert (await harness.engine.get_session(session)).idle_s == 10
    await harness.engine.submit(PredictRequest(session=session))
    assert (await harness.engine.get_session(session)).idle_s == 0


async def test_a_replay_resets_the_idle_time(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    for _ in range(3):
        harness.clock.now_s += 2000
        answer = await harness.engine.submit(StepRequest(session, (5,), expected_position=0))
        assert answer.replayed
    assert (await harness.engine.get_session(session)).idle_s == 0


async def test_predicting_from_a_session_keeps_its_state(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    for _ in range(3):
        harness.clock.now_s += 2000
        answer = await harness.engine.submit(PredictRequest(session=session))
        await harness.engine.report()
    assert answer.state is StateSource.RESIDENT


async def test_a_deleted_session_is_unknown(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    await harness.engine.delete_session(session)
    assert len(harness.engine.state_cache) == 0
    for attempt in (
        harness.engine.get_session(session),
        harness.engine.delete_session(session),
        harness.engine.rewind(session, 0),
        harness.engine.submit(StepRequest(session, (6,))),
        harness.engine.submit(PredictRequest(session=session)),
    ):
        with pytest.raises(UnknownSession):
            await attempt


@pytest.mark.parametrize("tokens", [(5,), (5, 6)])
async def test_a_session_may_be_evicted_for_its_memory_by_its_own_step(
    make_harness: MakeHarness, tokens: tuple[int, ...]
) -> None:
    harness = make_harness()
    assert isinstance(harness.store, MemoryStore)
    session = await start(harness, 8)
    await harness.engine.get_session(session)  # the store commits its next step
    harness.store.sessions.budget_bytes = harness.store.sessions.used_bytes
    answer = await harness.engine.submit(StepRequest(session, tokens, filter=Filter(exclude_seen=True)))
    assert answer.position == 1 + len(tokens)
    for step in (StepRequest(session, (7,), filter=Filter(exclude_seen=True)), StepRequest(session, (7,))):
        with pytest.raises(UnknownSession):
            await harness.engine.submit(step)
    with pytest.raises(UnknownSession):
        await harness.engine.get_session(session)
    assert not harness.engine.admission.active and not harness.engine.sessions.locks.waiting
    harness.engine.state_cache.check_integrity(idle=True)


CUT = {
    "certified": True,
    "window": 130,
    "max_window": 140,
    "session_history_tokens": 140,
}  # options of a harness with a certified model and a store that drops old tokens


async def test_the_bound_of_a_rebuilt_session_shrinks_at_every_token(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(**CUT)
    epsilon = harness.manifest.certificate.error_bound_at
    tokens = [5 + index % 90 for index in range(200)]
    session = (await harness.engine.create_session()).session
    stayed = await harness.engine.submit(StepRequest(session, tuple(tokens)))
    assert (stayed.error_bound, stayed.state_error_bound, stayed.top1_proved) == (0.0, 0.0, True)
    harness.engine.state_cache.drop(session)
    bounds = []
    for token in range(5, 10):
        tokens.append(token)
        answer = await harness.engine.submit(StepRequest(session, (token,)))
        bounds.append(answer.error_bound)
        assert answer.error_bound == (await harness.engine.get_session(session)).error_bound
    assert bounds == [epsilon(141), epsilon(142), epsilon(143), epsilon(144), epsilon(145)]
    harness.engine.state_cache.drop(session)
    again = await harness.engine.submit(PredictRequest(session=session))
    assert (again.state, again.error_bound) == (StateSource.REBUILT, epsilon(140))
    recurrent = await harness.engine.submit(PredictRequest(tuple(tokens), mode=Mode.RECURRENT))
    assert again.predictions[0].token_id == recurrent.predictions[0].token_id


async def test_a_window_session_and_its_view_have_the_windows_bound(make_harness: MakeHarness) -> None:
    harness = make_harness(**CUT)
    epsilon = harness.manifest.certificate.error_bound_at
    session = (await harness.engine.create_session(mode=Mode.WINDOW)).session
    answer = await harness.engine.submit(StepRequest(session, (5,) * 150))
    view = await harness.engine.get_session(session)
    assert answer.error_bound == view.error_bound == epsilon(130)
    loose = await harness.engine.submit(PredictRequest(session=session, tolerance=epsilon(130)))
    assert loose.error_bound == epsilon(130)
    with pytest.raises(InvalidRequest, match="tolerance is 1e-09, but the session's answer has an error bound of"):
        await harness.engine.submit(PredictRequest(session=session, tolerance=1e-9))


async def test_a_session_whose_bound_is_unknown_before_the_run_is_not_refused_before_the_run(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(**CUT, radius=1e-7)
    session = (await harness.engine.create_session()).session
    await harness.engine.submit(StepRequest(session, (5,) * 150))
    harness.engine.state_cache.drop(session)
    epsilon = harness.manifest.certificate.error_bound_at(140)
    assert epsilon is not None
    answer = await harness.engine.submit(PredictRequest(session=session, tolerance=epsilon / 2))
    assert answer.error_bound is not None and answer.error_bound <= epsilon / 2
    assert answer.state is StateSource.REBUILT
    resident = await harness.engine.submit(PredictRequest(session=session))
    # The smaller bound above holds only for the answer of the run that rebuilt the state. Later answers from the
    # resident state have the certificate's bound.
    assert (resident.state, resident.error_bound) == (
        StateSource.RESIDENT,
        epsilon,
    )


async def test_the_agreement_of_a_rebuilt_session_has_the_windows_bound(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(**CUT)
    session = (await harness.engine.create_session()).session
    await harness.engine.submit(StepRequest(session, (5,) * 150))
    harness.engine.state_cache.drop(session)
    answer = await harness.engine.submit(PredictRequest(session=session, mode=Mode.BOTH))
    certificate = harness.manifest.certificate
    assert answer.agreement is not None
    assert answer.error_bound == certificate.error_bound_at(140)
    assert answer.agreement.error_bound == certificate.error_bound_at(130)


@pytest.mark.parametrize("parked", [False, True], ids=["resident", "parked"])
async def test_token_logprobs_of_steps_are_those_of_the_score(make_harness: MakeHarness, parked: bool) -> None:
    harness = make_harness(session_history_tokens=64)
    session = (await harness.engine.create_session()).session
    tokens: list[int] = []
    for step in [(5,), (6, 7, 8), (9, 10)]:
        position = len(tokens)
        tokens += step
        request = StepRequest(session, step, expected_position=position, token_logprobs=True)
        if parked:
            harness.engine.state_cache.drop(session)
        answer = await harness.engine.submit(request)
        again = await harness.engine.submit(request)
        score = await harness.engine.score(ScoreRequest(tuple(tokens)))
        for one in (answer, again):
            assert one.token_logprobs == pytest.approx(score.logprobs[position:], abs=1e-5)
            assert one.position == len(tokens)
        assert (answer.replayed, again.replayed) == (False, True)


async def test_token_logprobs_of_a_replay_need_a_token_before_it(make_harness: MakeHarness) -> None:
    harness = make_harness(session_history_tokens=4, max_window=4, window=4)
    session = await start(harness, 5)
    request = StepRequest(session, tuple(range(6, 12)), expected_position=1, token_logprobs=True)
    assert len((await harness.engine.submit(request)).token_logprobs or ()) == 6
    with pytest.raises(InvalidRequest, match="token_logprobs of a replayed step need a token before the step"):
        await harness.engine.submit(request)


async def test_only_requests_for_logits_get_them(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    without = await harness.engine.submit(StepRequest(session, (6,)))
    assert without.logits is None and without.token_logprobs is None
    answer = await harness.engine.submit(StepRequest(session, (7,), logits=True))
    assert answer.logits is not None
    np.testing.assert_allclose(answer.logits, harness.runner.logits([EOS, 5, 6, 7]), rtol=1e-6)
    alone = await harness.engine.submit(PredictRequest((5, 6, 7), logits=True))
    assert alone.logits is not None
    np.testing.assert_allclose(alone.logits, harness.runner.logits([EOS, 5, 6, 7]), rtol=1e-6)
