from __future__ import annotations

import pytest

from models.manifest import Certificate
from service.engine.routing import of_session, ways
from service.engine.types import Mode
from tests.service.engine.fakes import CONTRACTIVE, ROUNDING

BOUNDS = tuple(0.5**k for k in range(1, 17))
CERTIFIED = Certificate(
    contractive=True, certified=True, layers=(), state_error=BOUNDS, error_bound=BOUNDS, rounding=ROUNDING
)


@pytest.mark.parametrize(
    ("position", "window", "tolerance", "way"),
    [
        (100, None, None, 4),
        (100, 9, None, 9),
        (4, None, None, None),
        (9, 9, None, None),
        (100, None, 1.0, 1),
        (100, None, 0.125, 3),
        (3, None, 0.125, None),
        (100, 9, 0.125, 9),
        (100, 2, 0.125, None),
        (100, None, 1e-9, None),
        (100, None, 0.5**13, None),
        (10, None, 0.0, None),
    ],
)
def test_auto_takes_the_smallest_window_whose_bound_meets_the_tolerance(
    position: int, window: int | None, tolerance: float | None, way: int | None
) -> None:
    found = ways(CERTIFIED, position, window=window, own=4, largest=12, tolerance=tolerance, beside=False)
    assert found == (way,)


@pytest.mark.parametrize(
    ("position", "window", "tolerance", "expected"),
    [
        (100, None, None, (4,)),
        (100, None, 0.125, (3,)),
        (100, None, 0.5**4, (4,)),
        (100, None, 0.5**7, (7,)),
        (100, None, 0.5**8, (4, 8)),
        (100, None, 0.0, (4, None)),
        (8, None, 0.0, (4, None)),
        (7, None, 0.0, (None,)),
        (100, 9, 0.0, (9, None)),
        (17, 9, 0.0, (None,)),
        (100, 9, 0.5**9, (9,)),
    ],
)
def test_where_windows_bound_themselves_a_small_one_is_tried_before_the_way_that_is_sure(
    position: int, window: int | None, tolerance: float | None, expected: tuple[int | None, ...]
) -> None:
    found = ways(CERTIFIED, position, window=window, own=4, largest=12, tolerance=tolerance, beside=True)
    assert found == expected


@pytest.mark.parametrize(
    "certificate",
    [
        CONTRACTIVE,
        CERTIFIED.model_copy(update={"certified": False}),
        Certificate(contractive=False, layers=()),
    ],
    ids=["no curve", "a curve that stays too large", "not contractive"],
)
@pytest.mark.parametrize("tolerance", [None, 1.0, 0.0])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("beside", [False, True])
def test_auto_runs_everything_where_a_model_is_not_certified(
    certificate: Certificate, window: int | None, tolerance: float | None, beside: bool
) -> None:
    found = ways(certificate, 100, window=window, own=4, largest=16, tolerance=tolerance, beside=beside)
    assert found == (None,)


@pytest.mark.parametrize(
    ("asked", "own", "mode"),
    [
        (None, Mode.AUTO, Mode.RECURRENT),
        (Mode.AUTO, Mode.WINDOW, Mode.WINDOW),
        (None, Mode.BOTH, Mode.BOTH),
        (Mode.WINDOW, Mode.RECURRENT, Mode.WINDOW),
        (Mode.RECURRENT, Mode.WINDOW, Mode.RECURRENT),
    ],
)
def test_a_session_answers_in_the_mode_asked_for_or_else_its_own(asked: Mode | None, own: Mode, mode: Mode) -> None:
    assert of_session(asked, own) is mode
