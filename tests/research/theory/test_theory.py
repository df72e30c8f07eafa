"""Tests that the measured curves stay within the theorems' bounds, that the check notices a wrong constant and an
unstable system, and that the bounds are close to what they bound where they can be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.page import with_tables
from research.theory import __main__ as program
from research.theory import descent
from research.theory.__main__ import FIGURES, PAGE, main
from research.theory.curve import departures
from research.theory.descent import CONSTANT, DECAYING, descend, growth, proposition2, theorem1
from research.theory.instance import KINDS, UNITS, Constants, Instance, Kind, size
from research.theory.lemmas import lemma1, lemma2, lemma3, served
from research.theory.results import compute, stages
from research.theory.tables import all_of

ROOT = Path(__file__).parents[3]

SEEDS = (0, 1)
Lemma = Callable[[Instance, Constants], dict[str, Any]]
LEMMAS: tuple[Lemma, ...] = (lemma1, lemma2, lambda instance, constants: lemma3(instance, constants, 0))
IDS = ("lemma 1", "lemma 2", "lemma 3")


def nothing() -> None:
    """Ignores progress."""


@pytest.fixture(scope="module")
def trained() -> Instance:
    return Instance.random("gaussian", 0.75, SEEDS, tokens=42)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lemma", LEMMAS, ids=IDS)
def test_a_measured_curve_stays_within_its_bound(lemma: Lemma, kind: Kind) -> None:
    instance = Instance.random(kind, 0.75, SEEDS)
    assert departures(lemma(instance, Constants.of(instance))) == []


@pytest.mark.parametrize(("lemma", "share"), [(lemma1, 0.99), (lemma2, 0.4), (LEMMAS[2], 0.8)], ids=IDS)
def test_an_aligned_instance_almost_attains_the_bound(lemma: Lemma, share: float) -> None:
    instance = Instance.random("aligned", 0.75, SEEDS)
    assert share < lemma(instance, Constants.of(instance))["largest_ratio"] <= 1


@pytest.mark.parametrize("lemma", LEMMAS, ids=IDS)
def test_a_lambda_that_is_a_fifth_too_small_is_noticed(lemma: Lemma) -> None:
    instance = Instance.random("aligned", 0.75, SEEDS)
    wrong = Constants.of(replace(instance, factor=0.6))
    assert departures(lemma(instance, wrong))


@pytest.mark.parametrize("lemma", LEMMAS[:2], ids=IDS[:2])
def test_an_unstable_system_is_noticed(lemma: Lemma) -> None:
    """The system's W has the norm 1.5, and the constants are those of 0.75."""
    instance = Instance.random("orthogonal", 0.75, SEEDS)
    grown = torch.cat([2 * instance.weights[..., :UNITS], instance.weights[..., UNITS:]], dim=-1)
    assert departures(lemma(replace(instance, weights=grown), Constants.of(instance)))


