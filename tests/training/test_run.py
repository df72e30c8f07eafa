"""Tests `wane export` of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.training.corpora import experiment
from wane.cli import main
from wane.training.config import ModelConfig
from wane.training.run import train


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps. Its model forgets fast, because the export of a long memory takes longer."""
    model = ModelConfig(cell="gated", hidden=16, layers=2, block="residual", feed_forward=8, contraction=0.5)
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train(experiment(model, steps=2, evaluate_every=1), None, folder, None, "none", Console(quiet=True))
    return folder


def contents(bundle: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in bundle.iterdir()}


def perplexity(bundle: Path) -> float:
    """Returns the validation perplexity in the manifest."""
    found: float = json.loads((bundle / "manifest.json").read_text())["quality"]["recurrent"]["valid"]["per_token"]
    return found


def test_an_export_replaces_a_bundle_of_the_same_version_only_on_request(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(run_folder), "--bundles", str(tmp_path)]
    bundle = tmp_path / "tiny"
    assert main(command) == 0
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["quality"]["recurrent"]["valid"]["per_token"] = 1.25
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    before = contents(bundle)
    capsys.readouterr()

    assert main(command) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert contents(bundle) == before
    assert f"{bundle} was not written: a bundle already exists: version 1, validation perplexity 1.250" in printed
    quality = json.loads((run_folder / "quality.json").read_text())["quality"]
    assert (
        f"the new bundle: version 1, validation perplexity {quality['recurrent']['valid']['per_token']:.3f}" in printed
    )
    assert "--replace" in printed

    assert main([*command, "--replace"]) == 0
    assert perplexity(bundle) == quality["recurrent"]["valid"]["per_token"]
    assert main([*command, "--version", "2"]) == 0
    assert json.loads((bundle / "manifest.json").read_text())["version"] == "2"


def test_an_export_is_refused_before_the_run_is_evaluated(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(*arguments: object) -> None:
        raise AssertionError("the run is evaluated though its bundle cannot be written")

    monkeypatch.setattr("wane.training.run.evaluate_opened", evaluated)
    monkeypatch.setattr("wane.training.run_folder.RunFolder.quality", lambda *arguments: None)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "manifest.json").write_text("{}")
    assert main(["export", str(run_folder), "--bundles", str(tmp_path)]) == 2
    assert "the existing bundle cannot be read" in capsys.readouterr().out
