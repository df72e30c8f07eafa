"""Tests of the lists of most probable tokens. A list is computed either from all logits, or from the largest logits if
the graph outputs them. Both ways must give the same list."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.engine_harness import HIDDEN, FakeRunner, byte_vocabulary, make_manifest, name_vocabulary
from wane.models.bundle_checks import TOP
from wane.service.batching import batch
from wane.service.batching.batch import Row, Work
from wane.service.engine.forward import RunResult
from wane.service.engine.logits import (
    Ranking,
    Rankings,
    excluded_by_each,
    largest_of_each,
    listed,
    log_softmax,
)
from wane.service.runners.outputs import Outputs
from wane.service.runners.runner import LOG_SUM_EXP, TOP_IDS, TOP_LOGITS, Array
from wane.service.state.pool import StatePool
from wane.service.types.answer import Prediction
from wane.service.types.request import Filter

VOCABULARY = byte_vocabulary()
K = 16


def random_logits(seed: int) -> NDArray[np.float32]:
    """Returns random logits. Some logits are equal."""
    logits = 3 * np.random.default_rng(seed).normal(size=VOCABULARY.size)
    rounded: NDArray[np.float32] = np.round(logits, 1).astype(np.float32)
    return rounded


def graph_outputs(logits: NDArray[np.float32]) -> dict[str, Array]:
    """Returns the outputs that a graph computes from logits (B, V): the ids and values of the K largest logits, and the
    log-sum-exp."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :K]
    total = np.log(np.exp(logits.astype(np.float64)).sum(axis=1)).astype(np.float32)
    return {TOP_IDS: ids, TOP_LOGITS: np.take_along_axis(logits, ids, axis=1), LOG_SUM_EXP: total}


def predictions(logits: NDArray[np.float32], count: int, top: dict[str, Array] | None = None) -> tuple[Prediction, ...]:
    """Returns the `count` most probable tokens for a run whose graph outputs `logits` and the arrays in `top`."""
    row = Row(Outputs({"logits": logits[None], **(top or {})}), 0)
    return listed(Ranking(len(logits)).largest(RunResult(row), count), count, VOCABULARY)


@pytest.mark.parametrize("count", [1, 5, K])
def test_the_graphs_top_logits_give_the_same_predictions(count: int) -> None:
    for seed in range(20):
        logits = random_logits(seed)
        whole = predictions(logits, count)
        from_top = predictions(logits, count, graph_outputs(logits[None]))
        for one, other in zip(whole, from_top, strict=True):
            assert (one.token_id, one.token, one.bytes) == (other.token_id, other.token, other.bytes)
            assert other.logprob == pytest.approx(one.logprob, abs=1e-6)
            assert other.probability == pytest.approx(one.probability, rel=2e-6)


def test_more_predictions_than_the_graph_outputs_come_from_all_logits() -> None:
    logits = random_logits(0)
    wrong = graph_outputs(random_logits(1)[None])
    del wrong[LOG_SUM_EXP]
    assert predictions(logits, K + 1, wrong) == predictions(logits, K + 1)
    assert len(predictions(logits, VOCABULARY.size + 5, wrong)) == VOCABULARY.size


def test_equal_logits_are_ordered_by_id() -> None:
    logits = np.zeros(VOCABULARY.size, np.float32)
    logits[[9, 3]] = 1
    assert [one.token_id for one in predictions(logits, 4)] == [3, 9, 0, 1]


def test_the_probability_of_an_almost_certain_token_is_at_most_one() -> None:
    logits = np.zeros(VOCABULARY.size, np.float32)
    logits[7] = 40
    outputs = graph_outputs(logits[None])
    # In float32, rounding may make the log-sum-exp smaller than the largest logit, 40.
    outputs[LOG_SUM_EXP] = np.nextafter(np.array([40], np.float32), np.float32(0))
    (found,) = predictions(logits, 1, outputs)
    assert (found.token_id, found.logprob, found.probability) == (7, 0.0, 1.0)


