"""Tests that the bounds and proofs of answers hold against the full-history model, which reads all tokens without
interruption. The models, the tokens, the rewinds and the evictions are random."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins

from tests.models.random_models import BLOCKS
from tests.service.oracle import Small
from wane.models.layer_registry import FADING, Kind
from wane.service.engine.agreement import FLOAT32_ROUNDING
from wane.service.types.answer import Answer
from wane.service.types.common import Mode
from wane.service.types.request import Filter, PredictRequest, StepRequest

EVERYTHING = 11
ALL = Filter(include_unknown=True)
ACTIONS = ("step", "step", "step", "window", "both", "recall", "evict", "rewind", "prompt")


@dataclass
class Tally:
    """The number of answers, the number of answers with an error bound between 0 and 1, and the number of answers with
    a proved most probable token and a bound that is not 0."""

    answers: int = 0
    bounded: int = 0
    proved: int = 0

    def check(self, small: Small, tokens: list[int], answer: Answer) -> None:
        """Compares one answer with the full-history model's answer after `tokens`."""
        truth, _ = small.uninterrupted(tokens)
        self._check(answer, truth)
        if answer.agreement is not None:
            assert answer.modes is not None
            assert not answer.agreement.top1_proved or answer.agreement.top1_match
            if answer.agreement.top1_proved:
                assert answer.modes[Mode.WINDOW].predictions[0].token_id == truth.argmax()

    def _check(self, answer: Answer, truth: np.ndarray) -> None:
        self.answers += 1
        said = np.zeros(EVERYTHING)
        for one in answer.predictions:
            said[one.token_id] = one.probability
        distance = float(np.abs(said - truth).sum()) / 2
        if answer.error_bound is not None:
            assert distance <= answer.error_bound + FLOAT32_ROUNDING
            self.bounded += 0 < answer.error_bound < 1
        if answer.top1_proved:
            assert truth.argmax() == answer.predictions[0].token_id
            self.proved += answer.error_bound != 0.0


async def drive(small: Small, actions: list[str], random: np.random.Generator, tally: Tally) -> None:
    """Runs `actions` on one session: steps, predictions, evictions of its state, and rewinds. The action "prompt"
    predicts from the session's tokens without the session. Checks every answer."""
    engine = small.engine
    session = (await engine.create_session()).session
    tokens: list[int] = []

    async def step(count: int, mode: Mode) -> None:
        some = tuple(random.integers(EVERYTHING, size=count).tolist())
        tokens.extend(some)
        tally.check(
            small, tokens, await engine.submit(StepRequest(session, some, mode=mode, top_k=EVERYTHING, filter=ALL))
        )

    await step(int(random.integers(20, 60)), Mode.RECURRENT)
    for action in actions:
        match action:
            case "step":
                await step(int(random.integers(1, 4)), Mode.RECURRENT)
            case "window" | "both":
                await step(1, Mode(action))
            case "recall":
                k = int(random.integers(1, 25))
                asked = PredictRequest(session=session, mode=Mode.BOTH, window=min(k, 16), top_k=EVERYTHING, filter=ALL)
                tally.check(small, tokens, await engine.submit(asked))
            case "evict":
                engine.state_cache.drop(session)
            case "rewind":
                behind = int(random.integers(0, 4))
                view = await engine.rewind(session, len(tokens) - behind)
                del tokens[len(tokens) - behind :]
                assert view.position == len(tokens)
            case "prompt":
                k = int(random.integers(1, 25))
                for mode, window in ((Mode.WINDOW, k), (Mode.AUTO, None)):
                    request = PredictRequest(tuple(tokens), mode=mode, window=window, top_k=EVERYTHING, filter=ALL)
                    tally.check(small, tokens, await engine.submit(request))
                tolerance = float(10.0 ** -random.integers(0, 6))
                request = PredictRequest(tuple(tokens), tolerance=tolerance, top_k=EVERYTHING, filter=ALL)
                answer = await engine.submit(request)
                assert answer.error_bound is not None and answer.error_bound <= tolerance
                tally.check(small, tokens, answer)
                known = tuple(tokens[-int(random.integers(1, len(tokens))) :])
                for mode, window in ((Mode.RECURRENT, None), (Mode.WINDOW, k), (Mode.BOTH, k), (Mode.AUTO, None)):
                    request = PredictRequest(
                        known, mode=mode, window=window, top_k=EVERYTHING, filter=ALL, truncated=True
                    )
                    tally.check(small, tokens, await engine.submit(request))
                request = PredictRequest(known, tolerance=tolerance, top_k=EVERYTHING, filter=ALL, truncated=True)
                tally.check(small, tokens, await engine.submit(request))
    view = await engine.get_session(session)
    answer = await engine.submit(PredictRequest(session=session, top_k=EVERYTHING, filter=ALL))
    if view.error_bound is not None:  # the answer must have this bound or a smaller one
        assert answer.error_bound is not None and answer.error_bound <= view.error_bound
    report: Any = to_builtins(await engine.report())
    assert report["agreement"]["bound_violations"] == 0
    await engine.close()


