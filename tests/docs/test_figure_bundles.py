"""Figures and tables are of the bundles that ship: what is kept of a measurement names the bundles by their hashes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.summary import bundle_hashes
from wane.models.bundle_checks import read_manifest

ROOT = Path(__file__).parents[2]
KEPT = sorted([*(ROOT / "docs" / "figures").glob("*.json"), *(ROOT / "research" / "figures").glob("*.json")])

WITHOUT_HASHES = {
    *("churn.json", "clusters.json", "lookup.json", "parallel_scan.json", "parked.json", "precision.json"),
    *("processes.json", "routing.json", "shadow.json", "soak.json", "start.json", "stores.json", "storm.json"),
    *("threads.json", "tracing.json", "proofs.json", "scaling.json", "scaling_check.json", "scaling_costs.json"),
    "stability_price.json",
}
"""Measured before hashes were kept. A measurement that is made again leaves this list."""


def test_a_measurement_without_hashes_is_an_old_one() -> None:
    without = {path.name for path in KEPT if "bundles" not in json.loads(path.read_text(encoding="utf-8"))}
    assert without - {"bench.json"} == WITHOUT_HASHES


@pytest.mark.parametrize("path", [path for path in KEPT if path.name not in WITHOUT_HASHES], ids=lambda path: path.name)
def test_a_measurement_is_of_the_bundles_that_ship(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    if path.name == "bench.json":
        for name, facts in document["models"].items():
            if (ROOT / "models" / "bundles" / name).exists():
                manifest = read_manifest(ROOT / "models" / "bundles" / name)
                assert facts["weights"] == manifest.files[manifest.weights]
                assert facts["window"] == manifest.files[manifest.graphs["window"]]
    else:
        assert document["bundles"] == bundle_hashes(document["bundles"])
