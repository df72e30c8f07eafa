from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.stack.conftest import BUNDLE
from tests.stack.harness.reference_run import ReferenceRun
from wane.models.bundle import Bundle
from wane.models.reference import Reference

TOKENS = (5, 6, 7, 8, 9)


@pytest.fixture(scope="module")
def reference_run() -> ReferenceRun:
    return ReferenceRun(BUNDLE)


def answer(position: int, **fields: Any) -> dict[str, Any]:
    """Returns the correct answer after the first `position` tokens."""
    bundle = Bundle.open(BUNDLE)
    reference = Reference(bundle.manifest.architecture, bundle.weights())
    state = reference.zero_state(1)
    for token in (bundle.manifest.vocabulary.eos_id, *TOKENS[:position]):
        logits, _, state = reference.step(np.array([token]), state)
    probabilities = np.exp(logits[0] - logits[0].max())
    probabilities /= probabilities.sum()
    listed = [
        {"token_id": int(token), "probability": float(probabilities[token])} for token in np.argsort(-probabilities)
    ]
    return {"predictions": listed[:5], "state": "resident", "error_bound": 0.0, "top1_proved": True, **fields}


def shifted(document: dict[str, Any], by: float) -> dict[str, Any]:
    """Returns the answer with a larger probability of the first token. The probabilities of the other listed tokens
    stay the same."""
    first, *rest = document["predictions"]
    return {**document, "predictions": [{**first, "probability": first["probability"] + by}, *rest]}


def test_correct_answers_pass_for_several_sessions_of_any_length(reference_run: ReferenceRun) -> None:
    sessions = [(TOKENS[:2], {2: answer(2)}), (TOKENS, {1: answer(1), 5: answer(5)})]
    compared = reference_run.compare(sessions)
    assert (compared.answers, compared.proved, compared.broken) == (3, 3, ())


@pytest.mark.parametrize(("bound", "distance", "holds"), [(0.01, 0.009, True), (0.01, 0.02, False), (0.0, 0.01, False)])
def test_an_answer_passes_only_within_its_bound(
    reference_run: ReferenceRun, bound: float, distance: float, holds: bool
) -> None:
    document = shifted(answer(3, state="rebuilt", error_bound=bound), distance)
    compared = reference_run.compare([(TOKENS, {3: document})])
    assert (not compared.broken) == holds
    assert compared.largest == pytest.approx(distance, abs=1e-6)
    assert (compared.rebuilt, compared.bounded) == (1, int(bound > 0))


def test_an_answer_of_another_position_fails(reference_run: ReferenceRun) -> None:
    compared = reference_run.compare([(TOKENS, {4: answer(3)})])
    assert len(compared.broken) >= 1 and "session 0 at 4" in compared.broken[0]


def test_a_proved_first_token_must_equal_the_reference_s(reference_run: ReferenceRun) -> None:
    document = answer(3, error_bound=1.0)
    first, second, *rest = document["predictions"]
    document["predictions"] = [second, first, *rest]
    (broken,) = reference_run.compare([(TOKENS, {3: document})]).broken
    assert "proved" in broken
    assert reference_run.compare([(TOKENS, {3: {**document, "top1_proved": False}})]).broken == ()