def test_each_row_of_a_batch_has_its_own_largest_logits() -> None:
    runner = FakeRunner(VOCABULARY.size)
    pool = StatePool(make_manifest(VOCABULARY).state, HIDDEN, 1 << 16)
    for role in ("step", "window"):
        rows = batch.run([Work(role, np.array([token])) for token in (2, 3, 4)], pool, runner)
        for row in rows:
            assert isinstance(row, batch.Row)
            assert row.logits is not None
            logprobs = log_softmax(row.logits)
            for count in (2, TOP):
                found = row.largest(count)
                assert found is not None
                assert found.ids[:count] == np.argsort(-row.logits, kind="stable")[:count].tolist()
                assert found.logits == row.logits[found.ids].tolist()
                assert found.logprobs == pytest.approx(logprobs[found.ids], abs=1e-5)
                assert found.probabilities == pytest.approx(np.exp(logprobs[found.ids]), abs=1e-5)
            assert row.largest(TOP + 1) is None
    runner.puts_out_top = False
    (alone,) = batch.run([Work("window", np.array([2]))], pool, runner)
    assert isinstance(alone, batch.Row)
    assert alone.most == 0


@pytest.mark.parametrize("count", [0, 3, 400])
@pytest.mark.parametrize("includes_end", [False, True])
def test_a_ranking_excludes_seen_tokens_but_not_the_end(count: int, includes_end: bool) -> None:
    vocabulary = name_vocabulary(names=[f"item {index}" for index in range(300)])
    known = np.random.default_rng(count).integers(0, vocabulary.size, count)
    wanted = Filter(exclude_seen=True, include_end=includes_end)
    found = Rankings(vocabulary).of(wanted, known)
    excluded = {*vocabulary.unlisted, *known.tolist()} - {vocabulary.eos_id}
    if not includes_end:
        excluded.add(vocabulary.eos_id)
    every = np.arange(vocabulary.size)
    flags = [token in excluded for token in range(vocabulary.size)]
    assert found.seen_tokens == count
    assert found.excludes(every).tolist() == flags
    for few in (every[:4], every[:32].reshape(2, 16)):
        assert found.excludes(few).tolist() == np.array(flags)[few].tolist()
    assert found.ids is not None
    assert found.ids.tolist() == every[~np.array(flags)].tolist()


@pytest.mark.parametrize("count", [0, 3, 400])
def test_rankings_exclude_the_same_tokens_together_as_each_alone(count: int) -> None:
    vocabulary = name_vocabulary(names=[f"item {index}" for index in range(300)])
    rng, rankings = np.random.default_rng(count), Rankings(vocabulary)
    seen = Filter(exclude_seen=True)
    filters = [Filter(), replace(seen, include_end=True), Filter(exclude=(7, 8)), replace(seen, exclude=(9,)), seen]
    found = [rankings.of(one, rng.integers(0, vocabulary.size, count + index)) for index, one in enumerate(filters)]
    ids = rng.integers(0, vocabulary.size, (len(found), 16))
    ids[:, 0] = vocabulary.eos_id
    together = excluded_by_each(found, ids)
    assert together.tolist() == [ranking.excludes(row).tolist() for ranking, row in zip(found, ids, strict=True)]


@pytest.mark.parametrize("count", [1, 6])
def test_rankings_list_the_same_tokens_together_as_each_alone(count: int) -> None:
    vocabulary = name_vocabulary(names=[f"item {index}" for index in range(40)])
    rng, rankings = np.random.default_rng(count), Rankings(vocabulary)
    known = [rng.permutation(vocabulary.size)[: vocabulary.size - left] for left in (30, 12, 9, 4)]
    found = [rankings.of(Filter(exclude_seen=True), tokens) for tokens in known]
    logits = np.round(rng.normal(size=(len(found), vocabulary.size)), 1).astype(np.float32)  # some are equal
    ids, values = largest_of_each(found, logits, count)
    for row, ranking in enumerate(found):
        alone = ranking.largest(RunResult(Row(Outputs({"logits": logits}), row)), count)
        listed_count = len(alone.ids)
        assert (ids[row, :listed_count].tolist(), values[row, :listed_count].tolist()) == (alone.ids, alone.logits)
        assert listed_count == count or values[row, -1] == -np.inf
