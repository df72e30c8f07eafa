"""Tests of sessions that are created from a history, and of repeated creations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.engine.test_claims import ALL, EVERYTHING, Tally
from tests.service.engine.test_step import expected, ranked
from tests.service.engine_harness import EngineHarness, MakeHarness
from tests.service.oracle import ROUNDING, Small
from wane.models.layer_registry import FADING, Kind
from wane.service.errors import InvalidRequest, PositionConflict, QuotaExceeded, SessionExists
from wane.service.sessions.stores.store import SessionRecord
from wane.service.types.answer import NewSession, SessionView
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import History, Owner, PredictRequest, StepRequest

TOKENS = tuple(range(10, 30))


@pytest.fixture
def harness(make_harness: MakeHarness) -> EngineHarness:
    """A harness with a certified model. The store keeps the last 16 tokens of each session."""
    return make_harness(certified=True, window=4, max_window=140)


def epsilon(harness: EngineHarness, known: int) -> float | None:
    return harness.manifest.certificate.error_bound_at(known)


async def test_a_history_of_all_tokens_is_the_whole_sequence(harness: EngineHarness) -> None:
    view = await harness.engine.create_session("s", history=History((5, 6, 7), 3))
    assert (view.position, view.state, view.error_bound, type(view)) == (3, StateSource.REBUILT, 0.0, NewSession)
    answer = await harness.engine.submit(StepRequest("s", (8,), expected_position=3))
    assert (answer.position, answer.state, answer.error_bound) == (4, StateSource.REBUILT, 0.0)
    assert [(one.token_id, one.logprob) for one in answer.predictions] == expected(harness, [5, 6, 7, 8])
    assert (await harness.engine.rewind("s", 0)).error_bound == 0.0


async def test_a_truncated_history_is_continued_without_a_start_token(harness: EngineHarness) -> None:
    view = await harness.engine.create_session("s", history=History((5, 6, 7), 10))
    assert (view.position, view.state, view.error_bound) == (10, StateSource.REBUILT, epsilon(harness, 3))
    asked = await harness.engine.submit(PredictRequest(session="s"))
    assert [(one.token_id, one.logprob) for one in asked.predictions] == ranked(harness.runner.logits([5, 6, 7]))
    assert (asked.position, asked.state, asked.error_bound) == (10, StateSource.REBUILT, epsilon(harness, 3))
    for position, token in enumerate((8, 9), 11):
        answer = await harness.engine.submit(StepRequest("s", (token,), expected_position=position - 1))
        known = [5, 6, 7, 8, 9][: position - 7]
        assert [(one.token_id, one.logprob) for one in answer.predictions] == ranked(harness.runner.logits(known))
        assert (answer.position, answer.error_bound) == (position, epsilon(harness, len(known)))
        assert (await harness.engine.get_session("s")).error_bound == epsilon(harness, len(known))
    with pytest.raises(PositionConflict, match="at position 12"):
        await harness.engine.submit(StepRequest("s", (8,), expected_position=4))
    replay = await harness.engine.submit(StepRequest("s", (9,), expected_position=11))
    assert (replay.replayed, replay.error_bound) == (True, epsilon(harness, 5))


@pytest.mark.parametrize("mode", [None, Mode.RECURRENT, Mode.WINDOW, Mode.BOTH])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 20])
async def test_every_mode_answers_only_from_the_tokens_of_the_history(
    harness: EngineHarness, mode: Mode | None, count: int
) -> None:
    view = await harness.engine.create_session("s", mode, history=History(TOKENS[:count], 100))
    held = min(count, 16)
    known = min(held, 4) if mode is Mode.WINDOW else held
    assert (view.position, view.error_bound) == (100, epsilon(harness, known))
    asked = await harness.engine.submit(PredictRequest(session="s"))
    assert asked.predictions[0].token_id == harness.runner.logits(TOKENS[:count][-known:]).argmax()
    assert (asked.error_bound, asked.state) == (view.error_bound, view.state)
    if mode in (Mode.WINDOW, Mode.BOTH):
        assert asked.window == min(held, 4)
    if asked.agreement is not None:
        assert asked.agreement.error_bound == epsilon(harness, min(held, 4))
    answer = await harness.engine.submit(StepRequest("s", (7,)))
    grown = min(held + 1, 4) if mode is Mode.WINDOW else held + 1
    assert (answer.position, answer.error_bound) == (101, epsilon(harness, grown))


async def test_without_a_certificate_a_truncated_session_has_no_bound(make_harness: MakeHarness) -> None:
    harness = make_harness()
    assert (await harness.engine.create_session("s", history=History((5, 6), 9))).error_bound is None
    assert (await harness.engine.submit(StepRequest("s", (7,)))).error_bound is None


async def test_the_last_tokens_of_a_long_history_are_kept(harness: EngineHarness) -> None:
    for name, position in (("whole", 20), ("truncated", 70)):
        view = await harness.engine.create_session(name, history=History(TOKENS, position))
        assert (view.position, view.error_bound) == (position, epsilon(harness, 16))
        with pytest.raises(InvalidRequest, match=f"positions {position - 15} to {position}"):
            await harness.engine.rewind(name, position - 16)
        await harness.engine.submit(StepRequest(name, (7,)))
        harness.engine.state_cache.drop(name)
        answer = await harness.engine.submit(PredictRequest(session=name))
        assert answer.predictions[0].token_id == harness.runner.logits([*TOKENS[-15:], 7]).argmax()
        assert answer.error_bound == epsilon(harness, 16)


async def test_a_truncated_session_can_be_rewound_only_to_its_first_stored_token(harness: EngineHarness) -> None:
    await harness.engine.create_session("s", history=History((5, 6, 7), 10))
    await harness.engine.submit(StepRequest("s", (8, 9)))
    with pytest.raises(InvalidRequest, match="positions 8 to 12"):
        await harness.engine.rewind("s", 7)
    view = await harness.engine.rewind("s", 8)
    assert (view.position, view.state, view.error_bound) == (8, StateSource.REBUILT, epsilon(harness, 1))
    answer = await harness.engine.submit(StepRequest("s", (6,), expected_position=8))
    assert answer.predictions[0].token_id == harness.runner.logits([5, 6]).argmax()


async def test_a_lost_session_is_restored_within_its_bound(make_harness: MakeHarness) -> None:
    tokens = tuple(10 + index % 7 for index in range(150))
    before, after = (
        make_harness(certified=True, window=4, max_window=140, session_history_tokens=140) for _ in range(2)
    )
    await before.engine.create_session("s")
    was = await before.engine.submit(StepRequest("s", tokens, top_k=100))
    view = await after.engine.create_session("s", history=History(tokens[-100:], 150))
    now = await after.engine.submit(PredictRequest(session="s", top_k=100))
    assert view.error_bound == now.error_bound == epsilon(after, 100)
    said = [{one.token_id: one.probability for one in answer.predictions} for answer in (was, now)]
    assert now.error_bound is not None and now.error_bound < 0.01
    both = said[0].keys() & said[1].keys()
    assert len(both) > 90
    assert sum(abs(said[0][token] - said[1][token]) for token in both) / 2 <= now.error_bound


# Repeated creations

CREATIONS = [
    (None, None),
    (Mode.WINDOW, None),
    (None, History((5, 6, 7), 3)),
    (None, History((5, 6, 7), 9)),
    (None, History((5, 6), 9)),
    (None, History((4, 6, 7), 9)),
    (Mode.RECURRENT, History((5, 6, 7), 9)),
]


def difference(mode: Mode | None, history: History | None, other_mode: Mode | None, other: History | None) -> str:
    """Returns how a session that was created first differs from another creation."""
    if mode is not other_mode:
        return f"it has the mode {mode or Mode.AUTO}, not {other_mode or Mode.AUTO}$"
    position, other_position = (0 if one is None else one.position for one in (history, other))
    return f"at position {position}, not {other_position}$" if position != other_position else "another history$"


@pytest.mark.parametrize("first", range(len(CREATIONS)))
async def test_a_repeated_creation_is_answered_and_a_different_creation_is_rejected(
    harness: EngineHarness, first: int
) -> None:
    mode, history = CREATIONS[first]
    created = await harness.engine.create_session("s", mode, history=history)
    harness.clock.now_s += 5
    again = await harness.engine.create_session("s", mode, history=history)
    assert (type(created), type(again)) == (NewSession, SessionView)
    assert (again.position, again.mode, again.state, again.error_bound, again.idle_s) == (
        (created.position, created.mode, created.state, created.error_bound, 0.0)
    )
    for index, (other_mode, other_history) in enumerate(CREATIONS):
        if index != first:
            with pytest.raises(SessionExists, match=difference(*CREATIONS[first], other_mode, other_history)):
                await harness.engine.create_session("s", other_mode, history=other_history)
    await harness.engine.submit(StepRequest("s", (7,)))
    with pytest.raises(SessionExists, match="it has made a step"):
        await harness.engine.create_session("s", mode, history=history)


async def test_a_repeated_creation_does_not_count_against_the_quota(harness: EngineHarness) -> None:
    ann, bob = Owner("ann", 1), Owner("bob", 1)
    assert isinstance(await harness.engine.create_session("s", owner=ann), NewSession)
    assert not isinstance(await harness.engine.create_session("s", owner=ann), NewSession)
    assert isinstance(await harness.engine.create_session("s", owner=bob), NewSession)
    with pytest.raises(QuotaExceeded):
        await harness.engine.create_session("t", owner=ann)


@pytest.mark.parametrize("rewinds", [False, True])
async def test_a_read_that_a_step_overtakes_keeps_the_state_after_the_step(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, rewinds: bool
) -> None:
    engine = harness.engine
    await engine.create_session("s", history=History((5, 6), 2))
    await engine.submit(StepRequest("s", (7,)))
    read = engine.sessions.read

    async def overtaken(session: str) -> SessionRecord:
        record = await read(session)
        with monkeypatch.context() as undone:
            undone.setattr(engine.sessions, "read", read)
            if rewinds:
                await engine.rewind(session, 2)
            await engine.submit(StepRequest(session, (8,)))
        return record

    with monkeypatch.context() as patched:
        patched.setattr(engine.sessions, "read", overtaken)
        assert (await engine.get_session("s")).position == 3
    answer = await engine.submit(StepRequest("s", (9,)))
    assert (answer.position, answer.state) == (4 if rewinds else 5, StateSource.RESIDENT)
    known = [5, 6, 8, 9] if rewinds else [5, 6, 7, 8, 9]
    assert [(one.token_id, one.logprob) for one in answer.predictions] == expected(harness, known)


async def test_a_session_does_not_continue_from_the_state_of_an_earlier_session_of_the_same_id(
    harness: EngineHarness,
) -> None:
    await harness.engine.create_session("s", history=History((5, 6), 9))
    await harness.engine.submit(PredictRequest(session="s"))
    harness.clock.now_s += harness.settings.session_ttl_s + 1
    await harness.engine.create_session("s", history=History((7, 8), 9))
    answer = await harness.engine.submit(PredictRequest(session="s"))
    assert [(one.token_id, one.logprob) for one in answer.predictions] == ranked(harness.runner.logits([7, 8]))
    assert answer.state is StateSource.REBUILT


@settings(deadline=None, max_examples=20)
@given(cell=st.sampled_from(FADING), seed=st.integers(0, 2**16), lost=st.integers(1, 40), beside=st.booleans())
async def test_the_bounds_of_a_restored_session_hold(cell: Kind, seed: int, lost: int, beside: bool) -> None:
    small, tally, random = Small(cell, "plain", 1, seed, 0.5, beside=beside), Tally(), np.random.default_rng(seed)
    tokens = random.integers(EVERYTHING, size=42).tolist()
    view = await small.engine.create_session("s", history=History(tuple(tokens[lost:]), 42))
    answer = await small.engine.submit(PredictRequest(session="s", top_k=EVERYTHING, filter=ALL))
    tally.check(small, tokens, answer)
    if view.error_bound is not None:
        assert answer.error_bound is not None and answer.error_bound <= view.error_bound
    for mode in (Mode.RECURRENT, Mode.WINDOW, Mode.BOTH, None, Mode.RECURRENT):
        tokens.append(int(random.integers(EVERYTHING)))
        step = StepRequest("s", (tokens[-1],), mode, top_k=EVERYTHING, filter=ALL)
        tally.check(small, tokens, await small.engine.submit(step))
        small.engine.state_cache.drop("s")
    await small.engine.rewind("s", len(tokens) - 3)
    del tokens[-3:]
    tally.check(small, tokens, await small.engine.submit(PredictRequest(session="s", top_k=EVERYTHING, filter=ALL)))
    await small.engine.close()


@pytest.mark.parametrize("mode", [None, Mode.RECURRENT, Mode.WINDOW, Mode.BOTH])
async def test_the_state_is_within_its_bound_of_the_never_interrupted_state(mode: Mode | None) -> None:
    small = Small("gated", "residual", 2, 3, 0.6, beside=False)
    engine = small.engine
    tokens = np.random.default_rng(0).integers(EVERYTHING, size=40).tolist()
    await engine.create_session("s", mode)
    bounds: list[float] = []
    sources: set[StateSource] = set()
    for position in range(1, len(tokens) + 1):
        await engine.submit(StepRequest("s", (tokens[position - 1],)))
        if position % 7 == 0:
            engine.state_cache.drop("s")
        if position % 3 == 0:
            continue
        before = await engine.sessions.read("s")
        found = await engine.session_state("s")
        assert (await engine.sessions.read("s"))[:8] == before[:8]
        _, truth = small.uninterrupted(tokens[:position])
        assert found.position == position and found.state_error_bound is not None
        distance = float(np.linalg.norm(np.array(found.hidden) - truth))
        assert distance <= found.state_error_bound + ROUNDING
        bounds.append(found.state_error_bound)
        sources.add(found.state)
    if mode is Mode.WINDOW:
        assert sources == {StateSource.WINDOW}
    else:
        assert sources == {StateSource.RESIDENT, StateSource.REBUILT}
    assert min(bounds) == 0.0 and max(bounds) > 0.0
    await engine.drain()
    await engine.close()


async def test_the_state_of_a_session_without_tokens_is_that_of_the_start_token() -> None:
    small = Small("gru", "plain", 1, 5, 0.6, beside=False)
    await small.engine.create_session("s")
    found = await small.engine.session_state("s")
    _, truth = small.uninterrupted([])
    assert (found.position, found.state) == (0, StateSource.RESIDENT)
    assert np.linalg.norm(np.array(found.hidden) - truth) <= ROUNDING
    await small.engine.drain()
    await small.engine.close()
