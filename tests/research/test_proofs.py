"""Tests of the figures that compare certificates with observations: the measurement, the stored JSON, and the page that
shows the figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress

from benchmarks.page import with_tables
from research import proofs
from research.proof_results import MedianAndLargest, Results
from research.proof_tables import tables
from research.prover import Never, Prover, Tokens, never_interrupted
from wane.models.bundle import Bundle
from wane.models.bundle_checks import read_manifest
from wane.models.reference import Reference

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "models" / "bundles"
KEPT = ROOT / "research" / "figures" / "proofs.json"
PAGE = ROOT / "research" / "stability.md"
STREAM = np.random.default_rng(0).integers(3, 2048, size=320)
EMPTY = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in ("models", "distances", "answers"))


def measure(path: Path, name: str = "rnn-stable", positions: int = 4) -> Results:
    with Progress(disable=True) as progress:
        proofs.measure(Bundle.open(BUNDLES / name), STREAM, "valid", positions, 2, path, progress)
    return Results.read(path)


def test_the_figures_of_a_bundle_are_within_its_bounds_and_proofs_are_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "WINDOWS", (64, 16))
    figures = measure(tmp_path / "found.json").models["rnn-stable"]
    certificate = read_manifest(BUNDLES / "rnn-stable").certificate
    assert sorted(figures.windows) == [16, 64]
    assert figures.smallest_window == certificate.smallest_window(1e-3)
    for k, window in figures.windows.items():
        assert (window.positions, window.violations) == (4, 0)
        assert window.worst_case == certificate.state_error[k - 1]
        assert window.observed.largest is not None
        assert 0 < window.observed.largest < window.worst_case
        proved = window.proved
        assert proved.curve <= proved.request <= proved.direction <= window.same_top1
    assert figures.windows[64].proved.direction > 0


def test_a_wrong_state_is_counted_as_a_violation() -> None:
    prover = Prover(Bundle.open(BUNDLES / "rnn-stable"))
    with Progress(disable=True) as progress:
        never = never_interrupted(prover.reference, STREAM, 256, 4, progress)
        elsewhere = Never(never.ends, -never.hidden)
        assert prover.figures(STREAM, elsewhere, 64, progress).violations == 4


def test_finished_measurements_are_kept_and_measurements_of_other_weights_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setattr(proofs, "WINDOWS", (16,))
    first = measure(path)
    began: list[int] = []

    def counted(reference: Reference, stream: Tokens, first: int, count: int, progress: Progress) -> Never:
        began.append(count)
        return never_interrupted(reference, stream, first, count, progress)

    monkeypatch.setattr(proofs, "never_interrupted", counted)
    assert measure(path) == first
    assert began == []
    record = json.loads(path.read_text())
    record["models"]["rnn-stable"]["weights"] = "0" * 64
    path.write_text(json.dumps(record))
    assert measure(path) == first
    assert began == [4]


def test_rendering_drops_measurements_of_other_weights(tmp_path: Path) -> None:
    kept = Results.read(KEPT)
    stale = kept.models["rnn-stable"].model_copy(update={"weights": "0" * 64})
    kept.having("lstm", stale).having("gone", stale).write(tmp_path / "found.json")
    (tmp_path / "page.md").write_text(EMPTY)
    paths = {"json": "found.json", "figure": "figure.png", "page": "page.md"}
    words = [word for option, name in paths.items() for word in (f"--{option}", str(tmp_path / name))]
    assert proofs.main(["--render", "--bundles", str(BUNDLES), *words]) == 0
    found = Results.read(tmp_path / "found.json")
    assert {name: model.windows for name, model in found.models.items()} == {
        name: model.windows for name, model in {**kept.models, "gone": stale}.items() if name != "lstm"
    }
    assert "| `rnn-stable` |" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "--data"),
        (["--data", "x", "--only", "no-such"], "has no bundle no-such, only gated"),
        (["--data", "x", "--positions", "0"], "at least 1"),
        (["--data", "x", "--split", "test"], "has results of the split valid"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_error_names_an_invalid_option(words: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        proofs.main(["--bundles", str(BUNDLES), "--json", str(KEPT), *words])
    assert fault in capsys.readouterr().err


def test_infinite_numbers_are_stored_as_none() -> None:
    assert MedianAndLargest.of(np.array([1.0, 2.0, np.inf])) == MedianAndLargest(median=2.0, largest=None)


def test_the_page_shows_the_stored_figures() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text, tables(Results.read(KEPT)), str(PAGE)) == text


def test_the_stored_figures_are_of_the_shipped_weights_without_violations() -> None:
    results = Results.read(KEPT)
    assert all(window.violations == 0 for figures in results.models.values() for window in figures.windows.values())
    shipped = {path.name for path in BUNDLES.iterdir() if path.is_dir()}
    assert len(shipped & {*results.models}) >= 3
    for name in shipped & {*results.models}:
        figures, manifest = results.models[name], read_manifest(BUNDLES / name)
        assert figures.weights == manifest.files[manifest.weights]
        assert figures.layers == manifest.certificate.layers
        assert figures.smallest_window == manifest.certificate.smallest_window(1e-3)
        for k, window in figures.windows.items():
            assert window.worst_case == manifest.certificate.state_error_at(k)
            assert window.worst_case_variation == manifest.certificate.error_bound_at(k)


def test_every_shipped_bundle_without_a_cache_has_figures_of_at_least_5000_positions() -> None:
    results = Results.read(KEPT)
    for path in BUNDLES.iterdir():
        if path.is_dir() and read_manifest(path).cache is None:
            assert results.models[path.name].windows[64].positions >= 5000