def test_the_gradient_is_that_of_finite_differences() -> None:
    instance = Instance.random("gaussian", 0.9, SEEDS, tokens=20)
    gradient, _ = instance.gradients(instance.weights, [7])
    change = torch.randn(instance.weights.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ahead, behind = (instance.gradients(instance.weights + step * change, [7])[1] for step in (1e-6, -1e-6))
    slope = (gradient * change).sum((-1, -2))
    assert torch.allclose((ahead - behind) / 2e-6, slope, rtol=1e-6, atol=1e-9)


def test_a_window_reads_the_last_tokens_from_the_zero_state() -> None:
    instance = Instance.random("gaussian", 0.9, SEEDS, tokens=20)
    together = instance.states(instance.weights.expand(-1, 2, -1, -1), [20, 7])
    cut = replace(instance, inputs=instance.inputs[:, :, -7:])
    assert torch.allclose(together[:, 1:], cut.states(instance.weights, [7]), rtol=0, atol=1e-14)
    assert torch.allclose(together[:, :1], instance.states(instance.weights, [20]), rtol=0, atol=1e-14)


def test_the_projection_returns_the_nearest_weights_of_omega() -> None:
    """Projected weights are in Omega, and no weights of Omega are nearer."""
    instance = Instance.random("gaussian", 0.75, range(200), tokens=2)
    outside = 3 * instance.weights
    nearest = instance.project(outside)
    assert torch.linalg.matrix_norm(nearest[..., :UNITS], 2).max() <= 0.75 * (1 + 1e-12)
    inside = instance.project(torch.roll(outside, 1, 0))
    toward = ((outside - nearest) * (inside - nearest)).sum((-1, -2))
    assert toward.max() <= 1e-12


def test_the_weights_stay_within_the_bound_of_proposition_2(trained: Instance) -> None:
    found = proposition2(trained, Constants.of(trained), 40, nothing)
    assert departures(found) == []
    ratios = [one["largest_ratio"] for rate in found if "t" in rate["rate"] for one in rate["curves"][:3]]
    assert len(ratios) == 9
    assert min(ratios) > 0


def test_a_gamma_that_is_too_small_is_noticed(trained: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = descend

    def short(*parts: Any) -> Any:
        found = whole(*parts)
        return replace(found, gap=found.gap / 1e3)

    monkeypatch.setattr(descent, "descend", short)
    assert any(
        "times its bound" in line for line in departures(proposition2(trained, Constants.of(trained), 8, nothing))
    )


def test_constants_of_omega_that_the_path_exceeds_are_noticed(trained: Instance) -> None:
    constants = Constants.of(trained)
    small = replace(constants, loss=constants.loss * 1e-6, curvature=constants.curvature * 1e-6)
    assert any("those of Omega" in line for line in departures(proposition2(trained, small, 5, nothing)))


def test_a_small_difference_leaves_the_bound_only_without_the_decaying_rate() -> None:
    instance = Instance.random("gaussian", 0.75, SEEDS, tokens=20)
    decaying, constant = (growth(instance, 250, rate, nothing) for rate in (DECAYING, CONSTANT))
    assert departures([decaying, constant]) == []
    assert decaying["left_at"] == [None, None]
    assert all(1 < step <= 250 for step in constant["left_at"])


def test_too_few_steps_to_leave_the_bound_are_noticed(trained: Instance) -> None:
    assert any("without 1/t" in line for line in departures(growth(trained, 5, CONSTANT, nothing)))


def test_the_outputs_stay_within_the_bound_of_theorem_1() -> None:
    instance = Instance.random("gaussian", 0.75, SEEDS, tokens=62)
    constants = Constants.of(instance)
    assert departures(theorem1(instance, constants, 15, nothing)) == []
    wrong = replace(constants, weights=constants.weights * 1e-9, states=constants.states * 1e-9)
    assert any("times its bound" in line for line in departures(theorem1(instance, wrong, 5, nothing)))


def test_the_certificate_of_the_served_rnn_asks_for_no_more_tokens_than_lemma_1() -> None:
    found = served()
    assert departures(found) == []
    assert all(0.5 * need["formula"] < need["certificate"] for need in found["needed"])


def test_the_page_shows_the_stored_results() -> None:
    """The stored results are within their bounds."""
    found = json.loads((ROOT / FIGURES / "theory.json").read_text(encoding="utf-8"))
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert with_tables(page, all_of(found), "theory.md") == page
    assert len(found["seeds"]) == 10
    assert departures({key: found[key] for key in found if key != "seeds"}) == []


def test_every_statement_is_measured_and_counted_as_progress() -> None:
    """Few steps are enough for every bound, but not for a small difference to leave the bound without 1/t."""
    steps = {"steps": 3, "growth_steps": 3, "theorem_steps": 2}
    done: list[None] = []
    found = compute([5], lambda: done.append(None), **steps)
    assert len(done) == stages(**steps)
    assert set(all_of(found)) == set(all_of(json.loads((ROOT / FIGURES / "theory.json").read_text(encoding="utf-8"))))
    (line,) = departures({key: found[key] for key in found if key != "seeds"})
    assert "without 1/t, a small difference grows beyond N^(alpha beta) does not hold" in line


def test_the_command_writes_everything_and_names_a_curve_that_leaves_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads((ROOT / FIGURES / "theory.json").read_text(encoding="utf-8"))
    found["lemma 2"][4]["largest_ratio"] = 1.5
    monkeypatch.setattr(program, "compute", lambda *_: found)
    page = tmp_path / "page.md"
    page.write_text((ROOT / PAGE).read_text(encoding="utf-8"))
    assert main(["--json", str(tmp_path / "theory.json"), "--figures", str(tmp_path), "--page", str(page)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "lemma 2 kind orthogonal factor 0.75: the measured curve is 1.5 times its bound" in said
    assert {path.name for path in tmp_path.glob("*.png")} == {
        path.name for path in (ROOT / FIGURES).glob("theory_*.png")
    }
    assert json.loads((tmp_path / "theory.json").read_text())["seeds"] == found["seeds"]
    assert "| orthogonal | 0.75 | 1.5 |" in page.read_text()


def test_the_command_refuses_no_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--seeds", "0"])
    assert ended.value.code == 2
    assert "--seeds must be at least 1, not 0" in capsys.readouterr().err


def test_an_instance_without_seeds_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one seed"):
        Instance.random("gaussian", 0.5, ())


def test_the_size_of_weights_is_their_frobenius_norm() -> None:
    assert size(torch.full((1, 1, 3, 3), 2.0)).item() == pytest.approx(6.0)
