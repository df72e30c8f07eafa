"""Tests that the figures in the documentation were measured on the shipped bundles, or on bundles that an experiment
trains again. The JSON of a measurement contains the hashes of the measured bundles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.summary import BUNDLES, bundle_hashes
from research.proof_results import Results
from research.proofs import current
from tests.docs.figures import EVENTS
from wane.models.bundle_checks import read_manifest

ROOT = Path(__file__).parents[2]
KEPT = sorted([*(ROOT / "docs" / "figures").glob("*.json"), *(ROOT / "research" / "figures").glob("*.json")])

OF_OWN_RUNS = {"stability_price.json"}
"""The files of measurements that train their own models and use no shipped bundle."""

TRAINED = {path.stem for path in (ROOT / "training" / "experiments").glob("*.toml")}
"""The names of the experiments that `wane train` trains."""

PROOFS, SERVED = (ROOT / "research" / "figures" / name for name in ("proofs.json", "served_proofs.json"))


def test_every_stored_measurement_names_its_bundles() -> None:
    without = {path.name for path in KEPT if "bundles" not in json.loads(path.read_text(encoding="utf-8"))}
    assert without == OF_OWN_RUNS | {"bench.json", PROOFS.name}


def test_the_figures_of_proofs_belong_to_the_shipped_weights_and_certificates() -> None:
    """The figures of SERVED are those of the bundles with a cache."""
    kept = Results.read(PROOFS)
    served = json.loads(SERVED.read_text(encoding="utf-8"))["models"]
    shipped = {path.name for path in BUNDLES.iterdir() if path.is_dir()} - {EVENTS}
    assert shipped <= {*kept.models, *served} <= shipped | TRAINED
    assert current(kept, BUNDLES) == kept


@pytest.mark.parametrize(
    "path", [path for path in KEPT if path.name not in OF_OWN_RUNS | {PROOFS.name}], ids=lambda path: path.name
)
def test_a_measurement_belongs_to_the_shipped_bundles(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    if path.name == "bench.json":
        for name, facts in document["models"].items():
            if (ROOT / "models" / "bundles" / name).exists():
                manifest = read_manifest(ROOT / "models" / "bundles" / name)
                assert facts["weights"] == manifest.files[manifest.weights]
    else:
        hashes = bundle_hashes(document["bundles"])
        assert document["bundles"] | hashes == document["bundles"]
        assert {*document["bundles"]} - {*hashes} <= TRAINED
