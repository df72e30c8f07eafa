from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import aclosing

import numpy as np
import pytest

from tests.service.engine_harness import WIDTH, EngineHarness, FixedProfile, known
from tests.service.shipped import PATHS, opened
from wane.models.certificate.propagation import Propagation
from wane.service.chunked import layout
from wane.service.engine.engine import Engine
from wane.service.engine.score import RESIDUAL
from wane.service.engine.top1_proof import MarginProof
from wane.service.errors import DeadlineExceeded, TooLarge, WaneError
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings
from wane.service.types.common import Mode
from wane.service.types.predict import ScoreMethod
from wane.service.types.request import GenerateRequest, PredictRequest, ScoreRequest, StepRequest
from wane.service.types.text import Score, ScoredTokens, ScoreProgress

STEPS = 16  # the number of tokens in a cell; a cell is the part of a chunk that one run reads


def text(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(2, 258, size=count).tolist())


async def both(
    harness: EngineHarness | Served, tokens: tuple[int, ...], tolerance: float | None
) -> tuple[Score, Score]:
    """Scores the tokens sequentially and in parallel chunks. Returns both scores."""
    in_order = await harness.engine.score(ScoreRequest(tokens))
    parallel_cost = await harness.engine.score(ScoreRequest(tokens, method=ScoreMethod.PARALLEL, tolerance=tolerance))
    return in_order, parallel_cost


class Served:
    """An engine that serves a shipped bundle, with a `FixedProfile`."""

    def __init__(self, name: str, warm_ups: Mapping[float, int]) -> None:
        (path,) = (path for path in PATHS if path.name == name)
        bundle, runner = opened(path)
        self.bundle = bundle
        self.engine = Engine(
            bundle.manifest,
            bundle.vocabulary,
            MarginProof(bundle.weights()),
            runner,
            MemoryStore(16, 3600, 2**20),
            Settings(),
            Metrics(),
            throughput=FixedProfile(warm_ups),
        )
        self.engine.warm_up(bundle.propagation())


async def test_parallel_chunks_equal_a_run_in_order_if_the_model_forgets(
    make_harness: Callable[..., EngineHarness],
) -> None:
    harness = make_harness(throughput=FixedProfile({0.0: 300}))
    in_order, parallel_cost = await both(harness, text(2700), 0)
    assert parallel_cost.logprobs == in_order.logprobs
    assert (parallel_cost.chunks, parallel_cost.warm_up, parallel_cost.rounds) == (WIDTH, 300, 1)
    assert (parallel_cost.max_residual, parallel_cost.error_bound) == (0.0, 0.0)
    assert max(len(rows) for role, rows in harness.runner.calls if role == "scan") == WIDTH


