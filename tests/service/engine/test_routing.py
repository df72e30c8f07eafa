from __future__ import annotations

import pytest

from tests.models.rounding import LAYERS, rounding
from tests.service.engine_harness import CONTRACTIVE
from wane.models.manifest import Certificate
from wane.service.engine.routing import UNASKED, Cost, is_free, of_session, rebuilt_from, ways
from wane.service.types.common import Mode

BOUNDS = tuple(0.5**k for k in range(1, 17))
CERTIFIED = Certificate(
    contractive=True,
    certified=True,
    layers=LAYERS,
    state_error=BOUNDS,
    error_bound=BOUNDS,
    head_diameter=4,
    rounding=rounding(1e-12),
)


def linear(tokens: int) -> Cost:
    """Returns a function that returns the cost of a run. A run over a window of length k costs k. A run over all tokens
    (k is None) costs `tokens`."""
    return lambda k: float(tokens if k is None else k)


def chosen(
    position: int, window: int | None, tolerance: float | None, *, has_radius_output: bool = False
) -> tuple[int | None, ...]:
    """Returns the windows that the engine tries for a model whose own window has 4 tokens, and its largest 12."""
    return ways(
        CERTIFIED,
        position,
        window=window,
        own=4,
        largest=12,
        tolerance=tolerance,
        has_radius_output=has_radius_output,
        cost=linear(position),
    )


@pytest.mark.parametrize(
    ("position", "window", "tolerance", "way"),
    [
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
def test_auto_uses_the_smallest_window_whose_bound_meets_the_tolerance(
    position: int, window: int | None, tolerance: float | None, way: int | None
) -> None:
    assert chosen(position, window, tolerance) == (way,)


@pytest.mark.parametrize(
    ("position", "window", "tolerance", "expected"),
    [
        (100, None, None, (None,)),
        (100, 3, None, (3,)),
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
def test_auto_tries_a_small_window_first_if_runs_output_a_radius(
    position: int, window: int | None, tolerance: float | None, expected: tuple[int | None, ...]
) -> None:
    assert chosen(position, window, tolerance, has_radius_output=True) == expected


@pytest.mark.parametrize(("of_all", "way"), [(4.4, None), (4.5, 4), (1.0, None)])
def test_all_tokens_run_if_they_cost_no_more_than_the_window(of_all: float, way: int | None) -> None:
    def cost(k: int | None) -> float:
        return of_all if k is None else float(k)

    found = ways(CERTIFIED, 100, window=4, own=4, largest=12, tolerance=None, has_radius_output=False, cost=cost)
    assert found == (way,)


@pytest.mark.parametrize("window", [9, 10])
def test_a_window_that_covers_all_tokens_is_the_run_of_all_tokens(window: int) -> None:
    def cost(k: int | None) -> float:
        return 100.0 if k is None else 1.0

    found = ways(CERTIFIED, 9, window=window, own=4, largest=12, tolerance=None, has_radius_output=False, cost=cost)
    assert found == (None,)


@pytest.mark.parametrize(("of_try", "expected"), [(4.0, (4, 8)), (4.1, (8,))])
def test_a_first_try_costs_at_most_half_of_what_it_can_save(of_try: float, expected: tuple[int | None, ...]) -> None:
    cost_model = {4: of_try, 8: 8.0, None: 100.0}
    found = ways(
        CERTIFIED,
        100,
        window=None,
        own=4,
        largest=12,
        tolerance=0.5**8,
        has_radius_output=True,
        cost=cost_model.__getitem__,
    )
    assert found == expected


@pytest.mark.parametrize(
    ("held", "tolerance", "used", "expected"),
    [
        (40, 0.5**4, 9.0, None),
        (41, 0.5**4, 9.0, 4),
        (40, 0.5**4, 8.0, 4),
        (4, 0.5**4, 0.0, None),
        (5, 0.5**4, 0.0, 4),
        (40, 0.5**10, 3.0, None),
        (41, 0.5**10, 3.0, 10),
        (40, 0.0, 0.0, None),
        (40, 0.5**13, 0.0, None),
    ],
)
def test_a_state_is_rebuilt_from_all_tokens_if_later_steps_save_more_than_the_rebuild_costs(
    held: int, tolerance: float | None, used: float, expected: int | None
) -> None:
    found = rebuilt_from(CERTIFIED, 100, held, own=4, largest=12, tolerance=tolerance, used=used, cost=linear(held))
    assert found == expected


@pytest.mark.parametrize(("own", "k"), [(4, None), (9, None), (10, 10), (12, 12)])
def test_without_a_tolerance_auto_uses_the_model_s_window_only_if_its_bound_is_small(own: int, k: int | None) -> None:
    assert (BOUNDS[own - 1] <= UNASKED) is (k is not None)
    found = ways(
        CERTIFIED, 100, window=None, own=own, largest=12, tolerance=None, has_radius_output=True, cost=linear(100)
    )
    assert found == (k,)
    rebuilt = rebuilt_from(CERTIFIED, 100, 50, own=own, largest=12, tolerance=None, used=0.0, cost=linear(50))
    assert rebuilt == k


def test_the_state_of_an_uncertified_model_is_rebuilt_from_all_tokens() -> None:
    cost = linear(50)
    assert rebuilt_from(CONTRACTIVE, 100, 50, own=4, largest=12, tolerance=None, used=0.0, cost=cost) is None


@pytest.mark.parametrize(
    "certificate",
    [
        CONTRACTIVE,
        CERTIFIED.model_copy(update={"certified": False}),
        Certificate(contractive=False, layers=()),
    ],
    ids=["no error bounds", "error bounds that stay too large", "not contractive"],
)
@pytest.mark.parametrize("tolerance", [None, 1.0, 0.0])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("has_radius_output", [False, True])
def test_auto_runs_all_tokens_for_every_uncertified_certificate(
    certificate: Certificate, window: int | None, tolerance: float | None, has_radius_output: bool
) -> None:
    found = ways(
        certificate,
        100,
        window=window,
        own=4,
        largest=16,
        tolerance=tolerance,
        has_radius_output=has_radius_output,
        cost=linear(100),
    )
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
def test_a_session_answers_in_the_requested_mode_or_in_its_own_mode(asked: Mode | None, own: Mode, mode: Mode) -> None:
    assert of_session(asked, own) is mode


@pytest.mark.parametrize(
    ("asked", "own", "free"),
    [
        (None, Mode.AUTO, True),
        (Mode.AUTO, Mode.AUTO, True),
        (Mode.RECURRENT, Mode.AUTO, False),
        (Mode.AUTO, Mode.RECURRENT, False),
        (None, Mode.BOTH, False),
    ],
)
def test_the_engine_may_choose_the_mode_if_neither_the_session_nor_the_request_names_one(
    asked: Mode | None, own: Mode, free: bool
) -> None:
    assert is_free(asked, own) is free
