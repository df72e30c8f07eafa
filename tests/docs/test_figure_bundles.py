"""Figures and tables are of the bundles that ship: what is kept of a measurement names the bundles by their hashes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.summary import BUNDLES, bundle_hashes
from research.proof_results import Results
from research.proofs import current
from wane.models.bundle_checks import read_manifest

ROOT = Path(__file__).parents[2]
KEPT = sorted([*(ROOT / "docs" / "figures").glob("*.json"), *(ROOT / "research" / "figures").glob("*.json")])

OF_OWN_RUNS = {"stability_price.json"}
"""Measurements of models that they train themselves."""

PROOFS = ROOT / "research" / "figures" / "proofs.json"


def test_every_measurement_names_its_bundles() -> None:
    without = {path.name for path in KEPT if "bundles" not in json.loads(path.read_text(encoding="utf-8"))}
    assert without == OF_OWN_RUNS | {"bench.json", PROOFS.name}


def test_the_proofs_are_of_the_weights_and_certificates_that_ship() -> None:
    kept = Results.read(PROOFS)
    assert set(kept.models) == {path.name for path in BUNDLES.iterdir() if path.is_dir()}
    assert current(kept, BUNDLES) == kept


@pytest.mark.parametrize(
    "path", [path for path in KEPT if path.name not in OF_OWN_RUNS | {PROOFS.name}], ids=lambda path: path.name
)
def test_a_measurement_is_of_the_bundles_that_ship(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    if path.name == "bench.json":
        for name, facts in document["models"].items():
            if (ROOT / "models" / "bundles" / name).exists():
                manifest = read_manifest(ROOT / "models" / "bundles" / name)
                assert facts["weights"] == manifest.files[manifest.weights]
    else:
        assert document["bundles"] == bundle_hashes(document["bundles"])
