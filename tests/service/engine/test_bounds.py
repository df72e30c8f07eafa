from __future__ import annotations

import math

import pytest

from tests.models.rounding import LAYERS, rounding
from wane.models.manifest import Certificate
from wane.service.engine.bounds import Bound, bound, meets

ROUNDING = 1e-3
D = 2.0
CERTIFICATE = Certificate(
    contractive=True,
    certified=False,
    layers=LAYERS,
    state_error=(80.0, 0.4, 0.2),
    error_bound=(1.0, 0.3, 0.1),
    head_diameter=D,
    rounding=rounding(ROUNDING),
)
NOTHING = Certificate(contractive=False, layers=())


@pytest.mark.parametrize("certificate", [CERTIFICATE, NOTHING], ids=["contractive", "nothing known"])
@pytest.mark.parametrize(("k", "position"), [(5, 5), (6, 5), (0, 0)])
@pytest.mark.parametrize("radius", [None, 0.5])
def test_an_answer_that_knows_every_token_is_exact(
    certificate: Certificate, k: int, position: int, radius: float | None
) -> None:
    found = bound(certificate, k, position, radius)
    assert found is not None
    assert (found.state, found.variation) == (0.0, 0.0)
    assert found.runs == (ROUNDING if certificate is CERTIFICATE else None)


@pytest.mark.parametrize(("k", "state"), [(1, 80.0), (2, 0.4), (3, 0.2), (9, 0.2)])
def test_a_window_beyond_the_curve_has_its_last_bound(k: int, state: float) -> None:
    found = bound(CERTIFICATE, k, 100)
    assert found is not None and found.state == found.runs == state + ROUNDING
    assert found.variation == pytest.approx(math.tanh(D * (state + ROUNDING) / 4), rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 9, 100])
def test_a_finite_memory_is_exact_from_its_reach_on_only_with_equal_bits(k: int) -> None:
    finite = Certificate(
        contractive=True,
        certified=True,
        layers=(),
        state_error=(80.0, 0.4, 0.0),
        error_bound=(1.0, 0.3, 0.0),
        head_diameter=D,
    )
    found = bound(finite, k, 100)
    assert found is not None
    assert found.variation == (0.0 if k >= 3 else 1.0)
    unequal = finite.model_copy(update={"bit_identical": False})
    assert bound(unequal, k, 100) is None
    carried = unequal.model_copy(update={"of_finite": ROUNDING / 2})
    rounded = math.tanh(D * ROUNDING / 4)
    found, whole = bound(carried, k, 100), bound(carried, 100, 100)
    assert found is not None and whole is not None
    assert found.variation == (pytest.approx(rounded, rel=1e-12) if k >= 3 else 1.0)
    assert whole.state == ROUNDING
    assert whole.variation == pytest.approx(rounded, rel=1e-12)


def test_a_vacuous_bound_is_one() -> None:
    found = bound(CERTIFICATE, 1, 100)
    assert found is not None and found.variation == 1.0


def test_the_smaller_of_curve_and_radius_is_the_bound() -> None:
    found = bound(CERTIFICATE, 2, 100, 0.1)
    assert found is not None
    assert found.state == found.runs == 0.1 + ROUNDING
    assert found.variation == pytest.approx(math.tanh(D * (0.1 + ROUNDING) / 4), rel=1e-12)
    assert found.variation >= math.tanh(D * (0.1 + ROUNDING) / 4)
    assert bound(CERTIFICATE, 2, 100, 9.0) == bound(CERTIFICATE, 2, 100)


@pytest.mark.parametrize("radius", [None, 0.1])
def test_there_is_no_bound_without_a_measured_rounding(radius: float | None) -> None:
    assert bound(NOTHING, 4, 5, radius) is None
    assert bound(CERTIFICATE.model_copy(update={"rounding": None}), 4, 5, radius) is None


def test_a_radius_gives_a_bound_without_a_curve() -> None:
    without = CERTIFICATE.model_copy(update={"state_error": (), "error_bound": ()})
    assert bound(without, 4, 5) is None
    found = bound(without, 4, 5, 0.1)
    assert found is not None and 0 < found.variation < 1


@pytest.mark.parametrize(
    ("found", "tolerance", "met"),
    [
        (None, 1.0, False),
        (Bound(0.0, 0.0, None), 0.0, True),
        (Bound(1.0, 0.25, 1.0), 0.25, True),
        (Bound(1.0, 0.25, 1.0), 0.2, False),
    ],
)
def test_a_bound_meets_a_tolerance_that_is_not_smaller(found: Bound | None, tolerance: float, met: bool) -> None:
    assert meets(found, tolerance) is met
