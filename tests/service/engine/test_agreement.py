from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from wane.service.engine.agreement import AgreementStatistics, compare, violates
from wane.service.engine.bounds import Bound
from wane.service.types.answer import Agreement

P = np.log(np.array([0.5, 0.3, 0.2], np.float32))
Q = np.log(np.array([0.25, 0.6, 0.15], np.float32))
HERE, THERE = np.array([0.0, 3.0], np.float32), np.array([4.0, 0.0], np.float32)


def make(**changes: Any) -> Agreement:
    agreement = compare(P, Q, HERE, THERE, None, False)
    return replace(agreement, **changes)


def test_distances_match_their_definitions() -> None:
    agreement = compare(P, Q, HERE, THERE, None, False)
    assert agreement.total_variation == pytest.approx(0.3)
    assert agreement.kl == pytest.approx(
        0.5 * np.log(0.5 / 0.25) + 0.3 * np.log(0.3 / 0.6) + 0.2 * np.log(0.2 / 0.15), rel=1e-5
    )
    assert agreement.max_logit_difference == pytest.approx(np.log(0.5 / 0.25))
    assert agreement.state_distance == pytest.approx(5.0)
    assert agreement.top1_match is False


def test_adding_a_constant_to_all_logits_does_not_change_the_total_variation() -> None:
    agreement = compare(P, P + 2, HERE, HERE, None, False)
    assert agreement.total_variation == pytest.approx(0.0, abs=1e-6)
    assert agreement.max_logit_difference == pytest.approx(2.0)
    assert agreement.state_distance == 0.0
    assert agreement.top1_match is True


@pytest.mark.parametrize(
    ("bound", "shown"), [(None, (None, None)), (Bound(0.5, 0.25, 0.5), (0.5, 0.25)), (Bound(0, 0, 1e-6), (0.0, 0.0))]
)
@pytest.mark.parametrize("proved", [True, False])
def test_an_agreement_has_its_bounds_and_proof(
    bound: Bound | None, shown: tuple[float | None, float | None], proved: bool
) -> None:
    agreement = compare(P, P, HERE, HERE, bound, proved)
    assert (agreement.state_error_bound, agreement.error_bound) == shown
    assert (agreement.top1_match, agreement.top1_proved) == (True, proved)


@pytest.mark.parametrize(
    ("bound", "distance", "violated"),
    [(None, 1.0, False), (0.1, 0.09, False), (0.1, 0.11, True), (0.0, 1e-6, False), (0.0, 1e-4, True)],
)
def test_a_distance_over_the_bound_plus_rounding_violates_the_bound(
    bound: float | None, distance: float, violated: bool
) -> None:
    assert violates(make(error_bound=bound, total_variation=distance)) is violated


@pytest.mark.parametrize(
    ("bound", "distance", "violated"), [(None, 9.0, False), (0.1, 0.1, False), (0.1, 0.11, True), (0.0, 1e-6, False)]
)
def test_two_states_further_apart_than_their_bound_violate_the_bound(
    bound: float | None, distance: float, violated: bool
) -> None:
    assert violates(make(state_error_bound=bound, state_distance=distance)) is violated


@pytest.mark.parametrize(("proved", "match"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_wrong_proof_is_a_violation(proved: bool, match: bool) -> None:
    assert violates(make(top1_proved=proved, top1_match=match)) is (proved and not match)


def test_the_running_figures_count_every_pair() -> None:
    statistics = AgreementStatistics()
    for distance, match, bound in ((0.1, True, None), (0.3, False, 0.2), (0.2, True, 0.0)):
        statistics.add(
            make(
                total_variation=distance,
                top1_match=match,
                top1_proved=bound == 0.0 and match,
                error_bound=bound,
                max_logit_difference=10 * distance,
            )
        )
    assert to_builtins(statistics.report()) == {
        "compared": 3,
        "top1_match_rate": pytest.approx(2 / 3),
        "total_variation": {"mean": pytest.approx(0.2), "max": 0.3},
        "max_logit_difference": pytest.approx(3.0),
        "error_bound": {"bounded": 2, "mean": pytest.approx(0.1), "max": 0.2},
        "bound_violations": 2,
        "top1_proved_rate": pytest.approx(1 / 3),
    }


def test_figures_without_comparisons_are_null() -> None:
    document: Any = to_builtins(AgreementStatistics().report())
    assert document["compared"] == document["bound_violations"] == 0
    assert document["total_variation"] == {"mean": None, "max": None}
    assert document["error_bound"] == {"bounded": 0, "mean": None, "max": None}
    assert document["top1_match_rate"] is document["top1_proved_rate"] is None
