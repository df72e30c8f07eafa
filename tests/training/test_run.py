"""Tests `wane export` of runs and of bundles, and `wane cache`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.training.corpora import experiment
from wane.cli import main
from wane.training.config import ModelConfig
from wane.training.run import train
from wane.training.run_folder import RunFolder

EXPERIMENT = Path(__file__).parents[2] / "training" / "experiments" / "shop.toml"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps. Its model forgets fast, so that the export is fast."""
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
    printed = " ".join(capsys.readouterr().err.split())
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


def test_versions_are_exported_side_by_side_on_request(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(run_folder), "--bundles", str(tmp_path)]
    assert main([*command, "--keep-versions"]) == 0
    assert main([*command, "--version", "2"]) == 0
    assert sorted(path.name for path in (tmp_path / "tiny").iterdir()) == ["1", "2"]
    assert main(["export", str(tmp_path / "tiny" / "2"), "--bundles", str(tmp_path)]) == 0
    versions = [json.loads(path.read_text())["version"] for path in sorted(tmp_path.glob("tiny/*/manifest.json"))]
    assert versions == ["1", "2", "3"]

    assert main(["export", str(run_folder), "--bundles", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    assert main(["export", str(run_folder), "--bundles", str(tmp_path / "other"), "--keep-versions"]) == 2
    assert "is a bundle. To keep it beside other versions, move it" in " ".join(capsys.readouterr().err.split())


def test_a_bundle_is_exported_again_as_its_next_version(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run_folder), "--bundles", str(tmp_path / "first")]) == 0
    first = tmp_path / "first" / "tiny"
    assert main(["export", str(first), "--bundles", str(tmp_path / "second")]) == 0
    second = tmp_path / "second" / "tiny"
    assert json.loads((second / "manifest.json").read_text())["version"] == "2"
    assert (first / "weights.safetensors").read_bytes() == (second / "weights.safetensors").read_bytes()
    capsys.readouterr()
    assert main(["export", str(first), "--bundles", str(tmp_path / "third"), "--data", str(tmp_path)]) == 2
    assert "exported without an evaluation: omit --data" in " ".join(capsys.readouterr().err.split())


def test_a_cache_is_fitted_to_a_bundle(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run_folder), "--bundles", str(tmp_path / "plain")]) == 0
    before = json.loads((tmp_path / "plain" / "tiny" / "manifest.json").read_text())
    capsys.readouterr()
    data = json.loads((run_folder / "experiment.json").read_text())["data"]["path"]
    command = ["cache", str(tmp_path / "plain" / "tiny"), "--data", data, "--length", "16"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("no cache", "16", "2,048"))

    assert main([*command, "--bundles", str(tmp_path / "cached")]) == 0
    manifest = json.loads((tmp_path / "cached" / "tiny" / "manifest.json").read_text())
    assert (manifest["version"], manifest["cache"]["length"]) == ("2", 16)
    quality, alone = manifest["quality"], before["quality"]["recurrent"]["valid"]["per_token"]
    assert quality["without_cache"]["valid"]["per_token"] == pytest.approx(alone, rel=1e-4)
    assert quality["recurrent"]["valid"]["per_token"] <= alone * 1.0001


def test_a_cache_is_fitted_to_half_of_data_that_the_bundle_was_not_trained_on(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run_folder), "--bundles", str(tmp_path / "plain")]) == 0
    other = tmp_path / "other.txt"
    other.write_text("the cat sat on the mat\n" * 200, encoding="utf-8")
    command = ["cache", str(tmp_path / "plain" / "tiny"), "--data", str(other)]
    capsys.readouterr()
    assert main([*command, "--bundles", str(tmp_path / "cached")]) == 0
    manifest = json.loads((tmp_path / "cached" / "tiny" / "manifest.json").read_text())
    quality = manifest["quality"]
    assert quality["recurrent"]["test"]["per_token"] < quality["without_cache"]["test"]["per_token"] / 2
    other.write_text("too short\n", encoding="utf-8")
    assert main(command) == 2
    assert "too few to fit a cache" in " ".join(capsys.readouterr().err.split())


def test_a_cache_is_not_fitted_to_an_int8_bundle(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run_folder), "--bundles", str(tmp_path), "--precision", "int8"]) == 0
    capsys.readouterr()
    assert main(["cache", str(tmp_path / "tiny-int8"), "--bundles", str(tmp_path)]) == 2
    assert "has the precision int8: fit the cache to the float32 bundle" in " ".join(capsys.readouterr().err.split())


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
    assert "the existing bundle cannot be read" in capsys.readouterr().err


def test_a_full_disk_ends_the_training_in_one_line_and_keeps_the_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.save("last.pt", {"step": 1})
    (tmp_path / "last.pt.partial").symlink_to("/dev/full")

    def full(*_: object) -> None:
        folder.save("last.pt", {"step": 2, "weights": torch.zeros(1000)})

    monkeypatch.setattr("wane.training.cli.train", full)
    assert main(["train", str(EXPERIMENT), "--run", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(
        f"error: {tmp_path}/last.pt.partial: No space left on device: free space, and run the same"
    )
    assert printed.count("\n") == 1
    assert torch.load(tmp_path / "last.pt", weights_only=True) == {"step": 1}
