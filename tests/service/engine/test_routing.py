from __future__ import annotations

import pytest

from models.manifest import Manifest
from service.engine import routing
from service.engine.routing import choose, error_bound, of_session
from service.engine.types import Mode
from tests.service.engine.fakes import byte_vocabulary, make_manifest

CERTIFIED = make_manifest(byte_vocabulary(), contractive=True)
UNCERTIFIED = make_manifest(byte_vocabulary(), contractive=False)


@pytest.mark.parametrize(("k", "position", "bound"), [(5, 5, 0.0), (6, 5, 0.0), (4, 5, None), (0, 0, 0.0)])
def test_only_an_answer_that_knows_every_token_has_a_bound(k: int, position: int, bound: float | None) -> None:
    assert error_bound(CERTIFIED, k, position) == error_bound(UNCERTIFIED, k, position) == bound


@pytest.mark.parametrize(
    ("position", "window", "tolerance", "k"),
    [
        (100, None, None, 4),
        (100, 9, None, 9),
        (4, None, None, None),
        (9, 9, None, None),
        (100, None, 1.0, 1),
        (100, None, 0.125, 3),
        (100, 9, 0.125, 9),
        (100, 2, 0.125, None),
        (100, None, 1e-9, None),
        (10, None, 0.0, None),
    ],
)
def test_auto_takes_the_cheapest_window_whose_bound_will_do(
    position: int, window: int | None, tolerance: float | None, k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "error_bound", lambda _, k, position: 0.0 if k >= position else 0.5**k)
    assert choose(CERTIFIED, position, window=window, own=4, largest=16, tolerance=tolerance) == k


@pytest.mark.parametrize("manifest", [CERTIFIED, UNCERTIFIED], ids=["contractive", "not contractive"])
@pytest.mark.parametrize("tolerance", [None, 1.0, 0.0])
@pytest.mark.parametrize("window", [None, 9])
def test_auto_runs_everything_where_nothing_is_known_of_a_window(
    manifest: Manifest, window: int | None, tolerance: float | None
) -> None:
    assert choose(manifest, 100, window=window, own=4, largest=16, tolerance=tolerance) is None


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
