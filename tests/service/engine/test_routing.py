from __future__ import annotations

import pytest

from service.engine.routing import choose, error_bound, of_session
from service.engine.types import Mode
from tests.service.engine.fakes import byte_vocabulary, make_manifest

CERTIFIED = make_manifest(byte_vocabulary(), contractive=True)
UNCERTIFIED = make_manifest(byte_vocabulary(), contractive=False)


@pytest.mark.parametrize(("k", "position", "bound"), [(5, 5, 0.0), (6, 5, 0.0), (4, 5, None), (0, 0, 0.0)])
def test_only_an_answer_that_knows_every_token_has_a_bound(k: int, position: int, bound: float | None) -> None:
    assert error_bound(CERTIFIED, k, position) == error_bound(UNCERTIFIED, k, position) == bound


@pytest.mark.parametrize(
    ("certified", "position", "window", "tolerance", "k"),
    [
        (True, 100, None, None, 4),
        (True, 100, 9, None, 9),
        (True, 4, None, None, None),
        (True, 9, 9, None, None),
        (True, 100, None, 1.0, None),
        (True, 10, None, 0.0, None),
        (False, 100, None, None, None),
        (False, 100, 9, None, None),
    ],
)
def test_auto_takes_a_window_only_where_it_is_known_to_do(
    certified: bool, position: int, window: int | None, tolerance: float | None, k: int | None
) -> None:
    manifest = CERTIFIED if certified else UNCERTIFIED
    assert choose(manifest, position, window=window, own=4, largest=16, tolerance=tolerance) == k


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