@settings(deadline=None, max_examples=40)
@given(
    cell=st.sampled_from(FADING),
    block=st.sampled_from(BLOCKS),
    layers=st.integers(1, 2),
    seed=st.integers(0, 10_000),
    recurrent=st.sampled_from([0.05, 0.2, 0.45, 1.0]),
    beside=st.booleans(),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=5, max_size=30),
)
def test_every_error_bound_holds_against_the_uninterrupted_model(
    cell: Kind, block: str, layers: int, seed: int, recurrent: float, beside: bool, actions: list[str]
) -> None:
    small = Small(cell, block, layers, seed, recurrent, beside=beside)
    asyncio.run(drive(small, actions, np.random.default_rng(seed), Tally()))


@pytest.mark.parametrize("beside", [False, True], ids=["curve", "beside the run"])
def test_the_bounds_and_proofs_of_fast_forgetting_models_hold(beside: bool) -> None:
    tally = Tally()
    for seed in range(2 if beside else 6):
        for cell in FADING:
            small = Small(cell, "plain", 1, seed, 0.05, beside=beside)
            random = np.random.default_rng(seed)
            asyncio.run(drive(small, [*random.choice(ACTIONS, size=30)], random, tally))
    assert tally.answers > 200
    assert tally.bounded > tally.answers / 4
    assert tally.proved > tally.answers / 8


LISTS = (
    Filter(),
    Filter(include_end=True),
    Filter(exclude=(2, 5, 7)),
    Filter(exclude_seen=True),
    Filter(candidates=(3, 8)),
    Filter(candidates=(0, 4, 9), include_end=True),
    Filter(candidates=(6,)),
    Filter(include_unknown=True),
)


def allowed_by(wanted: Filter, known: list[int]) -> list[int]:
    """Returns the tokens that an answer with the filter `wanted` may list. `known` are the tokens of the sequence that
    the engine knows."""
    unknown = () if wanted.include_unknown else (1,)
    excluded = {*unknown, *wanted.exclude, *(known if wanted.exclude_seen else ())} - {0}
    candidates = range(EVERYTHING) if wanted.candidates is None else wanted.candidates
    return [one for one in candidates if one not in excluded and (one or wanted.include_end)]


async def check_lists(small: Small, past: list[int], known: list[int]) -> int:
    """Predicts from `known`, the last tokens of a sequence, with each filter. Checks each proved token against the
    full-history model, which reads `past` before `known`. Returns the number of proofs for lists of more than one
    token."""
    truth, _ = small.uninterrupted([*past, *known])
    proved = 0
    for wanted in LISTS:
        allowed = allowed_by(wanted, known)
        for prove in (False, True):
            request = PredictRequest(
                tuple(known),
                mode=Mode.WINDOW,
                window=16,
                truncated=True,
                filter=wanted,
                prove=prove,
                top_k=EVERYTHING,
            )
            answer = await small.engine.submit(request)
            assert {one.token_id for one in answer.predictions} == set(allowed)
            if answer.top1_proved:
                assert answer.predictions[0].token_id == max(allowed, key=lambda one: truth[one])
                proved += len(allowed) > 1
    return proved


@pytest.mark.parametrize("beside", [False, True], ids=["curve", "beside the run"])
def test_the_proofs_of_filtered_lists_hold(beside: bool) -> None:
    async def check(small: Small, random: np.random.Generator) -> int:
        found = 0
        for _ in range(4):
            past, known = (random.integers(EVERYTHING, size=size).tolist() for size in (20, random.integers(2, 12)))
            found += await check_lists(small, past, known)
        await small.engine.close()
        return found

    proved = 0
    cells: tuple[Kind, ...] = ("gated", "lstm")
    for cell in cells:
        for seed in range(3):
            small = Small(cell, "plain", 1, seed, 0.05, beside=beside, kind="events")
            proved += asyncio.run(check(small, np.random.default_rng(seed)))
    assert proved > 20