@pytest.mark.parametrize("decay", [1.0, 1.01])
async def test_chunks_of_a_model_that_does_not_forget_are_repeated_until_exact(
    make_harness: Callable[..., EngineHarness], decay: float
) -> None:
    harness = make_harness(throughput=FixedProfile({0.0: 32}))
    harness.runner.decay = np.float32(decay)
    tokens = text(500)
    in_order, parallel_cost = await both(harness, tokens, 0)
    assert parallel_cost.logprobs == in_order.logprobs
    cells = -(-len(tokens) // STEPS)
    # All cells run again, except the cells of the first chunk.
    assert parallel_cost.rounds == 1 + cells - cells // WIDTH
    assert (parallel_cost.chunks, parallel_cost.max_residual, parallel_cost.error_bound) == (WIDTH, 0.0, 0.0)


async def test_the_shipped_lstm_is_exact_at_tolerance_0() -> None:
    served = Served("lstm", {0.0: 64})
    tokens = tuple(np.random.default_rng(1).integers(served.bundle.vocabulary.size, size=1100).tolist())
    in_order, parallel_cost = await both(served, tokens, 0)
    await served.engine.close()
    assert parallel_cost.rounds > 1
    assert (parallel_cost.chunks, parallel_cost.error_bound) == (WIDTH, 0.0)
    assert parallel_cost.logprobs == pytest.approx(in_order.logprobs, abs=2e-5)


async def test_after_a_segment_of_repeated_cells_the_rest_runs_in_order(
    make_harness: Callable[..., EngineHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "SEGMENT_TOKENS", 512)
    harness = make_harness(throughput=FixedProfile({0.0: 32}))
    harness.runner.decay = np.float32(1.0)
    in_order, parallel_cost = await both(harness, text(2048), 0)
    assert parallel_cost.logprobs == in_order.logprobs
    assert parallel_cost.chunks == WIDTH
    assert [len(rows[0]) for role, rows in harness.runner.calls if role == "scan"][-6:] == [256] * 6


async def test_cells_are_repeated_only_until_they_reach_a_state_of_the_first_run(
    make_harness: Callable[..., EngineHarness],
) -> None:
    harness = make_harness(throughput=FixedProfile({0.0: 16}))
    tokens = text(2048)
    in_order, parallel_cost = await both(harness, tokens, 0)
    assert parallel_cost.logprobs == in_order.logprobs
    assert 1 < parallel_cost.rounds < len(tokens) / STEPS * 0.75


async def test_without_a_tolerance_the_residual_is_small_and_reported(
    make_harness: Callable[..., EngineHarness],
) -> None:
    harness = make_harness(throughput=FixedProfile({RESIDUAL: 16}))
    in_order, parallel_cost = await both(harness, text(2048), None)
    assert 0 < parallel_cost.max_residual <= RESIDUAL
    assert parallel_cost.error_bound is None  # this model has no certificate
    assert parallel_cost.logprobs != in_order.logprobs
    assert parallel_cost.logprobs == pytest.approx(in_order.logprobs, abs=1e-3)


async def test_a_model_without_a_certificate_meets_a_tolerance_only_by_an_exact_run(
    make_harness: Callable[..., EngineHarness],
) -> None:
    harness = make_harness(throughput=FixedProfile({RESIDUAL: 16, 0.0: 32}))
    in_order, parallel_cost = await both(harness, text(1024), 0.5)
    assert parallel_cost.logprobs == in_order.logprobs
    assert parallel_cost.error_bound == 0.0


@pytest.mark.parametrize("name", ["rnn-stable"])
@pytest.mark.parametrize("tolerance", [None, 1e-2, 2e-4, 1e-7])
async def test_the_bound_of_the_chunk_boundaries_is_within_the_tolerance_and_holds(
    name: str, tolerance: float | None
) -> None:
    served = Served(name, {RESIDUAL: 128, 0.0: 256})
    size = served.bundle.vocabulary.size
    # The first document repeats one token. The second is random over three tokens, and the third over all tokens. The
    # test uses all three, because it is unknown in which of them the model forgets its earlier state most slowly.
    random = np.random.default_rng(2)
    documents = [random.integers(0, count, size=1400) + low for count, low in ((1, 7), (3, 11), (size, 0))]
    for document in documents:
        in_order, parallel_cost = await both(served, tuple(document.tolist()), tolerance)
        bound = parallel_cost.error_bound
        assert bound is not None and bound <= (2e-3 if tolerance is None else tolerance)
        seen = np.abs(np.exp(known(parallel_cost.logprobs)) - np.exp(known(in_order.logprobs))).max()
        # A bound of 0 does not cover rounding differences between batches.
        assert seen <= bound or (bound == 0 and seen < 1e-6)
    await served.engine.close()


class Strict(Propagation):
    """An error propagation for which any difference of the states at a chunk boundary exceeds every tolerance."""

    def __init__(self) -> None:
        pass

    def apart(self, joints: Mapping[str, np.ndarray], tokens: int) -> float | None:
        return 1e6 if any(joint.any() for joint in joints.values()) else 0.0


async def test_chunks_are_repeated_where_their_boundary_exceeds_the_tolerance(
    make_harness: Callable[..., EngineHarness],
) -> None:
    harness = make_harness(certified=True, max_window=200, throughput=FixedProfile({RESIDUAL: 100}))
    harness.engine.scorer.propagation = Strict()
    tolerance = 1e-4
    in_order, parallel_cost = await both(harness, text(1500), tolerance)
    assert parallel_cost.logprobs == in_order.logprobs
    assert (parallel_cost.chunks, parallel_cost.max_residual, parallel_cost.error_bound) == (WIDTH, 0.0, 0.0)
    assert parallel_cost.rounds > 1


async def test_chunks_are_exact_if_rounding_alone_exceeds_the_tolerance() -> None:
    served = Served("gated-stable", {RESIDUAL: 200, 0.0: 400})
    tokens = tuple(np.random.default_rng(1).integers(served.bundle.vocabulary.size, size=3600).tolist())
    in_order, parallel_cost = await both(served, tokens, 1e-5)
    await served.engine.close()
    assert (parallel_cost.chunks, parallel_cost.error_bound) == (WIDTH, 0.0)
    assert parallel_cost.rounds > 1
    assert parallel_cost.logprobs == pytest.approx(in_order.logprobs, abs=1e-5)


async def test_later_segments_are_exact_from_the_start_after_one_that_missed_the_tolerance(
    make_harness: Callable[..., EngineHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "SEGMENT_TOKENS", 1536)
    harness = make_harness(certified=True, max_window=200, throughput=FixedProfile({RESIDUAL: 100, 0.0: 175}))
    harness.engine.scorer.propagation = Strict()
    in_order, parallel_cost = await both(harness, text(3072), 1e-4)
    assert parallel_cost.logprobs == in_order.logprobs
    assert (parallel_cost.error_bound, parallel_cost.warm_up) == (0.0, 100)
    warm_ups = {len(rows[0]) for role, rows in harness.runner.calls if role == "advance"}
    assert {100 % STEPS, 175 % STEPS} <= warm_ups


async def test_a_short_text_and_a_text_in_order_are_one_chunk(make_harness: Callable[..., EngineHarness]) -> None:
    harness = make_harness(throughput=FixedProfile({0.0: 100}))
    for request in (
        ScoreRequest(text(40), method=ScoreMethod.PARALLEL, tolerance=0),
        ScoreRequest(text(2000), tolerance=0.1),
    ):
        summary = await harness.engine.score(request)
        assert (summary.chunks, summary.warm_up, summary.rounds) == (1, None, 1)
        assert (summary.max_residual, summary.error_bound) == (0.0, 0.0)


@pytest.mark.parametrize("method", list(ScoreMethod))
async def test_a_document_is_streamed_in_order_with_progress(
    make_harness: Callable[..., EngineHarness], method: ScoreMethod
) -> None:
    harness = make_harness(throughput=FixedProfile({0.0: 32}))
    tokens = text(1500)
    whole = await harness.engine.score(ScoreRequest(tokens, method=method, tolerance=0))
    seen: list[float | None] = []
    done: list[int] = []
    async with aclosing(await harness.engine.scoring(ScoreRequest(tokens, method=method, tolerance=0))) as scoring:
        async for item in scoring:
            if isinstance(item, ScoredTokens):
                assert item.position == len(seen)
                seen += item.logprobs
            elif isinstance(item, ScoreProgress):
                assert item.total == len(tokens)
                done.append(item.done)
            else:
                summary = item
    assert seen == whole.logprobs
    assert done == sorted(done) and len(set(done)) > 5 and done[-1] == len(tokens)
    assert summary.perplexity == pytest.approx(np.exp(-np.mean(known(whole.logprobs))))


async def test_a_hundred_thousand_tokens_take_bounded_memory(
    make_harness: Callable[..., EngineHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "SEGMENT_TOKENS", 8192)
    monkeypatch.setattr(layout, "RUN_SECONDS", 1e9)  # with the real limit, the slow fake runner would get short cells
    harness = make_harness(throughput=FixedProfile({0.0: 300}))

    async def peak(count: int) -> int:
        tokens = text(count)
        tracemalloc.start()
        try:
            async with aclosing(
                await harness.engine.scoring(ScoreRequest(tokens, method=ScoreMethod.PARALLEL, tolerance=0))
            ) as scoring:
                scored = 0
                async for item in scoring:
                    if isinstance(item, ScoredTokens):
                        scored += len(item.logprobs)
                        harness.runner.calls.clear()
            assert scored == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    shorter, longer = await peak(20_000), await peak(100_000)
    # The limit is 32 bytes for each of the 80 000 further tokens. This is enough for the token's id and
    # log-probability, but not for its state.
    assert longer - shorter < 80_000 * 32


async def test_other_requests_are_answered_while_a_document_is_scored(
    make_harness: Callable[..., EngineHarness],
) -> None:
    harness = make_harness(throughput=FixedProfile({0.0: 300}))
    harness.runner.gate.clear()
    scoring = asyncio.create_task(
        harness.engine.score(ScoreRequest(text(2700), method=ScoreMethod.PARALLEL, tolerance=0))
    )
    await harness.runner.until_busy()
    answer = asyncio.ensure_future(harness.engine.submit(PredictRequest((10, 11))))
    await asyncio.sleep(0)  # the request is queued behind the first run of the document
    harness.runner.gate.set()
    await answer
    assert not scoring.done()
    await scoring
    roles = harness.runner.roles()
    assert roles.index("window") <= 3


async def test_a_cancelled_score_releases_its_states(make_harness: Callable[..., EngineHarness]) -> None:
    harness = make_harness(throughput=FixedProfile({0.0: 300}))
    scoring = asyncio.create_task(
        harness.engine.score(ScoreRequest(text(2700), method=ScoreMethod.PARALLEL, tolerance=0))
    )
    await harness.runner.until_busy()
    await harness.runner.until_busy()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    async with aclosing(
        await harness.engine.scoring(ScoreRequest(text(2700), method=ScoreMethod.PARALLEL, tolerance=0))
    ) as streamed:
        await anext(streamed)
        await anext(streamed)
    # When the harness closes, it checks that only resident states use slots.


async def test_a_deadline_ends_the_scoring_of_a_document(
    make_harness: Callable[..., EngineHarness], travel: Callable[[float], None]
) -> None:
    harness = make_harness(throughput=FixedProfile({0.0: 300}))
    deadline = asyncio.get_running_loop().time() + 60
    request = ScoreRequest(text(2700), method=ScoreMethod.PARALLEL, tolerance=0, deadline=deadline)
    async with aclosing(await harness.engine.scoring(request)) as scoring:
        await anext(scoring)
        travel(2 * 60)
        with pytest.raises(DeadlineExceeded):
            async for _ in scoring:
                pass


async def test_a_run_that_fails_in_the_middle_fails_the_document(make_harness: Callable[..., EngineHarness]) -> None:
    harness = make_harness(throughput=FixedProfile({0.0: 300}))
    harness.runner.poison = 1
    tokens = (*text(2000), 1, *text(600))
    with pytest.raises(WaneError, match="the model failed to run"):
        await harness.engine.score(ScoreRequest(tokens, method=ScoreMethod.PARALLEL, tolerance=0))


async def test_a_document_has_its_own_longer_limit(
    make_harness: Callable[..., EngineHarness],
) -> None:
    harness = make_harness(max_input_tokens=20, max_scored_tokens=30)
    assert len((await harness.engine.score(ScoreRequest(text(30)))).logprobs) == 30
    with pytest.raises(TooLarge, match="31 tokens, but at most 30"):
        await harness.engine.score(ScoreRequest(text(31)))
    with pytest.raises(TooLarge, match="at most 20"):
        await harness.engine.encode("x" * 25)
    assert len(await harness.engine.encode("x" * 25, document=True)) == 25


@pytest.mark.parametrize("decay", [0.9, 1.0])
async def test_a_long_prompt_in_parallel_chunks_has_the_same_state(
    make_harness: Callable[..., EngineHarness], decay: float
) -> None:
    tokens = text(2700)
    answers = []
    for throughput in (None, FixedProfile({0.0: 300})):
        harness = make_harness(throughput=throughput)
        harness.runner.decay = np.float32(decay)
        answers.append(await harness.engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT)))
        advanced = [len(rows) for role, rows in harness.runner.calls if role == "advance"]
        assert max(advanced) == (1 if throughput is None else WIDTH)
    in_order, parallel_cost = answers
    assert parallel_cost.predictions == in_order.predictions
    assert parallel_cost.error_bound == 0.0


async def test_a_generation_and_a_session_continue_a_long_prompt(make_harness: Callable[..., EngineHarness]) -> None:
    prompt = text(1500)
    texts, steps = [], []
    for throughput in (None, FixedProfile({0.0: 300})):
        harness = make_harness(throughput=throughput)
        async with aclosing(
            await harness.engine.generate(GenerateRequest(prompt, max_tokens=5, temperature=0))
        ) as generated:
            texts.append([item.token_id async for item in generated if hasattr(item, "token_id")])
        await harness.engine.create_session("s")
        steps += [await harness.engine.submit(StepRequest("s", tokens)) for tokens in (prompt, (10, 11))]
    assert texts[0] == texts[1]
    assert [answer.predictions for answer in steps[:2]] == [answer.predictions for answer in steps[2:]]


async def test_joints_of_a_residual_gated_model_leave_a_bound_below_1() -> None:
    served = Served("gated-stable", {1e-5: 200, 0.0: 600})
    tokens = tuple(np.random.default_rng(1).integers(served.bundle.vocabulary.size, size=2700).tolist())
    in_order, parallel = await both(served, tokens, None)
    ends = [
        (await served.engine.score(ScoreRequest(tokens, method=method, truncated=True))).error_bounds
        for method in (ScoreMethod.SEQUENTIAL, ScoreMethod.PARALLEL)
    ]
    await served.engine.close()
    assert 0 < parallel.max_residual <= 1e-5
    assert parallel.error_bound is not None and 0 < parallel.error_bound < 0.5
    probabilities = [np.exp([one or 0.0 for one in score.logprobs]) for score in (parallel, in_order)]
    moved = np.abs(probabilities[0] - probabilities[1])
    assert 0 < moved.max() <= parallel.error_bound
    alone, joined = (np.array([1.0 if bound is None else bound for bound in bounds or ()]) for bounds in ends)
    # The certificate's curve is almost 1 for the first tokens.
    assert np.all(alone <= joined) and np.any(alone < joined) and joined[400:].max() < 0.6
