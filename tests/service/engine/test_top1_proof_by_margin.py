"""Tests of the margin proof. It is compared with a check of every token. A proved token must stay the most probable one
if the hidden vector is moved by the whole error in the worst direction."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from wane.service.batching.batch import Row
from wane.service.engine.forward import RunResult
from wane.service.engine.logits import Ranking
from wane.service.engine.top1_proof import MarginProof
from wane.service.runners.outputs import Outputs
from wane.service.runners.runner import HIDDEN, LOG_SUM_EXP, TOP_IDS, TOP_LOGITS

CASES = 3000
SIZE, WIDTH = 40, 8


def make(seed: int, size: int = SIZE, width: int = WIDTH) -> tuple[dict[str, NDArray[np.float32]], MarginProof]:
    random = np.random.default_rng(seed)
    lengths = np.exp(random.normal(size=(size, 1)))
    weights = {
        "head.weight": (lengths * random.normal(size=(size, width))).astype(np.float32),
        "head.bias": random.normal(size=size).astype(np.float32),
    }
    return weights, MarginProof(weights)


def logits_of(weights: dict[str, NDArray[np.float32]], hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = weights["head.weight"] @ hidden + weights["head.bias"]
    return logits


def proves(
    margin: MarginProof,
    logits: NDArray[np.float32],
    hidden: NDArray[np.float32],
    error: float,
    *,
    by_graph: bool = False,
) -> bool:
    """Returns whether the margin proves the first of all tokens. by_graph: whether the graph lists the first two."""
    ids = np.argsort(-logits, kind="stable")[:2]
    outputs = {"logits": logits, HIDDEN: hidden, TOP_IDS: ids, TOP_LOGITS: logits[ids], LOG_SUM_EXP: np.float32(0)}
    put_out = Outputs({name: np.asarray(values)[None] for name, values in outputs.items()})
    result, ranking = RunResult(Row(put_out, 0)) if by_graph else RunResult.of(logits, hidden), Ranking(len(logits))
    return margin.proves(ranking, ranking.largest(result, 2), result.row, error)


def leads(weights: dict[str, NDArray[np.float32]], logits: NDArray[np.float32]) -> tuple[int, NDArray[np.float64]]:
    """Returns the most probable token and, for every other token, the largest error of the hidden vector at which the
    most probable token keeps its lead over the other token. This error is the difference of the two logits divided by
    the distance between the two tokens' rows of the output layer's weight."""
    rows = weights["head.weight"].astype(np.float64)
    first = int(logits.argmax())
    apart = np.linalg.norm(rows - rows[first], axis=1)
    apart[first] = 1.0
    lead = logits[first].astype(np.float64) - logits
    lead[first] = np.inf
    return first, lead / apart


@pytest.mark.parametrize("seed", range(6))
def test_no_state_within_the_error_changes_a_proved_token(seed: int) -> None:
    weights, margin = make(seed)
    random = np.random.default_rng(seed)
    proved = refused = 0
    for _ in range(CASES // 6):
        hidden = (3 * random.normal(size=WIDTH)).astype(np.float32)
        logits = logits_of(weights, hidden)
        first, bears = leads(weights, logits)
        nearest = int(bears.argmin())
        error = float(bears[nearest] * np.exp(0.5 * random.normal()))
        if not proves(margin, logits, hidden, error):
            assert error > bears[nearest] * (1 - 1e-3), (
                "the margin proof failed for an error at which the most probable token keeps its lead"
            )
            refused += 1
            continue
        proved += 1
        # Moves the hidden vector by the error in two directions: in the worst direction, in which the token `nearest`
        # is the first to overtake the most probable token, and in a random direction.
        rows = weights["head.weight"].astype(np.float64)
        towards = rows[nearest] - rows[first]
        for direction in (towards, random.normal(size=WIDTH)):
            moved = hidden + direction * (error / np.linalg.norm(direction))
            assert int(logits_of(weights, moved.astype(np.float32)).argmax()) == first
    assert proved > CASES / 60 and refused > CASES / 60


def test_a_lead_smaller_than_the_rounding_error_proves_nothing() -> None:
    weights, margin = make(0)
    hidden = np.ones(WIDTH, np.float32)
    logits = logits_of(weights, hidden)
    assert proves(margin, logits, hidden, 0.0)
    first, second = np.argsort(-logits)[:2]
    logits[second] = np.nextafter(logits[first], np.float32(-np.inf))
    assert not proves(margin, logits, hidden, 0.0)
    logits[second] = logits[first]
    assert not proves(margin, logits, hidden, 0.0)


@pytest.mark.parametrize("error", [np.inf, np.nan])
def test_an_unbounded_error_proves_nothing(error: float) -> None:
    weights, margin = make(0)
    hidden = np.ones(WIDTH, np.float32)
    assert not proves(margin, logits_of(weights, hidden), hidden, error)


def test_the_output_matrix_may_be_the_embedding() -> None:
    weights, margin = make(0)
    tied = MarginProof({"embedding.weight": weights["head.weight"], "head.bias": weights["head.bias"]})
    hidden = np.ones(WIDTH, np.float32)
    logits = logits_of(weights, hidden)
    for error in (0.0, 1e-3, 1e-2, 1e-1, 1.0):
        assert proves(tied, logits, hidden, error) is proves(margin, logits, hidden, error)


def test_tokens_that_the_row_norms_cannot_rule_out_are_checked_individually() -> None:
    random = np.random.default_rng(3)
    rows = np.full((500, WIDTH), 10.0) + 1e-3 * random.normal(size=(500, WIDTH))  # the rows are long and close together
    weights = {"head.weight": rows.astype(np.float32), "head.bias": np.linspace(0, -1, 500).astype(np.float32)}
    weights["head.bias"][0] = 0.1
    margin, hidden = MarginProof(weights), np.zeros(WIDTH, np.float32)
    logits = logits_of(weights, hidden)
    _, bears = leads(weights, logits)
    least = float(bears.min())
    assert least > 1.0, f"the test needs a lead that survives an error above 1, but this lead survives only {least}"
    # The factor 0.95 leaves 5 % for rounding errors, which are large because the rows are long.
    assert proves(margin, logits, hidden, 0.95 * least)
    assert not proves(margin, logits, hidden, 1.001 * least)


@pytest.mark.parametrize("seed", range(6))
def test_the_two_most_probable_tokens_decide_most_answers(seed: int) -> None:
    weights, margin = make(seed)
    random = np.random.default_rng(seed)
    counts = {True: 0, False: 0, None: 0}
    for _ in range(CASES // 6):
        hidden = (3 * random.normal(size=WIDTH)).astype(np.float32)
        logits = logits_of(weights, hidden)
        error = 0.1 * np.exp(random.normal())
        first, second = np.argsort(-logits, kind="stable")[:2].tolist()
        length = float(np.linalg.norm(hidden.astype(np.float64)))
        settled = margin.settles(first, second, float(logits[first]) - float(logits[second]), length, error)
        whole = margin.has_no_rival(logits, hidden, error, first)
        assert settled in (None, whole)
        assert [proves(margin, logits, hidden, error, by_graph=by_graph) for by_graph in (True, False)] == [whole] * 2
        counts[settled] += 1
    assert counts[True] and counts[False]
    assert counts[None] < CASES // 6 / 2


def test_a_mixture_with_an_unbounded_error_proves_nothing() -> None:
    _, margin = make(0)
    lengths = np.zeros(2)
    probabilities, of_network = np.array([[0.9, 0.05], [0.9, 0.05]]), np.array([0.1, 0.1])
    proved = margin.proves_mixtures(probabilities, lengths, of_network, np.array([1e-6, np.inf]))
    assert proved.tolist() == [True, False]


@pytest.mark.parametrize("count", [2, 6])
def test_the_most_probable_tokens_of_many_rows_decide_as_all_tokens_do(count: int) -> None:
    weights, margin = make(7)
    random = np.random.default_rng(7)
    hidden = (3 * random.normal(size=(500, WIDTH))).astype(np.float32)
    logits = np.stack([logits_of(weights, row) for row in hidden])
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    errors = np.array([leads(weights, row)[1].min() for row in logits]) * np.exp(0.5 * random.normal(size=500))
    top = np.take_along_axis(logits, ids, axis=1).astype(np.float64)
    settled = margin.settled(ids, top, np.linalg.norm(hidden.astype(np.float64), axis=1), errors)
    whole = [margin.has_no_rival(*row) for row in zip(logits, hidden, errors.tolist(), ids[:, 0].tolist(), strict=True)]
    assert all(found in (decided, -1) for found, decided in zip(settled.tolist(), whole, strict=True))
    assert 0 < (settled < 0).sum() < 400
    assert 0 < sum(whole) < 500
